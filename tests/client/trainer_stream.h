// SPDX-License-Identifier: Apache-2.0
//
// A trainer's stream on the fake CUDA driver.
#ifndef EMA_TESTS_CLIENT_TRAINER_STREAM_H_
#define EMA_TESTS_CLIENT_TRAINER_STREAM_H_

#include <functional>
#include <memory>
#include <utility>

#include "absl/synchronization/notification.h"
#include "ema/run.h"
#include "tests/client/fake_cuda.h"

namespace ema {

// What is queued on it runs in its own thread, in order. The destructor waits for it.
class TrainerStream {
 public:
  TrainerStream() = default;
  ~TrainerStream() { ema_fake_cuda_end_stream(stream_); }
  TrainerStream(const TrainerStream&) = delete;
  TrainerStream& operator=(const TrainerStream&) = delete;

  GpuStream on(int device) const { return {.device = device, .handle = stream_}; }
  void Queue(std::function<void()> work) {
    auto* const queued = new std::function<void()>(std::move(work));
    const auto run = [](void* argument) {
      const std::unique_ptr<std::function<void()>> function(
          static_cast<std::function<void()>*>(argument));
      (*function)();
    };
    ema_fake_cuda_queue(stream_, run, queued);
  }
  // Waits until what is queued now has run.
  void Await() {
    absl::Notification done;
    Queue([&] { done.Notify(); });
    done.WaitForNotification();
  }

 private:
  void* const stream_ = ema_fake_cuda_new_stream();
};

}  // namespace ema

#endif  // EMA_TESTS_CLIENT_TRAINER_STREAM_H_
