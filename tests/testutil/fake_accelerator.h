// SPDX-License-Identifier: Apache-2.0
//
// An accelerator on the CPU that is as asynchronous as a GPU can be.
#ifndef EMA_TESTS_TESTUTIL_FAKE_ACCELERATOR_H_
#define EMA_TESTS_TESTUTIL_FAKE_ACCELERATOR_H_

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/device/accelerator.h"

namespace ema {

// Each queue has a thread, which begins late and takes its time, so that work of two queues is done
// in any order and host memory that is used again too early shows. Blocks of a kernel's grid run in
// any order, so that one that waits for another shows; EMA_TEST_SEED, which is printed, says which.
// Thread-safe.
class FakeAccelerator : public Accelerator {
 public:
  struct Options {
    int64_t memory_bytes = int64_t{1} << 30;  // Of the device.
    int64_t max_delay_us = 0;                 // Before every fourth piece of work, at random.
    // The n-th piece of work from 1 fails, and everything after it, also memory, as CUDA's sticky
    // errors do.
    int64_t failing_work = std::numeric_limits<int64_t>::max();
  };
  explicit FakeAccelerator(const Options& options) : options_(options) {}

  std::string name() const override { return "fake:0"; }
  absl::StatusOr<std::unique_ptr<Queue>> NewQueue() override;
  absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocateDevice(int64_t size_bytes) override;
  absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocatePinned(int64_t size_bytes) override;
  void Trim() override { trim_count_.fetch_add(1); }
  int64_t total_memory_bytes() const override { return options_.memory_bytes; }

  // From now on everything fails.
  void Break() { is_broken_ = true; }
  // From now on there is no more pinned memory than that.
  void LimitPinned(int64_t most_bytes) { most_pinned_bytes_ = most_bytes; }
  // From now on copies to the host wait until they are held no more. Not held at its end.
  void HoldCopiesToHost(bool hold) ABSL_LOCKS_EXCLUDED(hold_mu_) {
    absl::MutexLock lock(&hold_mu_);
    holds_copies_ = hold;
  }

  // In use now.
  int64_t device_bytes() const { return device_bytes_->load(); }
  int64_t pinned_bytes() const { return pinned_bytes_->load(); }
  // How often memory has been pinned so far.
  int64_t pin_count() const { return pin_count_.load(); }
  int64_t trim_count() const { return trim_count_.load(); }

  // Pieces of work that have been queued so far: copies, folds, sums, zeros.
  int64_t work_count() const { return work_count_.load(); }
  // Of these, copies from the device.
  int64_t copies_to_host() const { return copies_to_host_.load(); }
  int64_t bytes_to_host() const { return bytes_to_host_.load(); }

 private:
  class ThreadQueue;
  class HeapMemory;

  void WaitWhileHeld() ABSL_LOCKS_EXCLUDED(hold_mu_) {
    absl::MutexLock lock(&hold_mu_);
    const auto is_free = [this]() ABSL_SHARED_LOCKS_REQUIRED(hold_mu_) { return !holds_copies_; };
    hold_mu_.Await(absl::Condition(&is_free));
  }

  // Shared with memory, which may outlive us.
  using Count = std::shared_ptr<std::atomic<int64_t>>;
  absl::StatusOr<std::unique_ptr<BlockPool::Memory>> Allocate(int64_t size_bytes,
                                                              int64_t most_bytes,
                                                              const Count& count);

  const Options options_;
  absl::Mutex hold_mu_;
  bool holds_copies_ ABSL_GUARDED_BY(hold_mu_) = false;
  std::atomic<bool> is_broken_ = false;
  std::atomic<int64_t> most_pinned_bytes_ = std::numeric_limits<int64_t>::max();
  std::atomic<uint32_t> queue_count_ = 0;
  std::atomic<int64_t> work_count_ = 0;
  std::atomic<int64_t> copies_to_host_ = 0;
  std::atomic<int64_t> bytes_to_host_ = 0;
  std::atomic<int64_t> trim_count_ = 0;
  std::atomic<int64_t> pin_count_ = 0;
  const Count device_bytes_ = std::make_shared<std::atomic<int64_t>>(0);
  const Count pinned_bytes_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_FAKE_ACCELERATOR_H_
