// SPDX-License-Identifier: Apache-2.0
//
// Events of the log. The layers below server/ops make events and pass them to a sink;
// server/ops/logging.h writes them.
#ifndef EMA_SERVER_BASE_LOG_EVENT_H_
#define EMA_SERVER_BASE_LOG_EVENT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ema {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// A named boolean, integer, number or text. Text may come from anywhere; it is cut after
// kMaxTextBytes, and "..." added. Statuses and durations become text.
struct LogField {
  static constexpr size_t kMaxTextBytes = 1 << 10;

  template <typename T>
  LogField(std::string_view name, const T& given) : key(name), value(ValueOf(given)) {}

  std::string key;  // A word such as model, run, step, version or peer.
  std::variant<bool, int64_t, double, std::string> value;

 private:
  template <typename T>
  static decltype(value) ValueOf(const T& given) {
    if constexpr (std::is_same_v<T, bool>) {
      return given;
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<int64_t>(given);
    } else if constexpr (std::is_floating_point_v<T>) {
      return static_cast<double>(given);
    } else if constexpr (std::is_same_v<T, absl::Duration>) {
      return absl::FormatDuration(given);
    } else if constexpr (std::is_same_v<T, absl::Status>) {
      return Clipped(given.ToString(absl::StatusToStringMode::kWithNoExtraData));
    } else {
      return Clipped(std::string(given));
    }
  }
  static std::string Clipped(std::string text) {
    if (text.size() > kMaxTextBytes) text.replace(kMaxTextBytes, std::string::npos, "...");
    return text;
  }
};

// One line of the log. Never holds values of tensors, or secrets.
struct LogEvent {
  LogLevel level = LogLevel::kInfo;
  std::string name;  // Names the kind of event in fixed words, such as "checkpoint saved".
  std::vector<LogField> fields;
  bool is_record = false;  // An audit record: written at every log level.
};

// The client on whose behalf a thread works.
struct LogCaller {
  std::string peer;  // As gRPC names it, such as "ipv4:10.0.0.1:4711", or "lane:pid=4711".
  std::string role;  // Of its token; empty if the server needs no tokens.
};

// While it exists, events of its thread are attributed to `caller`, which must outlive it.
class LogCallerScope {
 public:
  explicit LogCallerScope(const LogCaller* caller);
  ~LogCallerScope();
  LogCallerScope(const LogCallerScope&) = delete;
  LogCallerScope& operator=(const LogCallerScope&) = delete;

 private:
  const LogCaller* const outer_;
};

// Adds the `peer` and `role` of the thread's caller, unless `event` has these fields already.
void AddCaller(LogEvent& event);

// Receives events from any thread. May be empty.
using LogSink = std::function<void(const LogEvent&)>;

inline void LogTo(const LogSink& sink, LogLevel level, std::string_view name,
                  std::vector<LogField> fields) {
  if (sink) sink({level, std::string(name), std::move(fields)});
}

// Formats an event as `committed model=gpt step=5`, on one line whatever its fields contain. Text
// that is empty, or has characters other than letters, digits and most punctuation, is quoted;
// control characters, bytes above 126, quotes and backslashes in it are escaped as in C.
std::string ToText(const LogEvent& event);

}  // namespace ema

#endif  // EMA_SERVER_BASE_LOG_EVENT_H_
