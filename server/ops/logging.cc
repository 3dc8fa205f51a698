// SPDX-License-Identifier: Apache-2.0
#include "server/ops/logging.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <string>

namespace ema {
namespace {

spdlog::level::level_enum SpdlogLevel(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

// Never destroyed: threads may log until the process ends.
spdlog::logger& Logger() {
  static spdlog::logger* const logger = [] {
    auto* const made = new spdlog::logger("ema", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%fZ %l %v", spdlog::pattern_time_type::utc);
    made->flush_on(spdlog::level::debug);
    return made;
  }();
  return *logger;
}

}  // namespace

void InitLogging(std::string_view level) {
  Logger().set_level(level == "debug"   ? spdlog::level::debug
                     : level == "warn"  ? spdlog::level::warn
                     : level == "error" ? spdlog::level::err
                                        : spdlog::level::info);
}

void Log(LogLevel level, std::string_view message) {
  if (!Logger().should_log(SpdlogLevel(level))) return;
  std::string line(message);
  for (char& c : line) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  // Without its formatting: a message may hold braces.
  Logger().log(SpdlogLevel(level), spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace ema
