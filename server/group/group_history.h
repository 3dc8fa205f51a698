// SPDX-License-Identifier: Apache-2.0
//
// What has happened to a group, as one of its servers has seen it.
#ifndef EMA_SERVER_GROUP_GROUP_HISTORY_H_
#define EMA_SERVER_GROUP_GROUP_HISTORY_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/group/model_record.h"

namespace ema::group {

// Compares what the registry says with what it said before: which processes are missing and since
// when, how many incarnations each model has begun, and the last incident. Thread-safe.
class GroupHistory {
 public:
  using Members = std::map<std::string, MemberRecord>;
  using Models = std::map<std::string, ModelRecord>;

  // To be called after each change of the registry, with all members and models.
  void Observe(const Members& members, const Models& models, absl::Time now)
      ABSL_LOCKS_EXCLUDED(mu_);

  // A process that has a partition of a model, and is not in the registry.
  struct Missing {
    std::string member;
    std::string boot;
    absl::Time since;  // When that was first observed.
  };
  std::vector<Missing> missing() const ABSL_LOCKS_EXCLUDED(mu_);
  // Nullopt: the process of the partition is not missing.
  std::optional<absl::Time> MissingSince(const Partition& partition) const ABSL_LOCKS_EXCLUDED(mu_);

  // How many times this server has seen the model begin another incarnation: it returned to a
  // checkpoint or a copy, perhaps because its tensors were moved. Incarnations that began less than
  // a minute after the previous one are not counted. Remains when the model is deleted.
  int64_t CheckpointReturnCount(std::string_view model) const ABSL_LOCKS_EXCLUDED(mu_);

  struct Incident {
    absl::Time time;
    std::string text;  // A sentence without a full stop.
  };
  // Nullopt: none is known.
  std::optional<Incident> last_incident() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  using Process = std::pair<std::string, std::string>;  // Member and boot.
  using MissingSinceMap = std::map<Process, absl::Time>;

  void ObserveMembers(const Members& members, const Models& models, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `before`: null if the model was not there at the previous call.
  // `missing`: the processes that were missing at the previous call.
  void ObserveModel(const std::string& model, const ModelRecord* before, const ModelRecord& record,
                    const MissingSinceMap& missing, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable absl::Mutex mu_;
  Models models_ ABSL_GUARDED_BY(mu_);
  MissingSinceMap missing_since_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, int64_t, std::less<>> checkpoint_return_counts_ ABSL_GUARDED_BY(mu_);
  std::optional<Incident> last_incident_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_GROUP_HISTORY_H_
