// SPDX-License-Identifier: Apache-2.0
#include "server/ops/thread_limit.h"

#include <atomic>
#include <cstdlib>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"

namespace ema {

bool CanMakeThreads(int64_t count) {
  std::vector<std::thread> threads;
  std::atomic<bool> has_memory = true;  // For each of them; read when all have ended.
  absl::Notification all_tried;
  try {
    while (std::ssize(threads) < count) {
      threads.emplace_back([&] {
        // A thread's heap is address space that ulimit -v counts, like its stack.
        void* volatile memory = std::malloc(1);  // Else a compiler may leave it out.
        if (memory == nullptr) has_memory = false;
        all_tried.WaitForNotification();
        std::free(memory);
      });
    }
  } catch (const std::system_error&) {  // Counted below.
  }
  all_tried.Notify();
  for (std::thread& thread : threads) thread.join();
  return has_memory && std::ssize(threads) == count;
}

}  // namespace ema
