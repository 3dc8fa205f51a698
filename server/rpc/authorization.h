// SPDX-License-Identifier: Apache-2.0
//
// The rules of who may call which RPC, and which RPCs a draining server rejects.
#ifndef EMA_SERVER_RPC_AUTHORIZATION_H_
#define EMA_SERVER_RPC_AUTHORIZATION_H_

#include <optional>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/base/authenticator.h"

namespace ema {

inline constexpr char kHealthCheck[] = "/grpc.health.v1.Health/Check";

// "Push" of "/ema.v1.EmaService/Push".
std::string_view ShortName(std::string_view method);

// The role whose rights a call of `method` needs, such as "/ema.v1.EmaService/Push". nullopt: there
// is no rule, so no role may call it.
std::optional<Role> RoleFor(std::string_view method);

// True for calls that a draining server rejects: those that may take long, such as pulls, watches,
// saves and restores. Short calls are accepted, also those that change something, such as SetLabel.
// ModelStore::Drain() rejects new models, runs and steps.
bool IsRejectedWhileDraining(std::string_view method);

// True for calls that a read replica refuses: those that change a model, and those that need more
// rights than an evaluator has, unless they concern the server itself, such as Drain.
bool IsRefusedByFollower(std::string_view method);

// What the caller of `method` may do. `authorization` is the value of that header; `model` is the
// model that the call concerns, or nullopt if it concerns none or none is known yet. Null
// `authenticator`: every caller may do everything.
// UNAUTHENTICATED, BAD_TOKEN. PERMISSION_DENIED, NOT_ALLOWED: the role or the models of the token
// do not allow the call; the error does not tell whether the model exists. INVALID_ARGUMENT,
// BAD_NAME: the token does not cover `model`, which is not a valid name either.
absl::StatusOr<Access> Authorize(const Authenticator* authenticator, std::string_view method,
                                 std::string_view authorization,
                                 std::optional<std::string_view> model);

}  // namespace ema

#endif  // EMA_SERVER_RPC_AUTHORIZATION_H_
