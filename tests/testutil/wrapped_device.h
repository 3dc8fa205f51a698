// SPDX-License-Identifier: Apache-2.0
//
// A device that is another one but for what a test changes.
#ifndef EMA_TESTS_TESTUTIL_WRAPPED_DEVICE_H_
#define EMA_TESTS_TESTUTIL_WRAPPED_DEVICE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "server/device/device.h"

namespace ema {

// Passes every call on.
class WrappedDevice : public Device {
 public:
  explicit WrappedDevice(std::unique_ptr<Device> device) : device_(std::move(device)) {}

  std::string name() const override { return device_->name(); }
  absl::StatusOr<std::shared_ptr<Block>> Allocate(int64_t size_bytes) override {
    return device_->Allocate(size_bytes);
  }
  absl::StatusOr<std::unique_ptr<DeviceStream>> NewStream() override {
    return device_->NewStream();
  }
  bool is_host() const override { return device_->is_host(); }
  absl::StatusOr<std::shared_ptr<const std::byte>> HostView(const BlockRef& block,
                                                            std::optional<Dtype> cast) override {
    return device_->HostView(block, cast);
  }
  bool HasHostView(const BlockRef& block, std::optional<Dtype> cast) override {
    return device_->HasHostView(block, cast);
  }
  absl::StatusOr<SquareSums> SumSquares(std::span<const SumRun> runs) override {
    return device_->SumSquares(runs);
  }
  int64_t total_memory_bytes() const override { return device_->total_memory_bytes(); }
  MemoryUse memory_use() const override { return device_->memory_use(); }
  Overhead overhead(int64_t block_bytes) const override { return device_->overhead(block_bytes); }
  void Trim(int64_t most_bytes) override { device_->Trim(most_bytes); }
  absl::Status health() const override { return device_->health(); }

 private:
  const std::unique_ptr<Device> device_;
};

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_WRAPPED_DEVICE_H_
