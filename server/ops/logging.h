// SPDX-License-Identifier: Apache-2.0
//
// The server's log: one line an event on stderr, as text or JSON. A thread of its own writes them:
// whoever reads stderr may have stopped.
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

// "debug", "info", "warn", "error"; nullopt: anything else.
std::optional<LogLevel> ParseLogLevel(std::string_view name);
std::string_view LogLevelName(LogLevel level);

// Events from this level on are written; kInfo without a call. Thread-safe, at any time.
void SetLogLevel(LogLevel level);
LogLevel log_level();
// kText without a call. Thread-safe.
void SetLogFormat(LogFormat format);

// Has `event` written as one line, with the time (UTC), soon and in order. Thread-safe; does not
// block. Not for values of tensors, or secrets.
void Log(const LogEvent& event);
void Log(LogLevel level, std::string_view name, std::vector<LogField> fields = {});

// Waits until what has been logged is written, for at most a second. exit() does it by itself.
// Thread-safe.
void FlushLog();

// Lines that are lost: stderr did not take them, or not in time. What is logged next says so.
// Thread-safe.
int64_t DroppedLogLines();

}  // namespace ema

#endif  // EMA_SERVER_OPS_LOGGING_H_
