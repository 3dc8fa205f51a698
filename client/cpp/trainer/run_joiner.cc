// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/run_joiner.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

// A model may have to be read from the server's disk.
constexpr absl::Duration kDiskTimeout = absl::Minutes(10);
// The clocks of the server and of this machine differ by no more than this.
constexpr absl::Duration kClockDifference = absl::Minutes(1);

}  // namespace

absl::StatusOr<std::unique_ptr<Run>> RunJoiner::Open(int64_t last_run_epoch, absl::Duration timeout,
                                                     absl::Time started) const {
  Client::RunOptions options = options_.run;
  options.last_run_epoch = last_run_epoch;
  const bool is_late = started < absl::InfiniteFuture();
  // Once this rank has joined, the server knows a later training, and fences this one.
  if (is_late && last_run_epoch == 0) EMA_RETURN_IF_ERROR(CheckNoLaterTraining(started, timeout));
  if (options.resume.has_value() && options.resume->version.has_value()) {
    // A deleted model cannot be resumed, and must not be created again.
    EMA_RETURN_IF_ERROR(client_->GetModel(options_.model, timeout).status());
  }
  EMA_RETURN_IF_ERROR(CreateOrReplaceModel(timeout));
  absl::StatusOr<std::unique_ptr<Run>> run =
      client_->OpenRun(options_.model, options, OpenTimeout(timeout));
  if ((is_late || last_run_epoch > 0) && GetErrorReason(run.status()) == ErrorReason::kFenced) {
    return FencedError(timeout);
  }
  return run;
}

absl::Status RunJoiner::CheckNoLaterTraining(absl::Time started, absl::Duration timeout) const {
  const absl::StatusOr<ModelInfo> info = client_->GetModel(options_.model, timeout);
  if (GetErrorReason(info.status()) == ErrorReason::kModelNotFound) return absl::OkStatus();
  EMA_RETURN_IF_ERROR(info.status());
  // No rank of this training can have made a version before all have joined.
  if (!info->latest.has_value() || info->latest->commit_time <= started + kClockDifference) {
    return absl::OkStatus();
  }
  return MakeError(
      absl::StatusCode::kFailedPrecondition, ErrorReason::kResumeMismatch,
      absl::StrCat(
          "model \"", options_.model, "\": another training has committed step ",
          info->latest->step,
          " since this one started without the server; start this one again to take over"));
}

absl::Duration RunJoiner::OpenTimeout(absl::Duration timeout) const {
  return options_.run.resume.has_value() ? std::max(timeout, kDiskTimeout) : timeout;
}

absl::Status RunJoiner::CreateOrReplaceModel(absl::Duration timeout) const {
  using Existing = StepPusher::Existing;
  const Existing existing = options_.existing;
  if (existing == Existing::kContinue) return CreateModel(timeout);
  const std::string& model = options_.model;
  const absl::StatusOr<ModelInfo> info = client_->GetModel(model, timeout);
  if (!info.ok() && GetErrorReason(info.status()) != ErrorReason::kModelNotFound) {
    return info.status();
  }
  const std::optional<Version> latest = info.ok() ? info->latest : std::nullopt;
  if (existing == Existing::kError && latest.has_value() && latest->number > 1) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kResumeMismatch,
        absl::StrCat("model \"", model, "\" has the average of an earlier training, at step ",
                     latest->step, " (version ", latest->number,
                     "): set Options::existing to kContinue to continue its average, or to kNew "
                     "to start a new average and keep the old checkpoints on the server's disk, or "
                     "set Options::resume to continue from the trainer's own checkpoint (in Python "
                     "existing= and resume=)"));
  }
  if (existing == Existing::kNew && latest.has_value()) {
    if (options_.run.rank != 0) {
      return absl::UnavailableError(
          absl::StrCat("model \"", model, "\": rank 0 has not yet replaced it"));
    }
    EMA_RETURN_IF_ERROR(client_->DeleteModel(model, /*purge=*/false, timeout));
  }
  absl::Status created = CreateModel(timeout);
  if (absl::IsAlreadyExists(created) && !latest.has_value() && options_.run.world_size == 1) {
    EMA_RETURN_IF_ERROR(client_->DeleteModel(model, /*purge=*/false, timeout));
    created = CreateModel(timeout);
  }
  return created;
}

absl::Status RunJoiner::CreateModel(absl::Duration timeout) const {
  EMA_RETURN_IF_ERROR(client_
                          ->CreateModel(options_.model, options_.manifest, options_.tracks,
                                        options_.model_options, timeout)
                          .status());
  for (const auto& [name, bytes] : options_.files) {
    EMA_RETURN_IF_ERROR(client_->AttachFile(options_.model, name, bytes, timeout));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Run>> RunJoiner::Reopen(int64_t last_run_epoch,
                                                       absl::Duration timeout) const {
  Client::RunOptions options = options_.run;
  options.resume.reset();
  options.last_run_epoch = last_run_epoch;
  absl::StatusOr<std::unique_ptr<Run>> run = client_->OpenRun(options_.model, options, timeout);
  if (GetErrorReason(run.status()) == ErrorReason::kModelNotFound && options.rank == 0) {
    EMA_RETURN_IF_ERROR(CreateModel(timeout));
    run = client_->OpenRun(options_.model, options, timeout);
  }
  if (GetErrorReason(run.status()) == ErrorReason::kFenced) return FencedError(timeout);
  EMA_RETURN_IF_ERROR(run.status());
  if ((*run)->manifest() != options_.manifest) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, ErrorReason::kBadLayout,
        absl::StrCat("model \"", options_.model,
                     "\": its tensors differ (here: this trainer, there: the server): ",
                     options_.manifest.DifferenceFrom((*run)->manifest())));
  }
  return run;
}

absl::Status RunJoiner::FencedError(absl::Duration timeout) const {
  const absl::StatusOr<ModelInfo> info = client_->GetModel(options_.model, timeout);
  // A rollback makes a version of an epoch of its own, and no run is open after it.
  const bool is_rolled_back = info.ok() && info->latest.has_value() &&
                              info->latest->restored_from.has_value() &&
                              info->latest->run_epoch == info->run_epoch;
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced,
                   is_rolled_back
                       ? absl::StrCat("Model \"", options_.model, "\" was rolled back to step ",
                                      info->latest->step, "; this trainer no longer pushes.")
                       : absl::StrCat("Another trainer of model \"", options_.model,
                                      "\" has taken over; this one no longer pushes."));
}

}  // namespace ema::client_internal
