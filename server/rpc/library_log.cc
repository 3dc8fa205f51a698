// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/library_log.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <atomic>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/base/log_throttle.h"

namespace ema {
namespace {

struct LibraryLog {
  LogSink sink;
  std::function<void()> flush;
  LogThrottle grpc;
  LogThrottle protobuf;
  LibraryLog* replaced = nullptr;
};

// Global, because the libraries' log functions have no argument for it. Never destroyed, nor are
// those that it has replaced: the libraries' threads may use them until the process ends.
std::atomic<LibraryLog*> library_log = nullptr;

std::vector<LogField> FieldsOf(std::string_view message, std::string_view path, int line) {
  return {{"message", message}, {"file", path.substr(path.rfind('/') + 1)}, {"line", line}};
}

// `is_last`: the library ends the process next.
void ReportError(LibraryLog& log, LogThrottle& throttle, std::string_view library,
                 std::vector<LogField> fields, bool is_last) {
  if (!is_last) return throttle.Log(log.sink, LogLevel::kWarning, library, std::move(fields));
  LogTo(log.sink, LogLevel::kError, library, std::move(fields));
  log.flush();
}

void ReportGrpc(gpr_log_func_args* args) {
  constexpr std::string_view kLibrary = "gRPC";
  LibraryLog& log = *library_log.load(std::memory_order_acquire);
  std::vector<LogField> fields = FieldsOf(args->message, args->file, args->line);
  switch (args->severity) {
    case GPR_LOG_SEVERITY_ERROR: {
      // GPR_ASSERT() aborts next.
      const bool is_last = std::string_view(args->message).starts_with("assertion failed");
      return ReportError(log, log.grpc, kLibrary, std::move(fields), is_last);
    }
    case GPR_LOG_SEVERITY_INFO:
      return LogTo(log.sink, LogLevel::kInfo, kLibrary, std::move(fields));
    case GPR_LOG_SEVERITY_DEBUG:
      return LogTo(log.sink, LogLevel::kDebug, kLibrary, std::move(fields));
  }
}

void ReportProtobuf(google::protobuf::LogLevel level, const char* file, int line,
                    const std::string& message) {
  LibraryLog& log = *library_log.load(std::memory_order_acquire);
  ReportError(log, log.protobuf, "protobuf", FieldsOf(message, file, line),
              level == google::protobuf::LOGLEVEL_FATAL);
}

}  // namespace

void SendLibraryLogTo(LogSink sink, std::function<void()> flush) {
  library_log.store(new LibraryLog{.sink = std::move(sink),
                                   .flush = std::move(flush),
                                   .grpc = {},
                                   .protobuf = {},
                                   .replaced = library_log.load(std::memory_order_acquire)},
                    std::memory_order_release);
  gpr_set_log_function(&ReportGrpc);
  google::protobuf::SetLogHandler(&ReportProtobuf);
}

}  // namespace ema
