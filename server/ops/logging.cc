// SPDX-License-Identifier: Apache-2.0
#include "server/ops/logging.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/ops/log_writer.h"

namespace ema {
namespace {

// By LogLevel.
constexpr std::array<std::string_view, 4> kLevelNames = {"debug", "info", "warn", "error"};

// Relaxed: a line may still be written as before.
std::atomic<LogLevel> least_level{LogLevel::kInfo};
std::atomic<LogFormat> line_format{LogFormat::kText};

std::string ToJson(const LogEvent& event, const std::string& time) {
  nlohmann::ordered_json line;
  line["ts"] = time;
  line["level"] = LogLevelName(event.level);
  line["event"] = event.name;
  for (const LogField& field : event.fields) {
    std::visit([&](const auto& value) { line[field.key] = value; }, field.value);
  }
  // In ASCII, and bytes that are not UTF-8 replaced: no text can end the line.
  return line.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/true,
                   nlohmann::ordered_json::error_handler_t::replace);
}

std::string ToLine(const LogEvent& event) {
  const std::string time =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(), absl::UTCTimeZone());
  if (line_format.load(std::memory_order_relaxed) == LogFormat::kJson) return ToJson(event, time);
  return absl::StrCat(time, " ", std::string(LogLevelName(event.level)), " ", ToText(event));
}

// Never destroyed: threads may log until the process ends.
LogWriter& Writer() {
  static LogWriter* const writer = [] {
    auto* const made = new LogWriter([](int64_t count) {
      return ToLine({LogLevel::kWarning, "log lines dropped", {{"count", count}}});
    });
    std::atexit(&FlushLog);
    return made;
  }();
  return *writer;
}

}  // namespace

std::optional<LogLevel> ParseLogLevel(std::string_view name) {
  for (size_t i = 0; i < kLevelNames.size(); ++i) {
    if (kLevelNames[i] == name) return static_cast<LogLevel>(i);
  }
  return std::nullopt;
}

std::string_view LogLevelName(LogLevel level) { return kLevelNames[static_cast<size_t>(level)]; }

void SetLogLevel(LogLevel level) { least_level.store(level, std::memory_order_relaxed); }

LogLevel log_level() { return least_level.load(std::memory_order_relaxed); }

void SetLogFormat(LogFormat format) { line_format.store(format, std::memory_order_relaxed); }

void Log(const LogEvent& given) {
  if (given.level < log_level() && !given.is_record) return;
  LogEvent event = given;
  AddCaller(event);
  Writer().Write(ToLine(event));
}

void Log(LogLevel level, std::string_view name, std::vector<LogField> fields) {
  Log(LogEvent{level, std::string(name), std::move(fields)});
}

void FlushLog() {
  constexpr absl::Duration kLimit = absl::Seconds(1);
  Writer().Flush(kLimit);
}

int64_t DroppedLogLines() { return Writer().dropped_count(); }

}  // namespace ema
