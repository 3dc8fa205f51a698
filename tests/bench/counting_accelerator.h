// SPDX-License-Identifier: Apache-2.0
//
// An accelerator that tells what readers make it do.
#ifndef EMA_TESTS_BENCH_COUNTING_ACCELERATOR_H_
#define EMA_TESTS_BENCH_COUNTING_ACCELERATOR_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ema/internal/status_macros.h"
#include "server/device/accelerator.h"

namespace ema::bench {

// Passes everything on, and counts it.
class CountingAccelerator : public Accelerator {
 public:
  explicit CountingAccelerator(std::shared_ptr<Accelerator> counted)
      : counted_(std::move(counted)) {}

  // Pieces of work that have been queued, and the bytes of those that copy to the host.
  int64_t work_count() const { return counts_->work; }
  int64_t bytes_to_host() const { return counts_->bytes_to_host; }

  std::string name() const override { return counted_->name(); }
  absl::StatusOr<std::unique_ptr<Queue>> NewQueue() override {
    EMA_ASSIGN_OR_RETURN(std::unique_ptr<Queue> queue, counted_->NewQueue());
    return std::make_unique<CountingQueue>(std::move(queue), counts_);
  }
  absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocateDevice(int64_t size_bytes) override {
    return counted_->AllocateDevice(size_bytes);
  }
  absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocatePinned(int64_t size_bytes) override {
    return counted_->AllocatePinned(size_bytes);
  }
  void Trim() override { counted_->Trim(); }
  int64_t total_memory_bytes() const override { return counted_->total_memory_bytes(); }

 private:
  struct Counts {
    std::atomic<int64_t> work = 0;
    std::atomic<int64_t> bytes_to_host = 0;
  };

  class CountingQueue : public Queue {
   public:
    CountingQueue(std::unique_ptr<Queue> counted, std::shared_ptr<Counts> counts)
        : counted_(std::move(counted)), counts_(std::move(counts)) {}

    absl::Status CopyToDevice(std::byte* device, const std::byte* host,
                              int64_t size_bytes) override {
      return Counted().CopyToDevice(device, host, size_bytes);
    }
    absl::Status CopyAhead(std::byte* device, const std::byte* host, int64_t size_bytes) override {
      return Counted().CopyAhead(device, host, size_bytes);
    }
    absl::Status CopyToHost(std::byte* host, const std::byte* device, int64_t size_bytes) override {
      counts_->bytes_to_host += size_bytes;
      return Counted().CopyToHost(host, device, size_bytes);
    }
    absl::Status CopyOnDevice(std::byte* to, const std::byte* from, int64_t size_bytes) override {
      return Counted().CopyOnDevice(to, from, size_bytes);
    }
    absl::Status Zero(std::byte* device, int64_t size_bytes) override {
      return Counted().Zero(device, size_bytes);
    }
    absl::Status Fold(const FoldTable& table) override { return Counted().Fold(table); }
    absl::Status Sum(const SumTable& table) override { return Counted().Sum(table); }
    absl::Status Cast(const CastRun& run) override { return Counted().Cast(run); }
    absl::Status Mark(int slot) override { return counted_->Mark(slot); }
    absl::Status Wait(int slot) override { return counted_->Wait(slot); }

   private:
    Queue& Counted() {
      ++counts_->work;
      return *counted_;
    }

    const std::unique_ptr<Queue> counted_;
    const std::shared_ptr<Counts> counts_;
  };

  const std::shared_ptr<Accelerator> counted_;
  const std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();  // Queues may outlive us.
};

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_COUNTING_ACCELERATOR_H_
