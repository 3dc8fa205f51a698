// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_DEVICE_HOST_MEMORY_BYTES_H_
#define EMA_SERVER_DEVICE_HOST_MEMORY_BYTES_H_

#include <cstdint>

namespace ema {

// How much memory this process may use: the machine's, or the least limit of its control groups.
int64_t HostMemoryBytes();

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_HOST_MEMORY_BYTES_H_
