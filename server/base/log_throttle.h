// SPDX-License-Identifier: Apache-2.0
//
// Limits how often an event that peers can cause at will is logged.
#ifndef EMA_SERVER_BASE_LOG_THROTTLE_H_
#define EMA_SERVER_BASE_LOG_THROTTLE_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/base/log_event.h"

namespace ema {

// Allows one line per second, and a burst of ten after a pause. Thread-safe.
class LogThrottle {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Absent: drop this line. Otherwise log it, with the returned number of lines that were dropped
  // since the last logged one.
  std::optional<int64_t> Take(Time now) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    next_ = std::max(next_, now - kBurstLines * kInterval);
    if (next_ + kInterval > now) {
      ++dropped_count_;
      return std::nullopt;
    }
    next_ += kInterval;
    return std::exchange(dropped_count_, 0);
  }

  // Passes the event to `sink` unless Take() drops it, with the number of dropped lines as the last
  // field, `more_before`.
  void Log(const LogSink& sink, LogLevel level, std::string_view name,
           std::vector<LogField> fields) {
    const std::optional<int64_t> dropped_count = Take(std::chrono::steady_clock::now());
    if (!dropped_count.has_value()) return;
    fields.emplace_back("more_before", *dropped_count);
    LogTo(sink, level, name, std::move(fields));
  }

 private:
  static constexpr int kBurstLines = 10;
  static constexpr std::chrono::seconds kInterval{1};

  absl::Mutex mu_;
  Time next_ ABSL_GUARDED_BY(mu_);  // The allowed lines up to this time have been written.
  int64_t dropped_count_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_BASE_LOG_THROTTLE_H_
