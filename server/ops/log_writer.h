// SPDX-License-Identifier: Apache-2.0
//
// Writes the lines of the log to stderr, on a thread of its own.
#ifndef EMA_SERVER_OPS_LOG_WRITER_H_
#define EMA_SERVER_OPS_LOG_WRITER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace spdlog {
class logger;
namespace details {
class thread_pool;
}  // namespace details
}  // namespace spdlog

namespace ema {

// Nobody but its thread waits for stderr: whoever reads that may have stopped, and must stop
// neither serving nor saving. Up to kQueuedLines wait for it, in order; beyond that the oldest are
// dropped.
//
// Thread-safe. Never destroyed: its thread may be in a write() that does not end.
class LogWriter {
 public:
  static constexpr int kQueuedLines = 4096;

  // `line_of_dropped` makes the line that says how many were dropped before the next; it is called
  // on the writer's thread, which is started here.
  explicit LogWriter(std::function<std::string(int64_t count)> line_of_dropped);
  ~LogWriter() = delete;

  // `line` has no end of line. Does not block.
  void Write(std::string_view line) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until all lines so far are written or dropped, at most `limit`.
  void Flush(absl::Duration limit) ABSL_LOCKS_EXCLUDED(mu_);
  // Lines for which there was no room, or which stderr refused (a full disk, a broken pipe).
  int64_t dropped_count() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Sink;

  int64_t overrun_count() const;  // Lines for which there was no room.
  // On the thread.
  void Take(std::string_view line) ABSL_LOCKS_EXCLUDED(mu_);

  const std::function<std::string(int64_t count)> line_of_dropped_;
  int64_t told_count_ = 0;  // Only on the thread: what lines have said of dropped_count().
  mutable absl::Mutex mu_;
  SteadyWait taken_;
  int64_t given_count_ ABSL_GUARDED_BY(mu_) = 0;    // To Write().
  int64_t taken_count_ ABSL_GUARDED_BY(mu_) = 0;    // Off the queue, and written or refused.
  int64_t refused_count_ ABSL_GUARDED_BY(mu_) = 0;  // By stderr.
  // spdlog's queue and thread. Constant, as logger_, before anything is written.
  std::shared_ptr<spdlog::details::thread_pool> pool_;
  std::shared_ptr<spdlog::logger> logger_;
};

}  // namespace ema

#endif  // EMA_SERVER_OPS_LOG_WRITER_H_
