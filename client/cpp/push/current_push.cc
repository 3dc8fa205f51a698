// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/current_push.h"

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/transport/fork_guard.h"
#include "ema/error_reason.h"

namespace ema::client_internal {

absl::Status CurrentPush::Start(const OpenedRun& run, const std::shared_ptr<RunningPush>& push) {
  absl::MutexLock lock(&mu_);
  const std::shared_ptr<RunningPush> previous = push_.lock();
  if (previous != nullptr && !previous->done()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kModelBusy,
        absl::StrCat(
            "rank ", run.rank(), " of model \"", run.model(),
            "\" is still pushing: wait for that push, or abandon it, before the next one"));
  }
  try {
    push->Start();
  } catch (const std::system_error& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot start a thread for the push: ", error.what()));
  }
  push_ = push;
  return absl::OkStatus();
}

void CurrentPush::End() {
  std::shared_ptr<RunningPush> push;
  {
    absl::MutexLock lock(&mu_);
    push = push_.lock();
  }
  if (push != nullptr && !push->Abandon()) LeakForever(std::move(push));
}

}  // namespace ema::client_internal
