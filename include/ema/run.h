// SPDX-License-Identifier: Apache-2.0
//
// A run that Client::OpenRun() has joined, through which a rank pushes steps.
#ifndef EMA_RUN_H_
#define EMA_RUN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ema/manifest.h"
#include "ema/model_info.h"
#include "ema/shard.h"
#include "ema/time.h"

namespace ema {

namespace client_internal {
class CurrentPush;
class OpenedRun;
class RunningPush;
}  // namespace client_internal

// The transport of the bytes of a push or a pull.
enum class Lane {
  kGrpc,
  // Memory that a client and a server on one host share. The sender copies the bytes into it, and
  // the receiver reads them there.
  kSharedMemory,
  // For the weights of a GPU: pinned memory into which the GPU copies them, and from which the
  // server reads them, so the client copies nothing. If the driver cannot pin such memory, the
  // server has no memory left for it, or the weights are rounded, kSharedMemory is used instead.
  kSharedWindow,
};
// "grpc", "shared memory", "shared window".
std::string_view LaneName(Lane lane);

// The progress of a step, as QueryPush reports it.
struct PushProgress {
  // kUnknown: never started, dropped, or no longer recorded. kAbandoned: dropped by this call.
  enum class State { kUnknown, kOpen, kCommitted, kAbandoned } state = State::kUnknown;
  std::optional<Version> version;  // If kCommitted.
  RunPlan plan;                    // If kCommitted: the plan after it.
  // CRC32C of the rank's bytes; if kCommitted, and no later step has been committed.
  std::optional<uint32_t> digest;
  bool rank_committed = false;  // The commit message of this rank has arrived.
  // A range of the rank's bytes, which are in its layout's order.
  struct Range {
    int64_t offset = 0;
    int64_t length_bytes = 0;
  };
  std::vector<Range> missing;          // If kOpen: ranges that this rank has not sent.
  std::vector<int64_t> missing_ranks;  // If kOpen: ranks without a commit message.
};

// A CUDA stream.
struct GpuStream {
  int device = 0;          // The GPU's index in this process.
  void* handle = nullptr;  // A CUstream or cudaStream_t; null: the default stream.

  friend bool operator==(const GpuStream&, const GpuStream&) = default;
};

// Says which weights of a push are in GPU memory.
struct GpuWeights {
  // The GPU index of each shard; negative: host memory. Empty: all are in host memory.
  std::vector<int> devices;
  // The trainer's streams, at least one for each GPU in `devices`. The weights are read after the
  // work that is queued on these streams when the push starts. They must live until the weights are
  // released, and none may be capturing a graph.
  std::vector<GpuStream> streams;
};

// The distance between neighbouring elements of a shard, in elements, by dimension. Empty:
// row-major and contiguous.
using Strides = std::vector<int64_t>;

// Options of a push; by default its weights are contiguous in host memory.
struct PushOptions {
  // Frozen tensors may have changed since the run's last successful push, so this push includes
  // them. All ranks must set it for the same step.
  bool frozen_changed = false;
  // Shards whose spans are GPU addresses. They are copied to pinned host memory (kept for the run;
  // RunOptions::max_staging_bytes) on a stream of the client.
  GpuWeights gpu_weights;
  // Strides of each shard; may be empty. A strided shard must be in host memory and is gathered
  // while it is sent, one chunk at a time. Its span begins at its first element and has the size of
  // a contiguous shard.
  std::vector<Strides> strides;
  // If all weights are in host memory, StartPush() computes their checksums before it returns;
  // otherwise this option has no effect. If the weights are then written before they have been
  // sent, the push commits nothing, even if the old values were written back later: DATA_LOSS,
  // DIGEST_MISMATCH.
  bool check = false;
};

class PendingPush;

// One rank of one run. Thread-safe; one push at a time: the next may start when the previous one
// has ended. May outlive its Client; until it is destroyed, it may call the functions in
// Client::Options.
class Run {
 public:
  ~Run();  // Ends a running push, as PendingPush::Abandon() does.
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  const Manifest& manifest() const;
  const RankLayout& layout() const;
  // The number of this run; later runs of the model have greater ones.
  int64_t run_epoch() const;
  int64_t rank() const;
  // The newest version known to this rank: from joining, or from its last push.
  std::optional<Version> latest() const;

  // The plan from the server's last reply to this rank: when it joined, or to its last push.
  RunPlan plan() const;
  // Fetches the plan from the server. For a trainer whose tracks are all paused, since it gets no
  // replies to pushes. Errors as OpenRun().
  absl::Status RefreshPlan(absl::Duration timeout = absl::ZeroDuration());

  // True if a push at `now` would update at least one track, by plan(). Does not call the server.
  // The same on all ranks only if each has had the reply to its last push. INVALID_ARGUMENT,
  // BAD_TIME: `now` lacks a unit that a track needs.
  absl::StatusOr<bool> IsDue(const TrainingTime& now) const;

  // Waits until all ranks have joined, at most for `timeout`; zero: Client::Options::timeout.
  // DEADLINE_EXCEEDED, RUN_INCOMPLETE: the message names the missing ranks. Other errors as
  // OpenRun().
  absl::Status WaitReady(absl::Duration timeout = absl::ZeroDuration());

  // Starts to push one step in the background and returns at once. `shards` are the bytes of this
  // rank's shards, in the order of layout().shards(), each row-major and contiguous, in the
  // manifest's dtypes. (If the layout has another wire dtype, in which layout() counts bytes, they
  // are rounded when they are sent.) The bytes are read in place, not copied, and must not change
  // or be freed until WaitReleased() has returned or the push has ended; GPU memory may then be
  // freed only in stream order, after the streams given to WaitReleased(). Frozen shards are not
  // read, and may be empty, if plan().may_omit_frozen and not `options.frozen_changed`. `timeout`
  // bounds the whole push, including the wait for other ranks. INVALID_ARGUMENT: a span does not
  // have the size of its shard, or strides do not fit it. FAILED_PRECONDITION, MODEL_BUSY: a push
  // of this rank is still running. INTERNAL, DEVICE: a GPU has failed, copies of an earlier push
  // have not ended, or there is no GPU. UNAVAILABLE: the system has no thread for the push.
  absl::StatusOr<std::unique_ptr<PendingPush>> StartPush(
      int64_t step, const TrainingTime& time, std::vector<std::span<const std::byte>> shards,
      absl::Duration timeout, PushOptions options = {});

  // StartPush() and Wait().
  absl::StatusOr<Version> Push(int64_t step, const TrainingTime& time,
                               std::vector<std::span<const std::byte>> shards,
                               absl::Duration timeout);

  // Returns the progress of a step of this run; `abandon_if_unfinished` drops it on all ranks
  // unless it has been committed. Blocks like the calls of Client. ABORTED, FENCED: the server has
  // a newer run, or was restarted and has none.
  absl::StatusOr<PushProgress> QueryPush(int64_t step, bool abandon_if_unfinished,
                                         absl::Duration timeout = absl::ZeroDuration());

  // Reports that this rank will never push `step`, because of `why` (its first KiB is sent): other
  // ranks that push it get ABORTED, STEP_SKIPPED, instead of waiting for this one. Tries once, at
  // most for `timeout`. Result and errors as QueryPush().
  absl::StatusOr<PushProgress> SkipStep(int64_t step, std::string_view why, absl::Duration timeout);

 private:
  friend class Client;
  explicit Run(std::shared_ptr<client_internal::OpenedRun> run);
  std::shared_ptr<client_internal::OpenedRun> run_;
  std::shared_ptr<client_internal::CurrentPush> current_push_;
};

// A push that runs in the background. It recovers from broken connections: QueryPush returns the
// missing ranges, and only these are sent again, until the weights are released; later only if the
// run's pinned memory holds the whole push. Thread-safe.
class PendingPush {
 public:
  ~PendingPush();  // As Abandon().
  PendingPush(const PendingPush&) = delete;
  PendingPush& operator=(const PendingPush&) = delete;

  // Waits until the weights will not be read any more; then they may change. True: all bytes have
  // left (gRPC has dropped every slice), or the push had ended. False: the wait was too long, and
  // the step has been abandoned (it does not commit on any rank, unless it had already). A wait is
  // too long after (1) `max_wait`; (2) one second without a stream to the server (it is
  // unreachable, or ranks have not joined); (3) five seconds in which no byte leaves and the server
  // does not answer a QueryPush.
  // Afterwards only bytes in pinned memory can be sent again: if the connection breaks, the step is
  // lost.
  //
  // Work that is queued after this call on `streams`, or on the streams of the push, may write
  // weights on a GPU: these streams wait for the copies, not the caller. The call itself waits only
  // until every copy has been started. None of the streams may be capturing.
  bool WaitReleased(absl::Duration max_wait, absl::Span<const GpuStream> streams = {});

  // Waits until the push has ended. Errors of Push in ema_service.proto; DEADLINE_EXCEEDED after
  // the push's timeout; INTERNAL, DEVICE: a GPU has failed; RESOURCE_EXHAUSTED, MEMORY_BUDGET: no
  // pinned memory for weights on a GPU. May be called again.
  absl::StatusOr<Version> Wait();

  // Waits like Wait(), but for at most `max_wait`, and with the limits of WaitReleased() for an
  // unreachable server. True: the push has ended, so Wait() will not block.
  bool WaitDone(absl::Duration max_wait);

  // True when Wait() would not block.
  bool done() const;

  // Drops the step on the server unless it has been committed. Waits until the weights are not read
  // any more, and at most a second for the server's reply. If a GPU hangs: the push's streams wait
  // for the remaining copies, whose pinned memory stays allocated until they have ended.
  void Abandon();

  // How the server spent the time from a stream's header to its reply; ema.v1.PushTiming says what
  // each field means.
  struct ServerTime {
    absl::Duration receive;
    absl::Duration fold;
    absl::Duration wait;
    absl::Duration commit;
  };
  // Progress so far, for logs and tests.
  struct Stats {
    int64_t total_bytes = 0;       // Bytes that this rank pushes; 0 until the run is ready.
    int64_t sent_bytes = 0;        // Passed to the transport, including resends.
    int64_t stream_count = 0;      // 1 if nothing broke.
    int64_t connection_count = 0;  // Connections or same-host lanes of the last try.
    // From the start until the last byte left; for weights on a GPU, until the last copy started.
    absl::Duration send_time;
    Lane lane = Lane::kGrpc;  // The transport of the last try.
    // Why no faster transport was used; empty: this is the fastest, or nothing was sent yet. A run
    // that had no same-host lane when it was opened usually keeps to gRPC.
    std::string lane_reason;
    // From the reply. Absent before the reply, and if QueryPush reported the commit.
    std::optional<ServerTime> server_time = std::nullopt;
  };
  Stats stats() const;

 private:
  friend class Run;
  explicit PendingPush(std::shared_ptr<client_internal::RunningPush> push);
  std::shared_ptr<client_internal::RunningPush> push_;
};

}  // namespace ema

#endif  // EMA_RUN_H_
