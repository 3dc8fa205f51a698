// SPDX-License-Identifier: Apache-2.0
//
// An accelerator that tells what traffic readers cause.
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

// Passes everything on, and counts the bytes that are copied to the host.
class CountingAccelerator : public Accelerator {
 public:
  explicit CountingAccelerator(std::shared_ptr<Accelerator> counted)
      : counted_(std::move(counted)) {}

  int64_t bytes_to_host() const { return *bytes_to_host_; }

  std::string name() const override { return counted_->name(); }
  absl::StatusOr<std::unique_ptr<Queue>> NewQueue() override {
    EMA_ASSIGN_OR_RETURN(std::unique_ptr<Queue> queue, counted_->NewQueue());
    return std::make_unique<CountingQueue>(std::move(queue), bytes_to_host_);
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
  using Count = std::shared_ptr<std::atomic<int64_t>>;  // Shared with queues, which may outlive us.

  class CountingQueue : public Queue {
   public:
    CountingQueue(std::unique_ptr<Queue> counted, Count bytes_to_host)
        : counted_(std::move(counted)), bytes_to_host_(std::move(bytes_to_host)) {}

    absl::Status CopyToDevice(std::byte* device, const std::byte* host,
                              int64_t size_bytes) override {
      return counted_->CopyToDevice(device, host, size_bytes);
    }
    absl::Status CopyToHost(std::byte* host, const std::byte* device, int64_t size_bytes) override {
      *bytes_to_host_ += size_bytes;
      return counted_->CopyToHost(host, device, size_bytes);
    }
    absl::Status CopyOnDevice(std::byte* to, const std::byte* from, int64_t size_bytes) override {
      return counted_->CopyOnDevice(to, from, size_bytes);
    }
    absl::Status Zero(std::byte* device, int64_t size_bytes) override {
      return counted_->Zero(device, size_bytes);
    }
    absl::Status Fold(const FoldTable& table) override { return counted_->Fold(table); }
    absl::Status Sum(const SumTable& table) override { return counted_->Sum(table); }
    absl::Status Cast(const CastRun& run) override { return counted_->Cast(run); }
    absl::Status Mark(int slot) override { return counted_->Mark(slot); }
    absl::Status Wait(int slot) override { return counted_->Wait(slot); }

   private:
    const std::unique_ptr<Queue> counted_;
    const Count bytes_to_host_;
  };

  const std::shared_ptr<Accelerator> counted_;
  const Count bytes_to_host_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_COUNTING_ACCELERATOR_H_
