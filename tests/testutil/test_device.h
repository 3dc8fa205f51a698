// SPDX-License-Identifier: Apache-2.0
//
// The device that a test runs on.
#ifndef EMA_TESTS_TESTUTIL_TEST_DEVICE_H_
#define EMA_TESTS_TESTUTIL_TEST_DEVICE_H_

#include <cstdint>
#include <memory>

#include "server/device/device.h"

namespace ema {

// What EMA_TEST_DEVICE names: "cpu", which it is without that; "fake", an accelerator on the CPU;
// "cuda:0". Ends the process if there is no such device.
std::shared_ptr<Device> NewTestDevice(int64_t kept_free_bytes);

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_TEST_DEVICE_H_
