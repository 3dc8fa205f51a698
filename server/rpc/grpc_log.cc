// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/grpc_log.h"

#include <grpc/support/log.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "server/base/log_throttle.h"

namespace ema {
namespace {

struct GrpcLog {
  LogSink sink;
  LogThrottle throttle;
};

// gRPC's function has no place for it. Never destroyed: gRPC's threads may log until the end.
std::atomic<GrpcLog*> grpc_log = nullptr;

void TellError(GrpcLog& log, std::string_view message, std::vector<LogField> fields) {
  // GPR_ASSERT() aborts next.
  const bool is_last = message.starts_with("assertion failed");
  const std::optional<int64_t> unsaid = log.throttle.Take(std::chrono::steady_clock::now());
  if (!unsaid.has_value() && !is_last) return;
  fields.emplace_back("more_before", unsaid.value_or(0));
  LogTo(log.sink, is_last ? LogLevel::kError : LogLevel::kWarning, "gRPC", std::move(fields));
}

void Tell(gpr_log_func_args* args) {
  GrpcLog& log = *grpc_log.load(std::memory_order_acquire);
  const std::string_view path = args->file;
  std::vector<LogField> fields = {
      {"message", args->message}, {"file", path.substr(path.rfind('/') + 1)}, {"line", args->line}};
  switch (args->severity) {
    case GPR_LOG_SEVERITY_ERROR:
      return TellError(log, args->message, std::move(fields));
    case GPR_LOG_SEVERITY_INFO:
      return LogTo(log.sink, LogLevel::kInfo, "gRPC", std::move(fields));
    case GPR_LOG_SEVERITY_DEBUG:
      return LogTo(log.sink, LogLevel::kDebug, "gRPC", std::move(fields));
  }
}

}  // namespace

void SendGrpcLogTo(LogSink sink) {
  grpc_log.store(new GrpcLog{.sink = std::move(sink), .throttle = {}}, std::memory_order_release);
  gpr_set_log_function(&Tell);
}

}  // namespace ema
