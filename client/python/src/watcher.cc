// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/watcher.h"

#include <unistd.h>

#include "client/python/src/gil.h"
#include "client/python/src/python_error.h"
#include "ema/internal/status_macros.h"
#include "server/base/kept_records.h"

namespace ema::python {

absl::StatusOr<std::unique_ptr<Watcher>> Watcher::Start(std::string_view address,
                                                        Client::Options options,
                                                        std::string_view model,
                                                        std::optional<VersionId> after,
                                                        absl::Duration timeout) {
  auto watcher = std::unique_ptr<Watcher>(new Watcher);
  options.is_interrupted = [stopped = &watcher->stopped_] {
    return stopped->load(std::memory_order_relaxed);
  };
  options.on_wait = nullptr;  // A thread that runs no Python.
  EMA_ASSIGN_OR_RETURN(watcher->client_, Client::Create(address, options));
  watcher->pid_ = getpid();
  absl::MutexLock lock(&watcher->stop_mu_);
  watcher->thread_ =
      std::thread(&Watcher::Watch, watcher.get(), std::string(model), after, timeout);
  return watcher;
}

Watcher::~Watcher() {
  if (client_ == nullptr) return;
  if (getpid() == pid_) {
    const GilReleased released;
    Stop();
    return;
  }
  // The thread is not in this process; a joinable std::thread must not be destroyed.
  absl::MutexLock lock(&stop_mu_);
  if (thread_.joinable()) thread_.detach();
}

void Watcher::Watch(const std::string& model, std::optional<VersionId> after,
                    absl::Duration timeout) {
  const absl::Status end = client_->Watch(
      model, after,
      [this](const Version& version, int64_t skipped) {
        absl::MutexLock lock(&mu_);
        AddItemLocked({version, skipped});
        wait_.WakeAll();
        return !stopped_.load(std::memory_order_relaxed);
      },
      timeout);
  absl::MutexLock lock(&mu_);
  ended_ = true;
  wait_.WakeAll();
  end_ = end.ok() ? absl::CancelledError("the watch was stopped") : end;
}

void Watcher::AddItemLocked(Item item) {
  item_bytes_ += RecordBytes(item.version);
  items_.push_back(std::move(item));
  while (AreTooManyRecords(static_cast<int64_t>(items_.size()), item_bytes_)) {
    const Item oldest = TakeItemLocked();
    items_.front().skipped += 1 + oldest.skipped;
  }
}

Watcher::Item Watcher::TakeItemLocked() {
  Item item = std::move(items_.front());
  items_.pop_front();
  item_bytes_ -= RecordBytes(item.version);
  return item;
}

absl::StatusOr<Watcher::Item> Watcher::Next() {
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      const auto ready = [this]()
                             ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !items_.empty() || ended_; };
      // Short, so that Ctrl-C is seen soon.
      if (wait_.AwaitUntil(mu_, After(SteadyNow(), absl::Milliseconds(50)), ready)) {
        if (items_.empty()) return end_;
        return TakeItemLocked();
      }
    }
    if (SignalRaised()) return absl::CancelledError("interrupted");
  }
}

void Watcher::Stop() {
  stopped_.store(true, std::memory_order_relaxed);
  absl::MutexLock lock(&stop_mu_);
  if (thread_.joinable()) thread_.join();
}

}  // namespace ema::python
