// SPDX-License-Identifier: Apache-2.0
#include "server/ops/thread_limit.h"

#include <system_error>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"

namespace ema {

bool CanMakeThreads(int64_t count) {
  std::vector<std::thread> threads;
  absl::Notification all_tried;
  try {
    while (std::ssize(threads) < count) {
      threads.emplace_back([&all_tried] { all_tried.WaitForNotification(); });
    }
  } catch (const std::system_error&) {  // Counted below.
  }
  all_tried.Notify();
  for (std::thread& thread : threads) thread.join();
  return std::ssize(threads) == count;
}

}  // namespace ema
