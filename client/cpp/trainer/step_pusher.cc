// SPDX-License-Identifier: Apache-2.0
#include "ema/step_pusher.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/container/fixed_array.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/gpu/pinned_ring.h"
#include "client/cpp/push/run_core.h"
#include "client/cpp/trainer/push_engine.h"
#include "client/cpp/trainer/run_joiner.h"
#include "client/cpp/trainer/trainer_log.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/track.h"
#include "server/base/random_hex.h"

namespace ema {

namespace client_internal {

// The tensors that are sent: those of the given manifest that a track has.
struct SentTensors {
  Manifest manifest;
  std::vector<int64_t> given_indices;  // The index of each tensor in the given manifest.
  std::vector<int64_t> frozen;  // Indices in `manifest` of the tensors that all ranks freeze.
};

}  // namespace client_internal
namespace {

using client_internal::PinnedRing;
using client_internal::PushEngine;
using client_internal::RunJoiner;
using client_internal::StepWeights;

// How long an exception waits for the last push.
constexpr absl::Duration kExceptionWait = absl::Seconds(1);

absl::Status CheckOptions(const StepPusher::Options& options, TensorSet frozen,
                          const Manifest& manifest) {
  if (options.start_step.has_value() && options.resume.has_value()) {
    return BadRequest(absl::StrCat("start_step ", *options.start_step,
                                   " and resume are both given: resume says the step"));
  }
  if (options.resume.has_value() && options.existing.value_or(StepPusher::Existing::kContinue) !=
                                        StepPusher::Existing::kContinue) {
    return BadRequest("existing and resume are both given: resume continues the average");
  }
  if (options.existing == StepPusher::Existing::kNew && options.world_size > 1) {
    return BadRequest(absl::StrCat("existing is kNew, but there are ", options.world_size,
                                   " ranks: delete the model before they start"));
  }
  if (options.start_step.value_or(0) < 0) {
    return BadRequest(absl::StrCat("start_step ", *options.start_step, ": must be 0 or more"));
  }
  if (options.max_outage < absl::ZeroDuration()) {
    return BadRequest(absl::StrCat("max_outage ", absl::FormatDuration(options.max_outage),
                                   ": must be 0 or more"));
  }
  EMA_RETURN_IF_ERROR(PinnedRing::CheckMaxStagingBytes(options.max_staging_bytes));
  if (options.launch_id.empty() && options.world_size > 1) {
    return BadRequest(absl::StrCat("launch_id is empty: with ", options.world_size,
                                   " ranks, all of them must get the same one"));
  }
  if (!frozen.empty() && static_cast<int64_t>(frozen.size()) != manifest.tensor_count()) {
    return BadRequest(absl::StrCat("frozen: has ", frozen.size(), " entries, but there are ",
                                   manifest.tensor_count(), " tensors"));
  }
  return absl::OkStatus();
}

// By tensor: no track has it.
std::vector<bool> IgnoredByAll(const Manifest& manifest, absl::Span<const TrackConfig> tracks) {
  std::vector<bool> ignored(manifest.tensor_count(), !tracks.empty());
  for (const TrackConfig& track : tracks) {
    const std::vector<TensorAction> actions = ActionsOf(track, manifest);
    for (size_t i = 0; i < actions.size(); ++i) {
      if (actions[i] != TensorAction::kIgnore) ignored[i] = false;
    }
  }
  return ignored;
}

absl::StatusOr<client_internal::SentTensors> ChooseTensors(const Manifest& given, TensorSet frozen,
                                                           absl::Span<const TrackConfig> tracks) {
  client_internal::SentTensors result;
  const std::vector<bool> ignored = IgnoredByAll(given, tracks);
  std::vector<TensorSpec> specs;
  for (int64_t i = 0; i < given.tensor_count(); ++i) {
    if (ignored[i]) continue;
    const TensorSpec& spec = given.tensor(i);
    // A buffer may differ between ranks, and comes from one of them.
    if (!frozen.empty() && frozen[i] && !spec.is_buffer) {
      result.frozen.push_back(static_cast<int64_t>(specs.size()));
    }
    specs.push_back(spec);
    result.given_indices.push_back(i);
  }
  EMA_ASSIGN_OR_RETURN(result.manifest, Manifest::Create(std::move(specs)));
  return result;
}

absl::StatusOr<Client::RunOptions> MakeRunOptions(const client_internal::SentTensors& sent,
                                                  const StepPusher::Options& options) {
  const size_t count = sent.manifest.tensor_count();
  absl::FixedArray<bool> is_buffer(count);
  absl::FixedArray<bool> is_frozen(count, false);
  for (size_t i = 0; i < count; ++i) is_buffer[i] = sent.manifest.tensor(i).is_buffer;
  for (const int64_t i : sent.frozen) is_frozen[i] = true;
  EMA_ASSIGN_OR_RETURN(RankShare share, EvenShare(sent.manifest, is_buffer, is_frozen, options.rank,
                                                  options.world_size));
  Client::RunOptions run;
  // Kept, so that rejoining does not fence a newer run.
  run.launch_id = options.launch_id.empty() ? RandomHex(4) : options.launch_id;
  run.rank = options.rank;
  run.world_size = options.world_size;
  run.shards = std::move(share.shards);
  run.frozen_shard_count = share.frozen_shard_count;
  run.wire_dtype = options.wire_dtype;
  run.max_staging_bytes = options.max_staging_bytes;
  run.rejoins = false;
  run.resume = options.resume;
  return run;
}

absl::StatusOr<std::unique_ptr<Run>> Join(const RunJoiner& joiner, absl::Duration timeout) {
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<Run> run, joiner.Open(/*last_run_epoch=*/0, timeout));
  EMA_RETURN_IF_ERROR(run->WaitReady(joiner.OpenTimeout(timeout)));
  return run;
}

// Not if its disk has failed, for example.
bool IsUnreachable(const absl::Status& error) {
  if (!absl::IsUnavailable(error) && !absl::IsDeadlineExceeded(error)) return false;
  const ErrorReason reason = GetErrorReason(error);
  return reason == ErrorReason::kUnspecified || reason == ErrorReason::kDraining ||
         reason == ErrorReason::kRunIncomplete;
}

// Join() for a training that starts without its average if the server or another rank is
// unreachable: then the run is null.
absl::StatusOr<std::unique_ptr<Run>> JoinUnlessUnreachable(Client& client, const RunJoiner& joiner,
                                                           const StepPusher::Options& options) {
  absl::Status error =
      client.GetServerInfo(std::min(options.timeout, StepPusher::kStartWait)).status();
  if (!IsUnreachable(error)) {
    absl::StatusOr<std::unique_ptr<Run>> run = Join(joiner, options.timeout);
    if (!IsUnreachable(run.status())) return run;
    error = run.status();
  }
  if (options.on_warning) {
    options.on_warning(absl::StrCat("model \"", joiner.model(),
                                    "\": the training starts without its average, and joins when "
                                    "the server and all ranks can be reached: ",
                                    client_internal::ErrorText(error)));
  }
  return std::unique_ptr<Run>();
}

TrainingTime TimeAt(const StepPusher::Options& options, int64_t step) {
  if (options.time) return options.time(step);
  return TrainingTime::AtBatch(step);
}

// `run`: null: the training starts without its average.
int64_t FirstStep(const StepPusher::Options& options, const Run* run) {
  if (options.resume.has_value()) return options.resume->step;
  if (options.start_step.has_value()) return *options.start_step;
  if (run == nullptr) return 0;
  const std::optional<Version> latest = run->latest();
  return latest.has_value() ? latest->step : 0;
}

}  // namespace

class StepPusher::Impl {
 public:
  Impl(client_internal::SentTensors sent, Options options, std::shared_ptr<const RunJoiner> joiner,
       std::unique_ptr<Run> run)
      : sent_(std::move(sent)), options_(std::move(options)) {
    const int64_t first_step = FirstStep(options_, run.get());
    PushEngine::Options engine = {.is_only_rank = options_.world_size == 1,
                                  .max_wait = options_.max_wait,
                                  .timeout = options_.timeout,
                                  .on_error = options_.on_error.value_or(OnError::kSkip),
                                  .max_outage = options_.max_outage,
                                  .on_skip = options_.on_skip};
    if (options_.on_warning) {
      engine.log = [this](LogLevel level, const std::string& text) {
        if (level >= LogLevel::kWarning) options_.on_warning(text);
      };
    }
    engine_.emplace(std::move(engine), std::move(joiner), std::move(run), first_step);
  }

  PushEngine& engine() { return *engine_; }
  const Options& options() const { return options_; }
  void AfterStep(const ReadWeights& read, const FrozenChanged& frozen_changed);
  void Close(absl::Duration timeout) {
    engine_->EndPushes(timeout);
    engine_->Leave();
  }

 private:
  class Step;

  const client_internal::SentTensors sent_;
  const Options options_;
  std::optional<PushEngine> engine_;  // Uses the two above.
};

// Answers the engine by the callback of AfterStep(), a piece of a tensor at a time.
class StepPusher::Impl::Step : public client_internal::TrainingStep {
 public:
  // `impl` outlives this object.
  Step(const Impl* impl, ReadWeights read, StepPusher::FrozenChanged frozen_changed)
      : impl_(*impl), read_(std::move(read)), frozen_changed_(std::move(frozen_changed)) {}

  absl::StatusOr<bool> FrozenChanged() override {
    return frozen_changed_ ? frozen_changed_() : absl::StatusOr<bool>(false);
  }

  absl::StatusOr<StepWeights> Read(const Run& run, size_t begin, size_t end) override {
    StepWeights result;
    for (const Shard& shard : run.layout().shards().subspan(begin, end - begin)) {
      EMA_ASSIGN_OR_RETURN(Weights weights, ReadShard(shard));
      StepWeights one;
      one.bytes = {weights.bytes};
      one.owners = {std::move(weights.keep_alive)};
      one.strides.resize(1);
      one.devices = {weights.gpu.has_value() ? weights.gpu->device : -1};
      if (weights.gpu.has_value()) one.streams = {*weights.gpu};
      result.Append(std::move(one));
    }
    return result;
  }

 private:
  // REQUIRES: the shard is contiguous in its tensor, as those of EvenShare() are.
  absl::StatusOr<Weights> ReadShard(const Shard& shard) {
    const TensorSpec& spec = impl_.sent_.manifest.tensor(shard.tensor_index);
    int64_t first = 0;
    for (size_t d = 0; d < spec.shape.size(); ++d) first = first * spec.shape[d] + shard.offsets[d];
    return read_({.tensor_index = impl_.sent_.given_indices[shard.tensor_index],
                  .first = first,
                  .count = shard.element_count()});
  }

  const Impl& impl_;
  const ReadWeights read_;
  const StepPusher::FrozenChanged frozen_changed_;
};

void StepPusher::Impl::AfterStep(const ReadWeights& read, const FrozenChanged& frozen_changed) {
  const int64_t step = engine_->step() + 1;
  engine_->AfterStep(step, TimeAt(options_, step),
                     std::make_shared<Step>(this, read, frozen_changed));
}

absl::StatusOr<std::unique_ptr<StepPusher>> StepPusher::Create(Client& client,
                                                               std::string_view model,
                                                               const Manifest& manifest,
                                                               TensorSet frozen, Options options) {
  EMA_RETURN_IF_ERROR(CheckOptions(options, frozen, manifest));
  const TrainingTime now = TimeAt(options, options.start_step.value_or(0));
  for (const TrackConfig& track : options.tracks) {
    // The server does not hear of tensors that all tracks ignore, so it cannot find a misspelled
    // rule.
    EMA_RETURN_IF_ERROR(CheckRulesMatch(track, manifest));
    // A unit that it needs must be counted.
    EMA_RETURN_IF_ERROR(PlanTrack(track, {}, now).status());
  }
  EMA_ASSIGN_OR_RETURN(client_internal::SentTensors sent,
                       ChooseTensors(manifest, frozen, options.tracks));
  RunJoiner::Options joiner_options = {
      .model = std::string(model), .manifest = sent.manifest, .model_options = options.model};
  for (const TrackConfig& track : options.tracks) {
    joiner_options.tracks.push_back(WithoutUnmatchedRules(track, sent.manifest));
  }
  EMA_ASSIGN_OR_RETURN(joiner_options.run, MakeRunOptions(sent, options));
  joiner_options.existing = options.existing.value_or(
      options.resume.has_value() ? Existing::kContinue : Existing::kError);
  // The caller keeps the client.
  const std::shared_ptr<Client> borrowed(&client, [](Client*) {});
  const auto joiner = std::make_shared<const RunJoiner>(borrowed, std::move(joiner_options));
  // Without the server, the steps of an average that continues are not known.
  const bool knows_step = joiner->options().existing != Existing::kContinue ||
                          options.resume.has_value() || options.start_step.has_value();
  const bool may_start_alone = options.on_error == OnError::kSkip && knows_step;
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<Run> run,
                       may_start_alone ? JoinUnlessUnreachable(client, *joiner, options)
                                       : Join(*joiner, options.timeout));
  return std::unique_ptr<StepPusher>(new StepPusher(
      std::make_unique<Impl>(std::move(sent), std::move(options), joiner, std::move(run))));
}

StepPusher::StepPusher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

StepPusher::~StepPusher() {
  if (std::uncaught_exceptions() > 0) impl_->Close(kExceptionWait);
  Close();
}

void StepPusher::WaitReleased(absl::Span<const GpuStream> streams) {
  impl_->engine().WaitReleased(streams);
}
void StepPusher::AfterStep(const ReadWeights& read, const FrozenChanged& frozen_changed) {
  impl_->AfterStep(read, frozen_changed);
}
absl::Status StepPusher::TakeError() { return impl_->engine().TakeError(); }
absl::StatusOr<std::optional<Version>> StepPusher::WaitPushed(absl::Duration timeout) {
  if (timeout == absl::ZeroDuration()) timeout = impl_->options().timeout;
  EMA_RETURN_IF_ERROR(impl_->engine().WaitPushed(timeout));
  return version();
}
void StepPusher::Close() { impl_->Close(impl_->options().timeout); }
StepPusher::Stats StepPusher::stats() {
  PushEngine& engine = impl_->engine();
  engine.Poll();
  Stats stats = engine.progress().stats;
  stats.is_disconnected = engine.is_disconnected() && !engine.is_closed();
  if (absl::Status error = engine.RejoinError(); !error.ok()) stats.last_error = std::move(error);
  return stats;
}
int64_t StepPusher::step() const { return impl_->engine().step(); }
std::optional<Version> StepPusher::version() {
  impl_->engine().Poll();
  return impl_->engine().progress().version;
}

}  // namespace ema
