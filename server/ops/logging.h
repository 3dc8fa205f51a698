// SPDX-License-Identifier: Apache-2.0
//
// The server's log: one line an event on stderr, with time and level.
#ifndef EMA_SERVER_OPS_LOGGING_H_
#define EMA_SERVER_OPS_LOGGING_H_

#include <string_view>

namespace ema {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Sets the level ("debug", "info", "warn", "error") from which on events are logged. To be called
// once, before other threads start; without it "info" holds. An unknown name counts as "info".
void InitLogging(std::string_view level);

// Writes `2026-01-02T03:04:05.678901Z info message`, line ends in it replaced so that it stays one
// line. Thread-safe; blocks while stderr does. Not for tensor values, secrets or paths from
// clients.
void Log(LogLevel level, std::string_view message);

inline void LogInfo(std::string_view message) { Log(LogLevel::kInfo, message); }
inline void LogWarning(std::string_view message) { Log(LogLevel::kWarning, message); }
inline void LogError(std::string_view message) { Log(LogLevel::kError, message); }

}  // namespace ema

#endif  // EMA_SERVER_OPS_LOGGING_H_
