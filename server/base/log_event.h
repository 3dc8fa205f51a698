// SPDX-License-Identifier: Apache-2.0
//
// What the log is told. The layers below server/ops make events and hand them to a sink; how they
// are written is decided in server/ops/logging.h.
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

// A named value: a truth value, an integer, a number, or text, which may come from anywhere: its
// first kMaxTextBytes, and "..." if there was more. A status and a duration are text, too.
struct LogField {
  static constexpr size_t kMaxTextBytes = 1 << 10;

  template <typename T>
  LogField(std::string_view name, const T& given) : key(name), value(ValueOf(given)) {}

  std::string key;  // As model, run, step, version, peer: a word that JSON and logfmt can have.
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
  std::string name;  // Of the kind of event: always the same words, such as "checkpoint saved".
  std::vector<LogField> fields;
  bool is_record = false;  // Of who has done what: written whatever the log's level is.
};

// Who has called for what a thread does; empty: nobody has.
struct LogCaller {
  std::string peer;  // As gRPC names it, such as "ipv4:10.0.0.1:4711", or "lane:pid=4711".
  std::string role;  // Of its token; empty: nobody is asked for one.
};

// While it lives, events of its thread are those of `caller`, which outlives it.
class LogCallerScope {
 public:
  explicit LogCallerScope(const LogCaller* caller);
  ~LogCallerScope();
  LogCallerScope(const LogCallerScope&) = delete;
  LogCallerScope& operator=(const LogCallerScope&) = delete;

 private:
  const LogCaller* const outer_;
};

// Adds the `peer` and `role` of the thread's caller, if there is one and `event` does not say them.
void AddCaller(LogEvent& event);

// Takes events. May be empty: nobody listens. Called from any thread.
using LogSink = std::function<void(const LogEvent&)>;

inline void LogTo(const LogSink& sink, LogLevel level, std::string_view name,
                  std::vector<LogField> fields) {
  if (sink) sink({level, std::string(name), std::move(fields)});
}

// `committed model=gpt step=5`: the name, then the fields, on one line whatever they hold. Text
// that is empty, or has characters other than letters, digits and most punctuation, is in quotes;
// control characters, bytes above 126, quotes and backslashes in it are escaped as in C.
std::string ToText(const LogEvent& event);

}  // namespace ema

#endif  // EMA_SERVER_BASE_LOG_EVENT_H_
