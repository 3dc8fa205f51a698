// SPDX-License-Identifier: Apache-2.0
#include "server/ops/log_writer.h"

#include <poll.h>
#include <spdlog/async_logger.h>
#include <spdlog/details/null_mutex.h>
#include <spdlog/details/thread_pool.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace ema {
namespace {

// False: stderr has refused it, or a part. Without stdio, whose lock for stderr others would wait
// for.
bool WriteLine(std::string line) {
  line += '\n';
  std::string_view left = line;
  while (!left.empty()) {
    const ssize_t written = write(STDERR_FILENO, left.data(), left.size());
    if (written >= 0) {
      left.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EAGAIN) {
      // Whoever has the other end may have made it not blocking for all.
      pollfd stderr_file = {STDERR_FILENO, POLLOUT, 0};
      poll(&stderr_file, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace

class LogWriter::Sink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  explicit Sink(LogWriter* writer) : writer_(writer) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    writer_->Take({message.payload.data(), message.payload.size()});
  }
  void flush_() override {}

  LogWriter* const writer_;
};

LogWriter::LogWriter(std::function<std::string(int64_t)> line_of_dropped)
    : line_of_dropped_(std::move(line_of_dropped)),
      pool_(std::make_shared<spdlog::details::thread_pool>(kQueuedLines, /*threads_n=*/1)),
      logger_(
          std::make_shared<spdlog::async_logger>("ema", std::make_shared<Sink>(this), pool_,
                                                 spdlog::async_overflow_policy::overrun_oldest)) {}

void LogWriter::Write(std::string_view line) {
  {
    absl::MutexLock lock(&mu_);
    ++given_count_;
  }
  // Without spdlog's formatting: a line may hold braces.
  logger_->log(spdlog::level::critical, spdlog::string_view_t(line.data(), line.size()));
}

void LogWriter::Flush(absl::Duration limit) {
  const SteadyTime deadline = After(SteadyNow(), limit);
  absl::MutexLock lock(&mu_);
  taken_.AwaitUntil(mu_, deadline, [this, given = given_count_]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return taken_count_ + overrun_count() >= given;
  });
}

int64_t LogWriter::dropped_count() const {
  absl::MutexLock lock(&mu_);
  return refused_count_ + overrun_count();
}

int64_t LogWriter::overrun_count() const { return static_cast<int64_t>(pool_->overrun_counter()); }

void LogWriter::Take(std::string_view line) {
  const int64_t dropped = dropped_count();
  if (dropped > told_count_ && WriteLine(line_of_dropped_(dropped - told_count_))) {
    told_count_ = dropped;
  }
  const bool is_written = WriteLine(std::string(line));
  absl::MutexLock lock(&mu_);
  ++taken_count_;
  if (!is_written) ++refused_count_;
  taken_.WakeAll();
}

}  // namespace ema
