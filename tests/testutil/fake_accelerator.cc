// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/fake_accelerator.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <new>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "tests/testutil/walk_grid.h"

namespace ema {
namespace {

// Of all accelerators: EMA_TEST_SEED, or always the same.
uint32_t Seed() {
  static const uint32_t seed = [] {
    const char* const variable = std::getenv("EMA_TEST_SEED");
    const uint32_t value =
        variable != nullptr ? static_cast<uint32_t>(std::strtoul(variable, nullptr, 10)) : 1;
    std::fprintf(stderr, "fake accelerator: EMA_TEST_SEED=%u\n", value);
    return value;
  }();
  return seed;
}

absl::Status Broken() {
  return MakeError(absl::StatusCode::kInternal, ErrorReason::kDevice,
                   "device \"fake:0\": an illegal memory access");
}

}  // namespace

class FakeAccelerator::HeapMemory : public BlockPool::Memory {
 public:
  HeapMemory(int64_t size_bytes, std::shared_ptr<std::atomic<int64_t>> used)
      : size_bytes_(size_bytes),
        used_(std::move(used)),
        data_(static_cast<std::byte*>(
            ::operator new(static_cast<size_t>(size_bytes), std::align_val_t(64)))) {}
  ~HeapMemory() override {
    ::operator delete(data_, std::align_val_t(64));
    used_->fetch_sub(size_bytes_);
  }
  std::byte* data() override { return data_; }

 private:
  const int64_t size_bytes_;
  const std::shared_ptr<std::atomic<int64_t>> used_;
  std::byte* const data_;
};

class FakeAccelerator::ThreadQueue : public Accelerator::Queue {
 public:
  ThreadQueue(FakeAccelerator* accelerator, uint32_t seed)
      : accelerator_(*accelerator),
        random_(seed),
        ahead_random_(seed),
        thread_([this] { Run(); }) {}
  ~ThreadQueue() override {
    {
      absl::MutexLock lock(&mu_);
      is_over_ = true;
    }
    thread_.join();
  }

  absl::Status CopyToDevice(std::byte* device, const std::byte* host, int64_t size_bytes) override {
    return Queue([=] { std::memcpy(device, host, static_cast<size_t>(size_bytes)); });
  }
  absl::Status CopyAhead(std::byte* device, const std::byte* host, int64_t size_bytes) override {
    if (ahead_random_() % 2 == 0) return CopyToDevice(device, host, size_bytes);
    std::memcpy(device, host, static_cast<size_t>(size_bytes));
    return Queue([] {});
  }
  absl::Status CopyToHost(std::byte* host, const std::byte* device, int64_t size_bytes) override {
    accelerator_.copies_to_host_.fetch_add(1);
    accelerator_.bytes_to_host_.fetch_add(size_bytes);
    return Queue([this, host, device, size_bytes] {
      accelerator_.WaitWhileHeld();
      std::memcpy(host, device, static_cast<size_t>(size_bytes));
    });
  }
  absl::Status CopyOnDevice(std::byte* to, const std::byte* from, int64_t size_bytes) override {
    return Queue([=] { std::memcpy(to, from, static_cast<size_t>(size_bytes)); });
  }
  absl::Status Zero(std::byte* device, int64_t size_bytes) override {
    return Queue([=] { std::memset(device, 0, static_cast<size_t>(size_bytes)); });
  }
  absl::Status Fold(const FoldTable& table) override {
    return Queue([this, table] {
      WalkGrid(table.tile_count, kFoldThreads, random_,
               [&table](int64_t tile, int thread) { FoldOfThread(table, tile, thread); });
    });
  }
  absl::Status Sum(const SumTable& table) override {
    return Queue([this, table] {
      WalkGrid(table.block_count, kSumThreads, random_,
               [&table](int64_t block, int thread) { SumOfThread(table, block, thread); });
    });
  }
  absl::Status Cast(const CastRun& run) override {
    return Queue([this, run] {
      constexpr int64_t kBlocks = 3;
      WalkGrid(kBlocks, kCastThreads, random_, [&run](int64_t block, int thread) {
        CastOfThread(run, block * kCastThreads + thread, kBlocks * kCastThreads);
      });
    });
  }

  absl::Status Mark(int slot) override {
    absl::MutexLock lock(&mu_);
    marks_[slot] = queued_count_;
    return status_;
  }
  absl::Status Wait(int slot) override {
    absl::MutexLock lock(&mu_);
    const auto is_done = [this, slot]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return done_count_ >= marks_[slot];
    };
    mu_.Await(absl::Condition(&is_done));
    return status_;
  }

 private:
  absl::Status Queue(std::function<void()> work) {
    const int64_t number = accelerator_.work_count_.fetch_add(1) + 1;
    const bool fails = accelerator_.is_broken_ || number >= accelerator_.options_.failing_work;
    absl::MutexLock lock(&mu_);
    if (!status_.ok()) return status_;
    work_.emplace_back(fails ? nullptr : std::move(work));
    ++queued_count_;
    return absl::OkStatus();
  }

  void Run() {
    const auto has_news = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return is_over_ || !work_.empty();
    };
    while (true) {
      std::function<void()> work;
      {
        absl::MutexLock lock(&mu_, absl::Condition(&has_news));
        if (work_.empty()) return;
        work = std::move(work_.front());
        work_.pop_front();
      }
      const int64_t max_delay_us = accelerator_.options_.max_delay_us;
      if (max_delay_us > 0 && random_() % 4 == 0) {
        absl::SleepFor(absl::Microseconds(static_cast<int64_t>(random_()) % max_delay_us));
      }
      if (work != nullptr) work();
      absl::MutexLock lock(&mu_);
      if (work == nullptr && status_.ok()) {
        status_ = Broken();
        accelerator_.is_broken_ = true;
      }
      ++done_count_;
    }
  }

  FakeAccelerator& accelerator_;
  std::minstd_rand random_;        // Of the thread.
  std::minstd_rand ahead_random_;  // Of who queues.
  absl::Mutex mu_;
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mu_);
  int64_t queued_count_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t done_count_ ABSL_GUARDED_BY(mu_) = 0;
  std::array<int64_t, kSlots> marks_ ABSL_GUARDED_BY(mu_) = {};
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  bool is_over_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<Accelerator::Queue>> FakeAccelerator::NewQueue() {
  if (is_broken_) return Broken();
  return std::make_unique<ThreadQueue>(this, Seed() + queue_count_.fetch_add(1));
}

absl::StatusOr<std::unique_ptr<BlockPool::Memory>> FakeAccelerator::Allocate(int64_t size_bytes,
                                                                             int64_t most_bytes,
                                                                             const Count& count) {
  if (is_broken_) return Broken();
  int64_t used = count->load();
  while (size_bytes >= 0 && size_bytes <= most_bytes - used &&
         !count->compare_exchange_weak(used, used + size_bytes)) {
  }
  if (size_bytes < 0 || size_bytes > most_bytes - used) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, ErrorReason::kMemoryBudget,
        absl::StrCat("device \"fake:0\": no memory for a block of ", size_bytes, " bytes"));
  }
  return std::make_unique<HeapMemory>(size_bytes, count);
}

absl::StatusOr<std::unique_ptr<BlockPool::Memory>> FakeAccelerator::AllocateDevice(
    int64_t size_bytes) {
  return Allocate(size_bytes, options_.memory_bytes, device_bytes_);
}

absl::StatusOr<std::unique_ptr<BlockPool::Memory>> FakeAccelerator::AllocatePinned(
    int64_t size_bytes) {
  auto memory = Allocate(size_bytes, most_pinned_bytes_, pinned_bytes_);
  if (memory.ok()) pin_count_.fetch_add(1);
  return memory;
}

}  // namespace ema
