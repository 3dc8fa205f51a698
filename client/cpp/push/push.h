// SPDX-License-Identifier: Apache-2.0
//
// One push, from its start to its end, in a thread of its own.
#ifndef EMA_CLIENT_CPP_PUSH_PUSH_H_
#define EMA_CLIENT_CPP_PUSH_PUSH_H_

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
#include "client/cpp/push/grpc_sender.h"
#include "client/cpp/push/run_core.h"
#include "client/cpp/push/staged_chunks.h"
#include "client/cpp/push/weights_gate.h"
#include "client/cpp/transport/interrupt.h"
#include "ema/client.h"
#include "server/base/steady_wait.h"

namespace ema {

// Thread-safe. Owned by the PendingPush and by its run; the last of them joins the thread.
//
// What the thread does: wait until the run is ready; send header, chunks, commit; wait for the
// reply. When that breaks, ask QueryPush what has arrived, and send what is missing, or, once the
// weights are released, of their bytes only copies that are in pinned memory. When it fails for
// good, wait until gRPC holds no slice, and drop the step on the server.
class PendingPush::Impl {
 public:
  // `gpus`: what PinnedRing::Follow() has returned for `options.gpu_weights`; empty: no shard is on
  // a GPU.
  Impl(std::shared_ptr<client_internal::RunCore> run, int64_t step, const TrainingTime& time,
       std::vector<std::span<const std::byte>> shards, SteadyTime deadline, PushOptions options,
       std::vector<client_internal::Gpu*> gpus);
  ~Impl();  // REQUIRES: done(), or never started.

  // To be called before Start(), to have the push fail, as Run::StartPush() says, if what it sends
  // is not what the shards hold now.
  void CheckContent();
  void Start();

  const client_internal::ForkGuard& fork_guard() const { return run_->client().fork_guard(); }
  // As PendingPush; not to be called in a forked child.
  bool WaitReleased(absl::Duration max_wait, absl::Span<const GpuStream> streams);
  absl::StatusOr<Version> Wait() ABSL_LOCKS_EXCLUDED(mu_);
  bool WaitDone(absl::Duration max_wait) ABSL_LOCKS_EXCLUDED(mu_);
  bool done() const ABSL_LOCKS_EXCLUDED(mu_);
  // Of weights on GPUs, streams that have not been made to wait for copies are. False: the thread
  // is caught in a call of the GPU's driver that does not return; the caller must keep this object
  // for ever, and with it the run's pinned memory.
  [[nodiscard]] bool Abandon();
  Stats stats() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // The version that the step has become, and which pushes are due from there on.
  struct Committed {
    Version version;
    RunPlan plan;
  };

  // All below belong to the thread, but AwaitDone(), IsCutOff(), LeadStreams(), Answers() and
  // AwaitWhileThere(), and HasFrozen(), which CheckContent() calls before the thread is started.
  void RunThread();
  // Tries until it succeeds or fails for good.
  absl::StatusOr<Committed> Push();
  absl::StatusOr<Committed> Attempt();
  // Sets what is to be pushed, by the plan, unless the server may know of the step. PLAN_CHANGED:
  // it has not the frozen tensors' values, and they were not given.
  absl::Status ChooseBytes();
  // The next two do nothing if no weights are on GPUs. Makes `staged_` and allocates its ring.
  // Errors as PinnedRing::Allocate().
  absl::Status PrepareStaging();
  // Starts the copies of `chunks_to_send_` to the ring. Errors as StagedChunks::Stage().
  absl::Status Stage();
  absl::Status StagingStatus() const;
  // What a push ends with, and what it has not freed, because a GPU hangs.
  absl::Status AnnotateLostMemory(const absl::Status& error) const;
  // After the release: the streams go on when what is being copied has been.
  void LeadStreams(absl::Span<const GpuStream> streams);
  // True: the frozen tensors' values were given, or there are none.
  bool HasFrozen() const;
  // The digest of everything that was sent. Absent: it is not known, or `was_written_`.
  std::optional<uint32_t> CheckedDigest();
  // Header, `chunks_to_send_`, commit: through a same-host lane, if there is one, else by gRPC.
  absl::StatusOr<Committed> Send();
  class CutOffPause;
  // Notes that a stream begins. Returns its first message.
  v1::PushHeader BeginStream(Lane lane);
  absl::StatusOr<Committed> FromResponse(const v1::PushResponse& response) ABSL_LOCKS_EXCLUDED(mu_);
  // True: what failed with `error` may succeed next time.
  bool MayRetry(const absl::Status& error);
  // Asks what has arrived, and sets `chunks_to_send_`. The version, if the step has been committed.
  // ABORTED, STEP_ABANDONED: what is missing may not be read any more, and is in no pinned memory.
  absl::StatusOr<std::optional<Committed>> QueryMissingChunks();
  // True: gRPC has slices of the weights, or of where they are staged.
  bool HasSlices() const;
  // After an error: waits until gRPC holds no slice; gives the connection up if that takes long.
  void DropSlices();
  // Drops the step on the server. What the push ends with: `error`, or the version if the step had
  // been committed.
  absl::StatusOr<Committed> DropStep(const absl::Status& error);
  std::vector<int64_t> AllChunks() const;
  static Committed TakeCommitted(PushProgress& progress);  // REQUIRES: it says so.
  // ABORTED, STALE_STEP: the step was committed with other weights than these. OK also where that
  // cannot be known any more.
  absl::Status CheckSameContent(const PushProgress& progress);
  bool AwaitDone(absl::Duration max_wait) const ABSL_LOCKS_EXCLUDED(mu_);
  void SetCutOff(bool is_cut_off) ABSL_LOCKS_EXCLUDED(mu_);
  // True: there has been no stream, nor a server that asks to wait, for so long that the trainer is
  // not held any more.
  bool IsCutOff() const ABSL_LOCKS_EXCLUDED(mu_);
  // Asks the server for the push's progress. False: it gives no answer by `deadline`; an error is
  // one, too. For the threads that wait for this push.
  bool Answers(SteadyTime deadline, client_internal::Interrupt* interrupt);
  // Calls `await`, which waits as long as it is told, until it is true. False: `max_wait` is over,
  // or there is no stream, or nothing moves and the server does not answer.
  bool AwaitWhileThere(absl::Duration max_wait, absl::FunctionRef<bool(absl::Duration)> await);
  std::string Name() const;

  const std::shared_ptr<client_internal::RunCore> run_;
  const int64_t step_;
  const TrainingTime time_;
  const std::vector<std::span<const std::byte>> shards_;
  const PushOptions options_;
  const std::vector<client_internal::Gpu*> gpus_;
  const int64_t plan_revision_;
  const SteadyTime start_;
  const SteadyTime deadline_;
  client_internal::WeightsGate gate_;
  client_internal::Interrupt interrupt_;
  // Relaxed: of those who release. From then on the streams in `options_` may not live any
  // more.
  std::atomic<bool> has_led_ = false;

  // Relaxed: figures for stats().
  std::atomic<int64_t> total_bytes_ = 0;
  std::atomic<int64_t> sent_bytes_ = 0;
  std::atomic<int64_t> stream_count_ = 0;
  std::atomic<Lane> lane_ = Lane::kGrpc;

  // The thread's own.
  bool omits_frozen_ = false;
  std::optional<client_internal::StagedChunks> staged_;
  std::optional<client_internal::ChunkWriter> writer_;
  std::vector<uint32_t> expected_crc32c_;  // By chunk, as far as is checked. Set before the thread.
  bool was_written_ = false;               // Something has been sent that is not what was expected.
  grpc::CompletionQueue queue_;
  client_internal::GrpcSender sender_;
  std::vector<int64_t> chunks_to_send_;
  bool has_begun_ = false;   // The server may know of the step,
  int64_t begun_epoch_ = 0;  // as one of this run epoch.
  bool has_rejoined_ = false;
  bool avoids_lanes_ = false;  // One has broken.
  int odd_failure_count_ = 0;

  mutable absl::Mutex mu_;
  mutable SteadyWait wait_;  // Woken when there is a result.
  std::optional<absl::StatusOr<Version>> result_ ABSL_GUARDED_BY(mu_);
  std::optional<ServerTime> server_time_ ABSL_GUARDED_BY(mu_);
  SteadyTime cut_off_since_ ABSL_GUARDED_BY(mu_) = start_;  // SteadyTime::max(): it is not.

  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_CLIENT_CPP_PUSH_PUSH_H_
