// SPDX-License-Identifier: Apache-2.0
//
// The thread for saves whose callers do not wait.
#ifndef EMA_SERVER_CHECKPOINT_SAVE_QUEUE_H_
#define EMA_SERVER_CHECKPOINT_SAVE_QUEUE_H_

#include <deque>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/heartbeat.h"
#include "server/base/steady_wait.h"
#include "server/checkpoint/data_directory.h"

namespace ema {

// Runs queued saves, one at a time and in order; every accepted save is run. Between saves it
// updates the free space and health of the data directory. Thread-safe.
class SaveQueue {
 public:
  // `disk_interval`: between updates of the disk's state; infinite: never. `data` and `heartbeat`
  // (which may be null) outlive this.
  SaveQueue(DataDirectory& data, absl::Duration disk_interval, Heartbeat* heartbeat);
  ~SaveQueue() { Stop(); }

  // False: Stop() or RequestStop() has been called.
  bool Push(std::function<void()> save) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until everything that was pushed is done. For tests.
  void AwaitIdle() ABSL_LOCKS_EXCLUDED(mu_);

  bool is_stopping() const ABSL_LOCKS_EXCLUDED(mu_);
  // From now on Push() accepts no more.
  void RequestStop() ABSL_LOCKS_EXCLUDED(mu_);
  // RequestStop(), and waits for the accepted saves. Not to be called by two threads at once.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  void UpdateFreeBytes() {
    if (disk_interval_ != absl::InfiniteDuration()) data_.UpdateFreeBytes();
  }

  DataDirectory& data_;
  const absl::Duration disk_interval_;
  Heartbeat* const heartbeat_;

  mutable absl::Mutex mu_;
  std::deque<std::function<void()>> saves_ ABSL_GUARDED_BY(mu_);  // The running one is the first.
  bool is_stopping_ ABSL_GUARDED_BY(mu_) = false;
  SteadyWait wait_;  // Woken when one of these has changed.
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_SAVE_QUEUE_H_
