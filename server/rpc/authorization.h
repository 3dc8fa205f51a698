// SPDX-License-Identifier: Apache-2.0
//
// Which role each RPC needs, and which a server that drains refuses: the one place where it is
// written.
#ifndef EMA_SERVER_RPC_AUTHORIZATION_H_
#define EMA_SERVER_RPC_AUTHORIZATION_H_

#include <grpcpp/server_context.h>

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/authenticator.h"
#include "server/base/log_event.h"

namespace ema {

inline constexpr char kHealthCheck[] = "/grpc.health.v1.Health/Check";

// Whose call it is.
struct Caller {
  Access access;
  // The value of that header; empty: nobody is asked for one.
  std::string authorization;
  LogCaller log;
};

// The least role that may call `method`, such as "/ema.v1.EmaService/Push"; absent: nobody may, for
// there is no rule.
std::optional<Role> RoleFor(std::string_view method);

// True: a call of `method` begins something that may take long, rather than going on with what its
// caller has begun. A server that drains refuses it.
bool BeginsWork(std::string_view method);

// What the caller may do, who may call `method`. `authorization` is the value of that header. Null
// `authenticator`: everybody may do everything. UNAUTHENTICATED, BAD_TOKEN. PERMISSION_DENIED,
// NOT_ALLOWED: the role does not do, or the call is about the whole server and the token for some
// models.
absl::StatusOr<Access> Authorize(const Authenticator* authenticator, std::string_view method,
                                 std::string_view authorization);
// PERMISSION_DENIED, NOT_ALLOWED: the model, there or not, is none of the caller's.
// INVALID_ARGUMENT, BAD_NAME: it is none of anybody's.
absl::Status CheckCovers(const Access& access, std::string_view model);

// The value of the header "authorization"; "": there is none.
std::string AuthorizationOf(const grpc::ServerContext& context);

}  // namespace ema

#endif  // EMA_SERVER_RPC_AUTHORIZATION_H_
