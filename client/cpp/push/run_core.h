// SPDX-License-Identifier: Apache-2.0
//
// The state that a run and its pushes share: model, layout, epoch and plan.
#ifndef EMA_CLIENT_CPP_PUSH_RUN_CORE_H_
#define EMA_CLIENT_CPP_PUSH_RUN_CORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/gpu/pinned_ring.h"
#include "client/cpp/push/chunk_plan.h"
#include "client/cpp/transport/connection_count.h"
#include "client/cpp/transport/interrupt.h"
#include "ema/client.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// One rank of one run. Thread-safe; shared by the Run and its pushes.
class RunCore {
 public:
  // Joins the run. Errors of GetModel and OpenRun.
  static absl::StatusOr<std::shared_ptr<RunCore>> Open(std::shared_ptr<Client::Impl> client,
                                                       std::string_view model,
                                                       Client::RunOptions options,
                                                       SteadyTime deadline, Interrupt* interrupt);

  Client::Impl& client() const { return *client_; }
  const ForkGuard& fork_guard() const { return client_->fork_guard(); }
  const std::string& model() const { return info_.name; }
  const Manifest& manifest() const { return info_.manifest; }
  const RankLayout& layout() const { return layout_; }
  const ChunkPlan& chunks() const { return chunks_; }
  // Buffers for weights on GPUs; empty until a push has such weights.
  PinnedRing& ring() { return ring_; }
  int64_t rank() const { return options_.rank; }
  bool rejoins() const { return options_.rejoins; }
  int64_t imported_updates() const { return options_.imported_updates; }
  int64_t run_epoch() const ABSL_LOCKS_EXCLUDED(mu_);
  std::optional<Version> latest() const ABSL_LOCKS_EXCLUDED(mu_);
  RunPlan plan() const ABSL_LOCKS_EXCLUDED(mu_);
  int64_t plan_revision() const ABSL_LOCKS_EXCLUDED(mu_);
  bool may_omit_frozen() const ABSL_LOCKS_EXCLUDED(mu_);

  // Waits until all ranks have joined. Joins again first if MarkNotReady() was called.
  // DEADLINE_EXCEEDED: the message names the missing ranks.
  absl::Status WaitReady(SteadyTime deadline, Interrupt* interrupt) ABSL_LOCKS_EXCLUDED(mu_);
  // Fetches the plan from the server.
  absl::Status RefreshPlan(SteadyTime deadline, Interrupt* interrupt) ABSL_LOCKS_EXCLUDED(mu_) {
    return Join(deadline, interrupt).status();
  }
  // Makes the next WaitReady() join again, because the server does not know the run (any more).
  void MarkNotReady() ABSL_LOCKS_EXCLUDED(mu_);

  // With `retry`, retries like the calls of Client; otherwise tries once. `give_up_reason`: see
  // QueryPushRequest.
  absl::StatusOr<PushProgress> QueryPush(int64_t step, bool abandon_if_unfinished,
                                         SteadyTime deadline, Interrupt* interrupt, bool retry,
                                         std::string_view give_up_reason = {});

  // Starts `push`. FAILED_PRECONDITION, SESSION_BUSY: another push of this run has not ended.
  // UNAVAILABLE: the system has no thread for it.
  absl::Status Start(const std::shared_ptr<PendingPush::Impl>& push) ABSL_LOCKS_EXCLUDED(push_mu_);
  // Abandons the running push, if there is one.
  void EndPush() ABSL_LOCKS_EXCLUDED(push_mu_);

  // The number of connections that the next push over gRPC should use. After the push, NoteSpeed()
  // records its speed, or NoteFewerConnections() that not all of them could be opened.
  int64_t connection_count() const ABSL_LOCKS_EXCLUDED(mu_);
  void NoteSpeed(double bytes_per_second) ABSL_LOCKS_EXCLUDED(mu_);
  void NoteFewerConnections() ABSL_LOCKS_EXCLUDED(mu_);

  // Records a version that this run has made in `run_epoch`, and the plan after it.
  void OnCommit(int64_t run_epoch, const Version& version, RunPlan plan) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<bool> IsDue(const TrainingTime& now) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  RunCore(std::shared_ptr<Client::Impl> client, ModelInfo info, Client::RunOptions options,
          RankLayout layout, int64_t chunk_bytes);

  // Calls OpenRun once, with retries. Returns the missing ranks; none: the run is ready.
  absl::StatusOr<std::vector<int64_t>> Join(SteadyTime deadline, Interrupt* interrupt)
      ABSL_LOCKS_EXCLUDED(mu_);
  bool HasBeenReady() const ABSL_LOCKS_EXCLUDED(mu_);
  // Adopts the content of a reply, unless a newer one has been adopted: one with a later version,
  // or with the same version and a later plan revision.
  void TakeLocked(std::optional<Version> latest, RunPlan plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::shared_ptr<Client::Impl> client_;
  const ModelInfo info_;
  const Client::RunOptions options_;
  const RankLayout layout_;
  const ChunkPlan chunks_;
  PinnedRing ring_;

  absl::Mutex push_mu_;  // Never acquired while a mutex of a push is held.
  std::weak_ptr<PendingPush::Impl> push_ ABSL_GUARDED_BY(push_mu_);  // The last one.

  mutable absl::Mutex mu_;
  int64_t run_epoch_ ABSL_GUARDED_BY(mu_) = 0;
  bool ready_ ABSL_GUARDED_BY(mu_) = false;
  // Never reset: the run may have changed the model since, so RunOptions::resume is not sent again.
  bool has_been_ready_ ABSL_GUARDED_BY(mu_) = false;
  // Not OK: a newer run took over. Permanent, because a restarted server would not know that, and
  // would let this run take over again.
  absl::Status fenced_ ABSL_GUARDED_BY(mu_);
  std::optional<Version> latest_ ABSL_GUARDED_BY(mu_);
  RunPlan plan_ ABSL_GUARDED_BY(mu_);
  ConnectionCount connection_count_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_RUN_CORE_H_
