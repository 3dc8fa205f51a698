// SPDX-License-Identifier: Apache-2.0
//
// A pull from a group of servers.
#ifndef EMA_CLIENT_CPP_GROUP_GROUP_PULL_H_
#define EMA_CLIENT_CPP_GROUP_GROUP_PULL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/group/partition_map.h"
#include "client/cpp/transport/interrupt.h"
#include "ema/client.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// Pulls each partition from its server, all at once, into one target. The first partition with a
// selected tensor leads: the version that the user wants, such as the newest, is requested from it,
// and the version in its reply from the others. For one thread, which also calls the target.
class GroupPull {
 public:
  // All pointers outlive it. `request`: for the whole model, without an offset.
  GroupPull(Client::Impl* client, const PartitionMap* map, v1::PullRequest request,
            const Client::PullTarget* target, const std::function<void(int64_t)>* on_progress);

  // Errors as Client::Pull(). FENCED, NOT_HOME: the partitions are not those of the map any more.
  // To be called once.
  absl::StatusOr<PullInfo> Run(SteadyTime deadline, Interrupt* interrupt);

 private:
  // The pull from one server, which has a thread of its own.
  struct Part {
    size_t partition = 0;
    v1::PullRequest request;
    std::optional<PullInfo> header;
    std::span<std::byte> memory;  // Its part of the target.
    absl::StatusOr<PullInfo> result;
    bool has_ended = false;
  };

  // Sets `parts_`. Errors as PartitionMap::Split().
  absl::Status SelectParts();
  absl::StatusOr<PullInfo> Attempt(SteadyTime deadline, Interrupt* interrupt)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The work of a part's thread.
  void RunPart(Part& part, SteadyTime deadline, Interrupt* interrupt) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<PullInfo> PullPart(Part& part, SteadyTime deadline, Interrupt* interrupt)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The target of a part: waits until the target of the whole pull has been called.
  absl::StatusOr<std::span<std::byte>> AwaitMemory(Part& part, const PullInfo& header,
                                                   Interrupt* interrupt) ABSL_LOCKS_EXCLUDED(mu_);
  // Calls the user's target with the description of the whole, and divides its memory.
  absl::Status CallTarget() ABSL_LOCKS_EXCLUDED(mu_);
  // The description of the whole. INTERNAL: the headers are of different versions.
  absl::StatusOr<PullInfo> JoinHeaders() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits until `is_reached`, while it polls `interrupt` and reports progress. `inner` is fired
  // when `interrupt` is. False: it was not reached by `until`.
  bool AwaitUntil(SteadyTime until, Interrupt* interrupt, Interrupt* inner,
                  absl::FunctionRef<bool()> is_reached) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The same without a limit. If the model has moved meanwhile, fires `inner`, and sets the error.
  void AwaitHeaders(Interrupt* interrupt, Interrupt* inner, absl::FunctionRef<bool()> is_reached)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Calls `on_progress_` if more bytes have come.
  void ReportProgress();

  Client::Impl* const client_;
  const PartitionMap* const map_;
  v1::PullRequest request_;
  const Client::PullTarget& target_;
  const std::function<void(int64_t)>& on_progress_;

  std::atomic<int64_t> position_ = 0;  // Relaxed: for on_progress_.
  int64_t reported_position_ = 0;

  absl::Mutex mu_;
  SteadyWait wait_;  // Woken when a member below changes.
  // By partition; the first one leads. Changed only while no part's thread runs; the members of a
  // part, except the request, are used with `mu_` held.
  std::vector<Part> parts_;
  bool has_memory_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status first_error_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GROUP_GROUP_PULL_H_
