// SPDX-License-Identifier: Apache-2.0
//
// What the server gives to each of its calls.
#ifndef EMA_SERVER_RPC_RPC_CONTEXT_H_
#define EMA_SERVER_RPC_RPC_CONTEXT_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/async_stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ema/v1/ema_service.grpc.pb.h"
#include "server/base/log_event.h"
#include "server/base/log_throttle.h"
#include "server/base/observer.h"
#include "server/core/checkpoints.h"
#include "server/core/memory_budget.h"
#include "server/core/model_store.h"
#include "server/rpc/authorization.h"
#include "server/rpc/call_queue.h"
#include "server/rpc/calls_in_flight.h"
#include "server/rpc/generic_service.h"
#include "server/rpc/grpc_status.h"
#include "server/rpc/rate_limit.h"
#include "server/rpc/stream_admission.h"
#include "server/rpc/worker.h"

namespace ema {

// What calls need of their server; outlives them.
struct RpcContext {
  // Who calls, if a call of `method` may begin. RESOURCE_EXHAUSTED, TOO_MANY_CALLS; UNAVAILABLE,
  // DRAINING; and as Authorize().
  absl::StatusOr<Caller> Admit(std::string_view method, const grpc::ServerContext& context);
  // As above for a call that gRPC did not bring, as of a same-host lane: `authorization` is the
  // value that the header would have. Does not count for the rate.
  absl::StatusOr<Caller> Admit(std::string_view method, std::string_view authorization,
                               std::string peer);
  // As CheckCovers(), for what a call is about, if it is about a model.
  absl::Status CheckModel(std::string_view method, const Caller& caller,
                          std::optional<std::string_view> model);

  GenericService service{EmaMethods()};
  GenericService health{{kHealthCheck}};
  std::shared_ptr<ModelStore> store;
  StreamAdmission pushes;
  StreamAdmission pulls;
  StreamAdmission watches;
  StreamAdmission requests;  // Requests that are arriving, but health checks.
  StreamAdmission probes;    // Health checks that are arriving: they need no token.
  RateLimit rate;            // Of all calls but health checks.
  MemoryBudget waiting;      // Of long requests whose turn has not come, or that wait for the disk.
  LogSink log;
  LogThrottle refusals;
  std::atomic<bool> refuses_work = false;  // Relaxed: a call may just have got in.
  CallsInFlight calls;
  Checkpoints* checkpoints = nullptr;      // Outlives this. Never null in a server.
  Authenticator* authenticator = nullptr;  // Outlives this. Null: all callers may do all.
  ServerObserver* observer = nullptr;      // Outlives this. Never null.
  // Their threads make the chunks of pulls that need the disk, and of those that need an
  // accelerator: one chunk of each pull in turn. Never null in a server.
  Worker* disk_reader = nullptr;
  Worker* device_reader = nullptr;

 private:
  // To the log, but not as many lines as there may be calls.
  void LogRefused(std::string_view method, std::string_view peer, const absl::Status& status);
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_RPC_CONTEXT_H_
