// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/test_device.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "server/device/accelerator_device.h"
#include "tests/testutil/fake_accelerator.h"

namespace ema {

std::shared_ptr<Device> NewTestDevice(int64_t kept_free_bytes) {
  const char* const variable = std::getenv("EMA_TEST_DEVICE");
  const std::string name = variable == nullptr ? "cpu" : variable;
  if (name == "fake") {
    // Small slabs: everything goes round the ring.
    return MakeAcceleratorDevice(
        std::make_shared<FakeAccelerator>(FakeAccelerator::Options{.max_delay_us = 20}),
        {.kept_free_bytes = kept_free_bytes, .slab_bytes = 64 << 10});
  }
  absl::StatusOr<std::unique_ptr<Device>> device = MakeDevice(name, kept_free_bytes);
  if (!device.ok()) {
    std::fprintf(stderr, "EMA_TEST_DEVICE: %s\n", device.status().ToString().c_str());
    std::exit(1);
  }
  return *std::move(device);
}

}  // namespace ema
