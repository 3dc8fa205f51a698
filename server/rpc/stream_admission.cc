// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/stream_admission.h"

#include "server/rpc/authorization.h"

namespace ema {

absl::Status RevokedError() {
  return MakeError(absl::StatusCode::kUnauthenticated, ErrorReason::kBadToken,
                   "the call's token is not known any more, or not for this");
}

bool StreamCall::MayGoOn(const Authenticator& authenticator) const {
  if (method_.empty()) return true;
  const absl::StatusOr<Access> access = Authorize(&authenticator, method_, authorization_);
  return access.ok() && (!model_.has_value() || access->Covers(*model_));
}

}  // namespace ema
