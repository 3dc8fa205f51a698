// SPDX-License-Identifier: Apache-2.0
//
// A group of servers, as one of them describes it.
#ifndef EMA_GROUP_INFO_H_
#define EMA_GROUP_INFO_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ema/version_id.h"

namespace ema {

// ema.v1.GetGroupResponse says what each field means.
struct GroupInfo {
  struct Registry {
    std::vector<std::string> endpoints;
    absl::Duration since_contact;
    absl::Duration latency;
    std::string error;  // Empty: the registry answers.
  };
  struct Member {
    std::string name;
    std::string boot;
    std::string address;
    std::string device;
    std::string version;
    int64_t memory_budget_bytes = 0;
    std::optional<int64_t> memory_reserved_bytes;
    std::optional<absl::Duration> missing;  // Nullopt: the process is there.
    std::string error;                      // Why the server did not answer; empty: it did.
  };
  // Known only to the model's home, the server with its first tensors.
  struct Progress {
    int64_t round = 0;
    int64_t run_epoch = 0;
    int64_t version = 0;
    int64_t step = 0;
    int64_t durable_step = 0;
    std::optional<absl::Duration> checkpoint_age;
    std::string slowest_member;    // Empty: the round waits for no partition.
    std::string slowest_activity;  // What it does, as the end of a sentence.
    int64_t slowest_partition = 0;
  };
  struct Model {
    std::string name;
    std::string state;  // Such as "serving"; "unknown": a newer server sent a state that this
                        // build does not know.
    int64_t incarnation = 0;
    std::vector<std::string> members;  // By partition; the first one is the home.
    std::optional<VersionId> checkpoint;
    int64_t checkpoint_step = 0;
    std::optional<int64_t> copy_step;  // Of the newest copy in the servers' --copy-dir.
    std::optional<Progress> progress;  // Nullopt: the home did not answer.
    absl::Duration degraded;           // Zero: steps can be committed.
    int64_t checkpoint_return_count = 0;
    absl::Duration commit_wait;  // At the server that describes the group.
    std::string problem;         // Empty: nothing is wrong with the model.
  };
  std::string group;
  std::string member;  // The server that describes the group.
  Registry registry;
  std::vector<Member> members;
  std::vector<Model> models;
  std::string last_incident;  // Empty: none is known.
  absl::Time last_incident_time;
  // What is wrong with the group and with its models. Empty: all is well.
  std::vector<std::string> problems;
};

}  // namespace ema

#endif  // EMA_GROUP_INFO_H_
