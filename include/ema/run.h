// SPDX-License-Identifier: Apache-2.0
//
// What a trainer's rank does with a run that Client::OpenRun() has joined: it pushes steps.
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

// What carries the bytes of a push or a pull.
enum class Lane {
  kGrpc,
  kSharedMemory,  // Of a client and a server on one host.
};
// "grpc", "shared memory".
std::string_view LaneName(Lane lane);

// What QueryPush says of a step.
struct PushProgress {
  // kUnknown: never begun, dropped, or too old to be remembered. kAbandoned: dropped by this call.
  enum class State { kUnknown, kOpen, kCommitted, kAbandoned } state = State::kUnknown;
  std::optional<Version> version;  // If kCommitted.
  RunPlan plan;                    // If kCommitted: from there on.
  std::optional<uint32_t>
      digest;                   // If kCommitted, and no later step is: CRC32C of the rank's bytes.
  bool rank_committed = false;  // The asking rank's commit message has come.
  // Of a rank's bytes, in its layout's order.
  struct Range {
    int64_t offset = 0;
    int64_t length_bytes = 0;
  };
  std::vector<Range> missing;          // If kOpen: what the asking rank has still to send.
  std::vector<int64_t> missing_ranks;  // If kOpen: those whose commit message has not come.
};

// A stream of a GPU, as CUDA's driver and runtime know it.
struct GpuStream {
  int device = 0;          // The GPU's index in this process.
  void* handle = nullptr;  // A CUstream or cudaStream_t; null: the default stream.

  friend bool operator==(const GpuStream&, const GpuStream&) = default;
};

// Which weights of a push are in the memory of GPUs.
struct GpuWeights {
  // By shard: the index of its GPU; negative: it is in host memory. Empty: all are in host memory.
  std::vector<int> devices;
  // The streams on which the trainer works, at least one of each GPU in `devices`. The weights are
  // read when these streams have done what is queued on them at the start of the push. They must
  // live until the weights are released, and none may be capturing a graph.
  std::vector<GpuStream> streams;
};

// Where the elements of a shard lie if not one behind the other in row-major order: so many
// elements from each to its neighbour, by dimension. Empty: row-major and contiguous.
using Strides = std::vector<int64_t>;

// How a push differs from one of contiguous weights in host memory.
struct PushOptions {
  // Frozen tensors may have changed since the run's last successful push, so this push has them.
  // All ranks must set it for the same step.
  bool frozen_changed = false;
  // Of which shards the spans are addresses on a GPU. These are copied to pinned memory of the host
  // (of this run, kept; RunOptions::max_staging_bytes) on a stream of our own.
  GpuWeights gpu_weights;
  // By shard, or empty. A shard in host memory that has some is gathered when it is sent, a chunk
  // at a time; its span has its size all the same, and begins at its first element.
  std::vector<Strides> strides;
  // If all weights are in host memory: reads them once before StartPush() returns. A push that
  // sends anything else, because somebody has written them meanwhile (and even if they are back by
  // its end), commits nothing: DATA_LOSS, DIGEST_MISMATCH.
  bool check = false;
};

class PendingPush;

// One rank of one run. Thread-safe, but one push at a time: the next may start when the one before
// has ended. Holds its client's connection, not the client.
class Run {
 public:
  ~Run();  // Ends a push that is running, as PendingPush::Abandon() does.
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  const Manifest& manifest() const;
  const RankLayout& layout() const;
  int64_t run_epoch() const;
  int64_t rank() const;
  // The newest version when the run was opened, or that this rank's last push made.
  std::optional<Version> latest() const;

  // As the server's last answer to this rank said: when it joined, or to its last push.
  RunPlan plan() const;
  // Asks for it anew. For a trainer whose tracks are all paused: no reply to a push will tell.
  // Errors as OpenRun().
  absl::Status RefreshPlan(absl::Duration timeout = absl::ZeroDuration());

  // True if a push at `now` would update at least one track. Asks nobody; the same on all ranks.
  // INVALID_ARGUMENT, BAD_TIME: `now` lacks a unit that a track needs.
  absl::StatusOr<bool> IsDue(const TrainingTime& now) const;

  // Waits until all ranks have joined, at most `timeout`; zero: the client's. DEADLINE_EXCEEDED,
  // RUN_INCOMPLETE: names those that have not. Other errors as OpenRun().
  absl::Status WaitReady(absl::Duration timeout = absl::ZeroDuration());

  // Starts to push one step in the background and returns at once. `shards` are the bytes of this
  // rank's shards, as layout().shards() and in that order, each row-major and contiguous, in the
  // manifest's dtypes, also where the layout's wire dtype, in which layout() counts bytes, is
  // another: they are rounded when they are sent. They are read in place, not copied, and must not
  // change or be freed until WaitReleased() has returned (or the push has ended); a GPU's may then
  // be freed only behind the streams that it was given. Frozen ones are not read, and may be empty,
  // where plan().may_omit_frozen, unless `options.frozen_changed`. `timeout` bounds everything, the
  // wait for other ranks included. INVALID_ARGUMENT: a size is not that of the shard's elements, or
  // strides do not fit it. FAILED_PRECONDITION, SESSION_BUSY: a push of this rank is still running.
  // INTERNAL, DEVICE: a GPU has failed, now or before, copies of a push before have not ended, or
  // the process has none.
  absl::StatusOr<std::unique_ptr<PendingPush>> StartPush(
      int64_t step, const TrainingTime& time, std::vector<std::span<const std::byte>> shards,
      absl::Duration timeout, PushOptions options = {});

  // StartPush() and Wait().
  absl::StatusOr<Version> Push(int64_t step, const TrainingTime& time,
                               std::vector<std::span<const std::byte>> shards,
                               absl::Duration timeout);

  // What has become of a step that this run has pushed; with `abandon_if_unfinished`, drops it on
  // all ranks unless it has committed. Blocks as the calls of Client do. ABORTED, FENCED: the
  // server knows only a newer run, or, restarted, none.
  absl::StatusOr<PushProgress> QueryPush(int64_t step, bool abandon_if_unfinished,
                                         absl::Duration timeout = absl::ZeroDuration());

  // Tells the server that this rank will never push `step`, because of `why` (its first KiB): other
  // ranks that push it get ABORTED, STEP_GIVEN_UP, and do not wait for this one. Tries once, for at
  // most `timeout`. The result and errors are those of QueryPush().
  absl::StatusOr<PushProgress> GiveUp(int64_t step, std::string_view why, absl::Duration timeout);

  class Impl;

 private:
  friend class Client;
  explicit Run(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

// A push that runs in the background. A broken connection is healed by itself: QueryPush says what
// is missing and only that is sent again, as long as the weights have not been released; those of a
// push with weights on GPUs, for all of which the run's pinned memory has room, also after that.
// Thread-safe.
class PendingPush {
 public:
  ~PendingPush();  // Waits for the release of the weights; abandons the step if it has not ended.
  PendingPush(const PendingPush&) = delete;
  PendingPush& operator=(const PendingPush&) = delete;

  // Waits until no byte of the weights will be read any more, because all have left (gRPC has
  // dropped every slice) or the push has ended, at most `max_wait`, at most a second while there is
  // no stream to the server (it is gone, or ranks have not joined), and at most five in which no
  // byte leaves and the server, asked by QueryPush, does not answer (it hangs); then the weights
  // may change. True: all have left, or the push had ended. False: it took too long; the step has
  // been abandoned (so it does not commit, on any rank, unless it had already), and nothing reads
  // the weights any more. After this nothing is sent again, but for what is in pinned memory: if
  // the connection breaks, the step is lost.
  //
  // Weights on a GPU may change when every copy of them has been started, and `streams`, and those
  // that the push was started with, have come as far: these are made to wait for the copies, not
  // the caller. What is queued there from now on may write the weights. None may be capturing.
  bool WaitReleased(absl::Duration max_wait, absl::Span<const GpuStream> streams = {});

  // Waits for the end. The errors of Push in ema_service.proto; DEADLINE_EXCEEDED after the push's
  // time-out; INTERNAL, DEVICE: a GPU has failed; RESOURCE_EXHAUSTED, MEMORY_BUDGET: there is no
  // pinned memory for weights on a GPU. May be called again.
  absl::StatusOr<Version> Wait();

  // The same for at most `max_wait`, and no longer than WaitReleased() from a server that is away.
  // True: the end has come, and Wait() will not block.
  bool WaitDone(absl::Duration max_wait);

  // True when Wait() would not block.
  bool done() const;

  // Drops the step on the server unless it has committed, and waits until nothing reads the weights
  // any more and the server has answered; for that, a second at most. Of weights on a GPU that
  // hangs: the push's streams wait for the copies that are still to be made, and their pinned
  // memory stays allocated until these have ended.
  void Abandon();

  // Where the server's time went, from a stream's header to its reply; ema.v1.PushTiming says what
  // each means.
  struct ServerTime {
    absl::Duration receive;
    absl::Duration fold;
    absl::Duration wait;
    absl::Duration commit;
  };
  // What has happened so far: for logs and tests.
  struct Stats {
    int64_t total_bytes = 0;       // Of this rank, to be pushed; 0 until the run is ready.
    int64_t sent_bytes = 0;        // Handed to the lane, resends included.
    int64_t stream_count = 0;      // 1 if nothing broke.
    int64_t connection_count = 0;  // Of the last try by gRPC.
    // From the start to the last byte's leaving; of weights on a GPU, to the last copy's start.
    absl::Duration send_time;
    Lane lane = Lane::kGrpc;  // Of the last stream.
    // Of the stream whose reply it was, if Client::Options::report_timing; absent before the reply,
    // from a server that does not tell, and where only QueryPush told of the commit.
    std::optional<ServerTime> server_time = std::nullopt;
  };
  Stats stats() const;

  class Impl;

 private:
  friend class Run;
  explicit PendingPush(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace ema

#endif  // EMA_RUN_H_
