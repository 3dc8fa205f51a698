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

}  // namespace ema::client_internal
