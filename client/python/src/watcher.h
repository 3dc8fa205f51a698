// SPDX-License-Identifier: Apache-2.0
//
// Client::Watch() turned around, so that a Python iterator can take one version at a time.
#ifndef EMA_CLIENT_PYTHON_SRC_WATCHER_H_
#define EMA_CLIENT_PYTHON_SRC_WATCHER_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ema/client.h"
#include "server/base/steady_wait.h"

namespace ema::python {

// Watches in a thread of its own and queues what comes, as many records as the server keeps of a
// model: that thread takes them from there faster than a slow reader from here. Of more the oldest
// are dropped, and counted as skipped. Next() and Stop() may be called from any thread; without the
// GIL, or they would hold up every other thread.
class Watcher {
 public:
  // Makes a connection of its own, as `options` say but for `is_interrupted`, so that Stop() ends
  // this watch and nothing else, and `on_wait`.
  static absl::StatusOr<std::unique_ptr<Watcher>> Start(std::string_view address,
                                                        Client::Options options,
                                                        std::string_view model,
                                                        std::optional<VersionId> after,
                                                        absl::Duration timeout);
  ~Watcher();  // With the GIL, which it lets go: Stop(). In a forked child: nothing.

  struct Item {
    Version version;
    int64_t skipped = 0;  // Versions before it whose records the server or this has let go.
  };
  // The next version; waits for it. What ended the watch: as Client::Watch(), or CANCELLED after
  // Stop() or a signal.
  absl::StatusOr<Item> Next() ABSL_LOCKS_EXCLUDED(mu_);

  // Ends the watch and waits for its thread.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_, stop_mu_);

 private:
  Watcher() = default;
  void Watch(const std::string& model, std::optional<VersionId> after, absl::Duration timeout);
  void AddItemLocked(Item item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Item TakeItemLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // REQUIRES: there is one.

  std::unique_ptr<Client> client_;  // Constant after Start().
  pid_t pid_ = 0;                   // Constant after Start().
  // Asked by the client while it waits. Relaxed: it carries nothing else.
  std::atomic<bool> stopped_ = false;
  absl::Mutex mu_;
  SteadyWait wait_;                              // Woken when one of these changes.
  std::deque<Item> items_ ABSL_GUARDED_BY(mu_);  // Oldest first.
  int64_t item_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // That their records take.
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mu_);
  absl::Mutex stop_mu_;  // Of two Stop() only one joins.
  std::thread thread_ ABSL_GUARDED_BY(stop_mu_);
};

}  // namespace ema::python

#endif  // EMA_CLIENT_PYTHON_SRC_WATCHER_H_
