// SPDX-License-Identifier: Apache-2.0
//
// What tests of devices with memory of their own share.
#ifndef EMA_TESTS_DEVICE_ACCELERATOR_HARNESS_H_
#define EMA_TESTS_DEVICE_ACCELERATOR_HARNESS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "ema/internal/status_macros.h"
#include "server/device/accelerator_device.h"
#include "tests/testutil/fake_accelerator.h"

namespace ema {

inline constexpr int64_t kElements = 10'000;
inline constexpr int64_t kBytes = kElements * 4;

// A device on a fake accelerator.
struct Harness {
  explicit Harness(const FakeAccelerator::Options& options, int64_t kept_host_bytes = 1 << 20,
                   int64_t slab_bytes = 16 << 10)
      : accelerator(std::make_shared<FakeAccelerator>(options)),
        device(MakeAcceleratorDevice(accelerator, {.kept_free_bytes = 1 << 20,
                                                   .slab_bytes = slab_bytes,
                                                   .kept_host_bytes = kept_host_bytes})) {}

  std::shared_ptr<FakeAccelerator> accelerator;
  std::unique_ptr<Device> device;
};

// Folds `value` into all of `block` as an average's first value.
inline absl::Status Assign(DeviceStream& stream, Block& block, float value, int64_t source_id = 0) {
  const std::vector<float> source(kElements, value);
  const FoldTarget target{.kind = FoldKind::kAssign, .next = block.data()};
  EMA_RETURN_IF_ERROR(stream
                          .Fold({Dtype::kFloat32, reinterpret_cast<const std::byte*>(source.data()),
                                 kElements, std::span(&target, 1), source_id, kElements})
                          .status());
  // The source goes here, long before it has been folded.
  return absl::OkStatus();
}

inline std::vector<float> ValuesOf(const std::shared_ptr<const std::byte>& view) {
  std::vector<float> values(kElements);
  std::memcpy(values.data(), view.get(), kBytes);
  return values;
}

}  // namespace ema

#endif  // EMA_TESTS_DEVICE_ACCELERATOR_HARNESS_H_
