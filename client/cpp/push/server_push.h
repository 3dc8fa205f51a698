// SPDX-License-Identifier: Apache-2.0
//
// One push, from start to end, in its own thread.
#ifndef EMA_CLIENT_CPP_PUSH_SERVER_PUSH_H_
#define EMA_CLIENT_CPP_PUSH_SERVER_PUSH_H_

#include <grpcpp/completion_queue.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/gpu/pinned_ring.h"
#include "client/cpp/push/chunk_plan.h"
#include "client/cpp/push/cut_off_clock.h"
#include "client/cpp/push/group_part.h"
#include "client/cpp/push/opened_run.h"
#include "client/cpp/push/push_sender.h"
#include "client/cpp/push/run_core.h"
#include "client/cpp/push/running_push.h"
#include "client/cpp/push/staged_chunks.h"
#include "client/cpp/push/weights_gate.h"
#include "client/cpp/transport/interrupt.h"
#include "ema/client.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// A push to one server. Thread-safe. Owned by the PendingPush; the destructor joins the thread.
//
// The thread waits until the run is ready, sends header, chunks and commit, and waits for the
// reply. If that fails, it asks QueryPush for the missing ranges and sends these; once the weights
// are released, it can only send copies that are in pinned memory. If the push fails for good, it
// waits until gRPC holds no slice, and drops the step on the server. As a part of a push to a group
// it does not drop the step: the push as a whole does.
class ServerPush final : public RunningPush {
 public:
  // `gpus`: the result of PinnedRing::WaitForTrainerStreams() for the weights on GPUs; empty: no
  // shard is on a GPU. `part`: null, unless it is a part of a push to a group.
  ServerPush(std::shared_ptr<RunCore> run, PushArguments arguments, std::vector<Gpu*> gpus,
             const GroupPart* part);
  ~ServerPush() override;  // REQUIRES: done(), or never started.

  // To be called before Start(): the push then fails, as described at PushOptions::check, if the
  // bytes sent differ from the current ones.
  void CheckContent();
  void Start() override;

  const ForkGuard& fork_guard() const override { return run_->fork_guard(); }
  bool WaitReleased(absl::Duration max_wait, absl::Span<const GpuStream> streams) override;
  absl::StatusOr<Version> Wait() override ABSL_LOCKS_EXCLUDED(mu_);
  bool WaitDone(absl::Duration max_wait) override ABSL_LOCKS_EXCLUDED(mu_);
  bool done() const override ABSL_LOCKS_EXCLUDED(mu_);
  [[nodiscard]] bool Abandon() override;
  PendingPush::Stats stats() const override ABSL_LOCKS_EXCLUDED(mu_);

  // --- The steps of WaitReleased(), for a push that has several parts. ---

  // Waits until all bytes have left, at most `max_wait`, and releases the weights.
  bool TryRelease(absl::Duration max_wait) { return gate_.TryRelease(max_wait); }
  // Releases the weights now, and abandons the push.
  void ReleaseAndAbandon();
  // Waits until the weights are not read any more. REQUIRES: they have been released.
  void AwaitNoReader() { gate_.AwaitNoReader(); }
  // Makes the streams wait for the running copies. To be called after the release.
  void MakeStreamsWait(absl::Span<const GpuStream> streams);
  // True: the push has had no stream for some time, and the server has not asked it to wait. The
  // trainer should stop waiting.
  bool IsDisconnected() const;
  // A number that changes when the push gets further.
  int64_t progress_count() const;
  // Asks the server for the push's progress. True: it answered by `deadline`, perhaps with an
  // error.
  bool ServerResponds(SteadyTime deadline, Interrupt* interrupt);

  // The round of the last stream, as the part of a push to a group; 0: no stream was opened, so the
  // server does not know the step. To be called when the push has ended.
  int64_t begun_round() const { return begun_round_; }

 private:
  // The version of the step, and the plan after it.
  struct Committed {
    Version version;
    RunPlan plan;
  };

  // Only the push's thread calls these, except AwaitDone(), and HasFrozen(), which CheckContent()
  // calls before the thread starts.
  void RunThread();
  // Tries until the push succeeds or fails for good.
  absl::StatusOr<Committed> Push();
  absl::StatusOr<Committed> Attempt();
  class SendSlot;
  // Sets the bytes to be pushed, from the plan, unless the server may know the step already.
  // PLAN_CHANGED: the server needs the frozen tensors, but they were not given.
  absl::Status ChooseBytes();
  // This and Stage() do nothing if no weights are on GPUs. Creates `staged_` and allocates its
  // ring. Errors as PinnedRing::Allocate().
  absl::Status PrepareStaging();
  // Starts the copies of `chunks_to_send_` to the ring. Errors as StagedChunks::Stage().
  absl::Status Stage();
  absl::Status StagingStatus() const;
  // Adds to the push's error the pinned memory that it could not free, because a GPU hangs.
  absl::Status AnnotateLostMemory(const absl::Status& error) const;
  // True: the frozen tensors' values were given, or there are no frozen tensors.
  bool HasFrozen() const;
  // The digest of all sent bytes. Absent: unknown, or `was_written_`.
  std::optional<uint32_t> CheckedDigest();
  // Sends header, `chunks_to_send_` and commit. Frees the slot after the last chunk.
  absl::StatusOr<Committed> Send(SendSlot& slot);
  // Records that a stream begins. Returns its first message.
  v1::PushHeader BeginStream(Lane lane, const std::string& why_no_better) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Committed> FromResponse(const v1::PushResponse& response) ABSL_LOCKS_EXCLUDED(mu_);
  // True: a retry after `error` may succeed.
  bool MayRetry(const absl::Status& error);
  // Asks the server which ranges are missing, and sets `chunks_to_send_`. Returns the version if
  // the step has been committed. ABORTED, STEP_ABANDONED: missing chunks may not be read any more,
  // and are not in pinned memory.
  absl::StatusOr<std::optional<Committed>> QueryMissingChunks();
  // True: gRPC holds slices of the weights, or of pinned memory.
  bool HasSlices() const;
  // After an error: waits until gRPC holds no slice; breaks the connections if that takes long.
  void DropSlices();
  // Drops the step on the server. Returns the push's result: `error`, or the version if the step
  // had been committed.
  absl::StatusOr<Committed> DropStep(const absl::Status& error);
  std::vector<int64_t> AllChunks() const;
  static Committed TakeCommitted(PushProgress& progress);  // REQUIRES: kCommitted.
  // ABORTED, STALE_STEP: the step was committed with other weights than these. OK if they are
  // equal, or the digests cannot be compared.
  absl::Status CheckSameContent(const PushProgress& progress);
  bool AwaitDone(absl::Duration max_wait) const ABSL_LOCKS_EXCLUDED(mu_);
  // AwaitWhileReachable() of await_push.h, for the threads that wait for this push.
  bool AwaitWhileReachable(absl::Duration max_wait, absl::FunctionRef<bool(absl::Duration)> await);
  std::string Name() const;

  const std::shared_ptr<RunCore> run_;
  const int64_t step_;
  const TrainingTime time_;
  const std::vector<std::span<const std::byte>> shards_;
  const SteadyTime deadline_;
  const PushOptions options_;
  const std::vector<Gpu*> gpus_;
  const std::optional<GroupPart> part_;
  const SteadyTime start_;
  WeightsGate gate_;
  Interrupt interrupt_;
  // Paused while the thread stages, opens a lane, or waits for a slot.
  CutOffClock cut_off_clock_;
  // Used only by the threads that release the weights. If true, the streams in `options_` may no
  // longer exist.
  std::atomic<bool> streams_wait_ = false;

  // Relaxed: figures for stats().
  std::atomic<int64_t> total_bytes_ = 0;
  std::atomic<int64_t> sent_bytes_ = 0;
  std::atomic<int64_t> stream_count_ = 0;

  // Used only by the thread.
  bool omits_frozen_ = false;
  std::optional<StagedChunks> staged_;
  std::optional<ChunkWriter> writer_;
  std::vector<uint32_t> expected_crc32c_;  // By chunk; empty: not checked. Set before Start().
  bool was_written_ = false;               // Sent bytes differ from the expected ones.
  grpc::CompletionQueue queue_;
  PushSender sender_;
  std::vector<int64_t> chunks_to_send_;
  bool has_begun_ = false;   // A stream was opened, so the server may know the step.
  int64_t begun_epoch_ = 0;  // The run epoch of the last stream.
  int64_t begun_round_ = 0;  // The round of the last stream; also read when the push has ended.
  bool has_rejoined_ = false;
  int unexpected_failure_count_ = 0;

  mutable absl::Mutex mu_;
  mutable SteadyWait wait_;  // Woken when there is a result.
  std::optional<absl::StatusOr<Version>> result_ ABSL_GUARDED_BY(mu_);
  std::optional<PendingPush::ServerTime> server_time_ ABSL_GUARDED_BY(mu_);
  Lane lane_ ABSL_GUARDED_BY(mu_) = Lane::kGrpc;  // The transport of the last try.
  std::string lane_reason_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_SERVER_PUSH_H_
