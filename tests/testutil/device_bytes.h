// SPDX-License-Identifier: Apache-2.0
//
// What is in device memory, for tests.
#ifndef EMA_TESTS_TESTUTIL_DEVICE_BYTES_H_
#define EMA_TESTS_TESTUTIL_DEVICE_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "ema/internal/status_macros.h"
#include "server/device/device.h"

namespace ema {

// A copy of device memory, after all that `stream` was given before, which is done then. Of any
// address, where HostView() is of whole blocks.
inline absl::StatusOr<std::shared_ptr<const std::byte>> DeviceBytes(Device& device,
                                                                    DeviceStream& stream,
                                                                    const std::byte* data,
                                                                    int64_t size_bytes) {
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<Block> copy, device.Allocate(size_bytes));
  EMA_RETURN_IF_ERROR(stream.Copy(copy->data(), data, size_bytes));
  EMA_RETURN_IF_ERROR(stream.Synchronize().status());
  return device.HostView(std::move(copy), std::nullopt);
}

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_DEVICE_BYTES_H_
