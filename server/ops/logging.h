// SPDX-License-Identifier: Apache-2.0
//
// The server's log: one line per event on stderr, as text or JSON.
#ifndef EMA_SERVER_OPS_LOGGING_H_
#define EMA_SERVER_OPS_LOGGING_H_

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "server/base/log_event.h"

namespace ema {

enum class LogFormat {
  kText,  // 2026-01-02T03:04:05.678901Z info committed model=gpt step=5
  kJson,  // {"ts":"2026-01-02T03:04:05.678901Z","level":"info","event":"committed","model":"gpt",..}
};

// Parses "debug", "info", "warn" or "error"; nullopt for anything else.
std::optional<LogLevel> ParseLogLevel(std::string_view name);
std::string_view LogLevelName(LogLevel level);

// Sets the lowest level that is written; initially kInfo. Thread-safe.
void SetLogLevel(LogLevel level);
LogLevel log_level();
// Initially kText. Thread-safe.
void SetLogFormat(LogFormat format);

// At most this many lines wait for stderr; when there are more, the oldest are dropped.
inline constexpr int kQueuedLogLines = 4096;

// Queues `event` as one line with the time (UTC). Lines are written in order, by one thread, so
// that a stalled reader of stderr blocks no caller. Thread-safe. Not for values of tensors, or
// secrets.
void Log(const LogEvent& event);
void Log(LogLevel level, std::string_view name, std::vector<LogField> fields = {});

// Waits until all lines queued so far are written or dropped, for at most a second. Runs by itself
// at exit(). Thread-safe.
void FlushLog();

// Lines that were dropped because the queue was full or because stderr rejected them (full disk,
// broken pipe). A line "log lines dropped" before the next written line reports them. Thread-safe.
int64_t DroppedLogLines();

}  // namespace ema

#endif  // EMA_SERVER_OPS_LOGGING_H_
