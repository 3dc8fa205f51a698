// SPDX-License-Identifier: Apache-2.0
//
// Follows a training loop and pushes the steps that are due, also across outages of the server.
// Independent of any framework; ema/torch.h connects it to a torch::nn::Module.
#ifndef EMA_STEP_PUSHER_H_
#define EMA_STEP_PUSHER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ema/client.h"
#include "ema/manifest.h"
#include "ema/shard.h"
#include "ema/tensor_spec.h"
#include "ema/time.h"
#include "ema/track.h"

namespace ema {

// One rank of a trainer: counts its steps and pushes the weights of due ones in the background,
// like `attach` of the Python package. For one thread, the training thread:
//
//   while (training) {
//     ... forward, backward: the weights are still read ...
//     pusher->WaitReleased();
//     ... change the weights ...
//     pusher->AfterStep(read);
//   }
//
// A step delays the training by at most Options::max_wait, plus a few seconds if the server is
// unreachable or hangs; kWait may take longer. A step that cannot be pushed is skipped and counted:
// the next update of a track with a half-life accounts for the longer time; the other ranks do
// not wait for this one. While the server is unreachable, a thread on each rank tries to rejoin the
// run; pushes resume when all ranks have rejoined. If the server has lost the model, rank 0 creates
// it again. A forked child must not use or destroy it.
class StepPusher {
 public:
  // How long Create() waits for the server before it starts without it; see Options::on_error.
  static constexpr absl::Duration kStartWait = absl::Seconds(10);
  // What happens when a step cannot be pushed.
  enum class OnError {
    kSkip,  // The step is skipped and counted.
    // Each WaitReleased() waits until the previous push has become a version, at most
    // Options::timeout. After an outage of the server or of another rank it pushes the same weights
    // again. After Options::max_outage it stops waiting, TakeError() returns the error, and steps
    // are skipped until a push succeeds.
    kWait,
    kRaise,  // TakeError() returns the error.
  };
  // What Create() does with a model that has an average of an earlier training, that is, more than
  // one version: version 1 may be an import, from which a training is meant to continue.
  enum class Existing {
    kError,     // FAILED_PRECONDITION, RESUME_MISMATCH; nothing has changed.
    kNew,       // Deletes the model, whose checkpoints stay on the server's disk, and creates it.
    kContinue,  // The old average continues with the weights of this training.
  };
  struct Options {
    std::vector<TrackConfig> tracks;  // At least one. Tensors that all tracks ignore are not sent.
    Client::ModelOptions model;
    // Set these if several ranks hold the same parameters (data parallel); see Client::RunOptions.
    // Each rank sends an even share of the bytes; rank 0 sends all buffers, which count in its
    // share.
    std::string launch_id;
    int64_t rank = 0;
    int64_t world_size = 1;
    WireDtype wire_dtype = WireDtype::kAsPushed;
    int64_t max_staging_bytes = Client::RunOptions().max_staging_bytes;  // Per rank.
    // Number of steps done before. Absent: continues after the model's newest version.
    std::optional<int64_t> start_step;
    // Alternative to start_step, the same on all ranks: rolls the model back to the trainer's
    // position. For this, a trainer's checkpoint saves step(), and the number and incarnation of
    // the version that WaitPushed() returned, which Client::CreateCheckpoint() makes durable.
    std::optional<ResumePoint> resume;
    // Absent: kContinue with `resume`, else kError. The same on all ranks. kNew only with one rank:
    // with several, delete the model before they start. kError and kNew also create a model again
    // that has no version yet and differs.
    std::optional<Existing> existing;
    // The training time after `step` steps, the same on all ranks. Null: steps are batches.
    std::function<TrainingTime(int64_t step)> time;
    absl::Duration max_wait = absl::Seconds(30);
    absl::Duration timeout = absl::Seconds(60);  // For a push, and each call in Create().
    // Absent: as kSkip, but Create() fails if the server is unreachable. With kSkip, Create() waits
    // for the server for at most kStartWait (or `timeout`, if that is shorter), and then for at
    // most `timeout` for each call, of which the last waits for the other ranks. If the server or a
    // rank is missing, it calls on_warning, and starts the training without its average: a thread
    // joins the run when it can, and until then due steps are skipped and counted. If `existing` is
    // kContinue, this needs start_step or `resume`, because only the server knows the model's
    // newest step.
    std::optional<OnError> on_error;
    absl::Duration max_outage = absl::Minutes(2);  // For kWait.
    // Called by the training thread when a push fails, and for the first step that is skipped
    // because of an outage or a late reply; Stats::skipped counts the later ones. Null: stats() has
    // the last error.
    std::function<void(int64_t step, const absl::Status& error)> on_skip;
    // Receives warnings, such as the start and end of an outage, from the training thread and from
    // the rejoining thread. May be null.
    std::function<void(const std::string& text)> on_warning;
  };

  // Some weights, row-major. They must not change until WaitReleased() has returned, and must stay
  // valid while `keep_alive` lives (null: until WaitReleased() has returned).
  struct Weights {
    std::span<const std::byte> bytes;
    std::shared_ptr<const void> keep_alive;
    // For bytes in GPU memory: the GPU, and the stream on which the trainer works; see
    // GpuWeights::streams. Absent: they are in host memory.
    std::optional<GpuStream> gpu = std::nullopt;
  };
  // The elements [first, first + count), in row-major order, of a tensor of the manifest.
  struct Piece {
    int64_t tensor_index = 0;
    int64_t first = 0;
    int64_t count = 0;
  };
  using ReadWeights = std::function<absl::StatusOr<Weights>(const Piece& piece)>;
  // Whether a frozen tensor may have been written since the last call.
  using FrozenChanged = std::function<absl::StatusOr<bool>()>;

  // Creates the model on `client`'s server if it does not exist, joins its run, and waits until all
  // ranks have joined. `client` outlives the result. `frozen`: tensors that change seldom or never.
  // They are pushed until every track equals them, and again when AfterStep()'s `frozen_changed`
  // returns true. INVALID_ARGUMENT: a bad option; or as Client::CreateModel(). Other errors as
  // CreateModel(), OpenRun() and Run::WaitReady().
  static absl::StatusOr<std::unique_ptr<StepPusher>> Create(Client& client, std::string_view model,
                                                            const Manifest& manifest,
                                                            TensorSet frozen, Options options);
  // Calls Close(). During stack unwinding it waits at most one second for the push.
  ~StepPusher();
  StepPusher(const StepPusher&) = delete;
  StepPusher& operator=(const StepPusher&) = delete;

  // Waits until no push reads the weights any more; then they may be written. A push whose bytes
  // have not left in time is abandoned. Work that is queued after this call on `streams`, or on the
  // streams of the push, may write weights on a GPU: these streams wait, not the caller.
  void WaitReleased(absl::Span<const GpuStream> streams = {});

  // Counts a step that is done, and starts a push if one is due. `read` is called only during this
  // call (with kWait also until the next WaitReleased() returns); if it fails, the step is skipped.
  // `frozen_changed` is called before `read`, only if the step is pushed; it must return the same
  // on all ranks. Null: the frozen tensors have not changed.
  void AfterStep(const ReadWeights& read, const FrozenChanged& frozen_changed = nullptr);

  // Returns and clears the error of the last lost step. OK if no step was lost since the last call,
  // if all lost steps belong to an outage whose error was returned before, or with kSkip. The
  // training may continue after an error.
  absl::Status TakeError();

  // Waits until the running push has ended, at most `timeout` (zero: Options::timeout); with kWait
  // an outage may take longer. Returns version(). DEADLINE_EXCEEDED: the push is still running.
  absl::StatusOr<std::optional<Version>> WaitPushed(absl::Duration timeout = absl::ZeroDuration());

  // Waits for the last push, at most Options::timeout, and leaves the run. Later steps are neither
  // pushed nor counted. May be called again.
  void Close();

  struct Stats {
    int64_t pushes = 0;  // Steps that became a version.
    // Pushed versions that the server has lost: it restarted without the model, or from an older
    // checkpoint. The averages continue from the restored version.
    int64_t lost_versions = 0;
    // Due steps that did not become a version. If only the reply of a step was lost, the step is
    // subtracted again when the run has been rejoined.
    int64_t skipped = 0;
    int64_t sent_bytes = 0;        // Sent by this rank.
    absl::Duration waited;         // Total time that the training has waited.
    bool is_disconnected = false;  // No run is open now: the client tries to rejoin.
    absl::Status last_error;       // Of the last failed push or try to rejoin. OK: none has failed.
  };
  Stats stats();
  int64_t step() const;  // Number of steps so far.
  // The last version that this rank's pushes made. Before the first one, and after the server has
  // restarted without it, this is the model's newest version.
  std::optional<Version> version();

  class Impl;

 private:
  explicit StepPusher(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace ema

#endif  // EMA_STEP_PUSHER_H_
