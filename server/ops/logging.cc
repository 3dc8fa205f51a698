// SPDX-License-Identifier: Apache-2.0
#include "server/ops/logging.h"

#include <poll.h>
#include <spdlog/async_logger.h>
#include <spdlog/details/null_mutex.h>
#include <spdlog/details/thread_pool.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema {
namespace {

// By LogLevel.
constexpr std::array<std::string_view, 4> kLevelNames = {"debug", "info", "warn", "error"};

// Relaxed: for a moment after a change, lines may still be written by the old setting.
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
  // ASCII only, with invalid UTF-8 replaced: no text can end the line.
  return line.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/true,
                   nlohmann::ordered_json::error_handler_t::replace);
}

std::string ToLine(const LogEvent& event) {
  const std::string time =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(), absl::UTCTimeZone());
  if (line_format.load(std::memory_order_relaxed) == LogFormat::kJson) return ToJson(event, time);
  return absl::StrCat(time, " ", std::string(LogLevelName(event.level)), " ", ToText(event));
}

// Writes to stderr without stdio: while a write() blocks, stdio would hold stderr's lock. Returns
// false if stderr has rejected the line or a part of it.
bool WriteToStderr(std::string line) {
  line += '\n';
  std::string_view rest = line;
  while (!rest.empty()) {
    const ssize_t written = write(STDERR_FILENO, rest.data(), rest.size());
    if (written >= 0) {
      rest.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EAGAIN) {
      // Another process that has the same pipe may have made it non-blocking.
      pollfd stderr_file = {STDERR_FILENO, POLLOUT, 0};
      poll(&stderr_file, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

// spdlog's asynchronous logger, whose thread writes the queued lines to stderr. Never destroyed:
// threads may log until the process ends, and its thread may be in a write() that does not return.
class AsyncLog {
 public:
  AsyncLog()
      : pool_(std::make_shared<spdlog::details::thread_pool>(kQueuedLogLines, /*threads_n=*/1)),
        logger_(std::make_shared<spdlog::async_logger>(
            "ema", std::make_shared<Sink>(this), pool_,
            spdlog::async_overflow_policy::overrun_oldest)) {}
  ~AsyncLog() = delete;

  void Write(std::string_view line) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      ++queued_count_;
    }
    // This overload does not format: a line may contain braces.
    logger_->log(spdlog::level::critical, spdlog::string_view_t(line.data(), line.size()));
  }

  // Waits until all lines queued so far are written or dropped, at most `limit`.
  void Flush(absl::Duration limit) ABSL_LOCKS_EXCLUDED(mu_) {
    const SteadyTime deadline = After(SteadyNow(), limit);
    absl::MutexLock lock(&mu_);
    changed_.AwaitUntil(mu_, deadline,
                        [&, queued = queued_count_]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
                          return handled_count_ + overrun_count() >= queued;
                        });
  }

  int64_t dropped_count() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return rejected_count_ + overrun_count();
  }

 private:
  class Sink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
   public:
    explicit Sink(AsyncLog* log) : log_(log) {}

   private:
    void sink_it_(const spdlog::details::log_msg& message) override {
      log_->HandleQueued({message.payload.data(), message.payload.size()});
    }
    void flush_() override {}

    AsyncLog* const log_;
  };

  // Lines that did not fit into the queue.
  int64_t overrun_count() const { return static_cast<int64_t>(pool_->overrun_counter()); }

  // Called on spdlog's thread.
  void HandleQueued(std::string_view line) ABSL_LOCKS_EXCLUDED(mu_) {
    const int64_t dropped = dropped_count();
    if (dropped > reported_count_ &&
        WriteToStderr(ToLine(
            {LogLevel::kWarning, "log lines dropped", {{"count", dropped - reported_count_}}}))) {
      reported_count_ = dropped;
    }
    const bool is_written = WriteToStderr(std::string(line));
    absl::MutexLock lock(&mu_);
    ++handled_count_;
    if (!is_written) ++rejected_count_;
    changed_.WakeAll();
  }

  int64_t reported_count_ = 0;  // Of dropped_count(); used only on spdlog's thread.
  mutable absl::Mutex mu_;
  SteadyWait changed_;
  int64_t queued_count_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t handled_count_ ABSL_GUARDED_BY(mu_) = 0;   // Written or rejected.
  int64_t rejected_count_ ABSL_GUARDED_BY(mu_) = 0;  // By stderr, as on a full disk.
  const std::shared_ptr<spdlog::details::thread_pool> pool_;
  const std::shared_ptr<spdlog::logger> logger_;
};

AsyncLog& TheLog() {
  static AsyncLog* const log = [] {
    std::atexit(&FlushLog);
    return new AsyncLog();
  }();
  return *log;
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
  TheLog().Write(ToLine(event));
}

void Log(LogLevel level, std::string_view name, std::vector<LogField> fields) {
  Log(LogEvent{level, std::string(name), std::move(fields)});
}

void FlushLog() {
  constexpr absl::Duration kLimit = absl::Seconds(1);
  TheLog().Flush(kLimit);
}

int64_t DroppedLogLines() { return TheLog().dropped_count(); }

}  // namespace ema
