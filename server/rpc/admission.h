// SPDX-License-Identifier: Apache-2.0
//
// The one check before each call, and the count of calls that are under way.
#ifndef EMA_SERVER_RPC_ADMISSION_H_
#define EMA_SERVER_RPC_ADMISSION_H_

#include <grpcpp/server_context.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/authenticator.h"
#include "server/base/log_event.h"
#include "server/base/log_throttle.h"
#include "server/base/steady_wait.h"
#include "server/rpc/call_count.h"

namespace ema {

// The caller of an admitted call, and its rights.
struct Caller {
  Access access;
  std::string authorization;  // Value of that header; empty without an authenticator.
  LogCaller log;
  std::shared_ptr<const void> active_call;  // Counts the call: see Admission::AwaitNoCalls().
};

// The server whose model this one copies for readers, and does not change. The functions are
// thread-safe and do not block.
struct FollowedServer {
  std::string url;  // With the model, such as "ema://a:50051/m".
  // OK: the copied model can be read. UNAVAILABLE: it cannot be read yet.
  std::function<absl::Status()> check_readable;
  // OK: a version has been copied since the start. UNAVAILABLE: not yet, so this server is not
  // ready.
  std::function<absl::Status()> check_has_version;
};

// Decides whether a call may begin: whether its token is valid for the method and the model,
// whether the server is draining, and whether it only follows another one. Thread-safe.
class Admission {
 public:
  // Null `authenticator`: every caller may do everything. `log` gets a throttled warning about
  // calls that are refused for their token. Null `followed`: the server follows no other one. Both
  // pointers outlive this.
  Admission(const Authenticator* authenticator, LogSink log,
            const FollowedServer* followed = nullptr)
      : authenticator_(authenticator), log_(std::move(log)), followed_(followed) {}

  // `model`: what the call concerns, or nullopt if it concerns no model or none is known yet. A
  // call that has waited, or that learns of its model later, is admitted again. UNAVAILABLE,
  // DRAINING. FAILED_PRECONDITION, READ_ONLY: IsRefusedByFollower(). Other errors as Authorize()
  // and FollowedServer::check_readable.
  absl::StatusOr<Caller> Admit(std::string_view method, const grpc::ServerContext& context,
                               std::optional<std::string_view> model);
  // The same with the value of the header "authorization" and the name of the peer.
  absl::StatusOr<Caller> Admit(std::string_view method, std::string_view authorization,
                               std::string peer, std::optional<std::string_view> model);

  // From now on calls for which IsRejectedWhileDraining() are rejected.
  void StartDraining() { is_draining_.store(true, std::memory_order_relaxed); }
  // Returns when no admitted call is under way, or at `deadline`.
  void AwaitNoCalls(SteadyTime deadline) { admitted_.AwaitNone(deadline); }

 private:
  // For a server that follows another one.
  absl::Status CheckFollower(std::string_view method, bool has_model) const;

  const Authenticator* const authenticator_;
  const LogSink log_;
  const FollowedServer* const followed_;
  LogThrottle refusals_;
  std::atomic<bool> is_draining_ = false;  // Relaxed: a call may begin just before it is seen.
  CallCount admitted_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_ADMISSION_H_
