// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/group/check_incarnation.h"

#include "absl/strings/str_cat.h"
#include "client/cpp/transport/convert_replies.h"
#include "ema/error_reason.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

absl::Status CheckIncarnation(Client::Impl& client, const std::string& model, int64_t incarnation,
                              Interrupt* interrupt) {
  constexpr absl::Duration kTimeout = absl::Seconds(1);
  const absl::StatusOr<v1::Model> found =
      client.UnaryWithRetries(&Stub::PrepareAsyncGetModel, MakeRequest<v1::GetModelRequest>(model),
                              After(SteadyNow(), kTimeout), interrupt);
  if (!found.ok() || found->incarnation() <= incarnation) return absl::OkStatus();
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced,
                   absl::StrCat("model \"", model, "\": incarnation ", incarnation,
                                " has ended, the current one is ", found->incarnation()));
}

}  // namespace ema::client_internal
