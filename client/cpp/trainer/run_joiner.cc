// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/run_joiner.h"

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {

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
