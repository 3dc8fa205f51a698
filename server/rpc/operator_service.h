// SPDX-License-Identifier: Apache-2.0
//
// The calls about the server itself: what it is, its group, its log, its end.
#ifndef EMA_SERVER_RPC_OPERATOR_SERVICE_H_
#define EMA_SERVER_RPC_OPERATOR_SERVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/rpc/rpc_context.h"

namespace ema {

// Describes the serving process, and what operators can do with it. Its functions may be called
// from any thread.
struct ServingProcess {
  std::string version;
  int64_t incarnation = 0;
  absl::Time start_time = absl::Now();
  absl::Duration drain_delay;
  absl::Duration drain_grace;
  struct LogLevels {
    std::string before;
    std::string now;
  };
  // Sets the log's level, or leaves it if `level` is empty. INVALID_ARGUMENT, BAD_REQUEST: unknown
  // level. Null: the process has no log.
  std::function<absl::StatusOr<LogLevels>(std::string_view level)> set_log_level;
  // Begins to drain, and returns at once. False: it has begun already. Null: it cannot be drained.
  std::function<bool()> drain;
};

// Answers GetServerInfo, GetGroup, SetLogLevel and Drain. Thread-safe.
class OperatorService {
 public:
  // Mirrors ema.v1.GetServerInfoResponse.Limit.
  struct Limit {
    std::string name;
    std::optional<int64_t> in_use;
    int64_t limit = 0;
  };
  // How it reads the server's state.
  struct View {
    std::function<absl::Status()> health;
    std::function<std::vector<Limit>()> limits;
  };

  OperatorService(std::shared_ptr<ModelStore> store, ServingProcess process, View view)
      : store_(std::move(store)), process_(std::move(process)), view_(std::move(view)) {}

  // Waits for the next call of each method on `queue`. This outlives the queue.
  void Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue);

 private:
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo(const v1::GetServerInfoRequest& request);
  absl::StatusOr<v1::SetLogLevelResponse> SetLogLevel(const v1::SetLogLevelRequest& request);
  absl::StatusOr<v1::DrainResponse> Drain(const v1::DrainRequest& request);

  const std::shared_ptr<ModelStore> store_;
  const ServingProcess process_;
  const View view_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_OPERATOR_SERVICE_H_
