// SPDX-License-Identifier: Apache-2.0
//
// Sums of squares by an accelerator.
#ifndef EMA_SERVER_DEVICE_SUM_QUEUE_H_
#define EMA_SERVER_DEVICE_SUM_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "server/device/accelerator.h"
#include "server/device/device.h"

namespace ema {

// Pinned host memory and device memory of the same size, both aligned to 64 bytes, at least 4 KiB.
struct SumMemory {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
  int64_t size_bytes = 0;
};

// Computes Device::SumSquares() by work on `queue`, and waits for it. `tables` holds the tables of
// runs, many for each launch; `sums` has a place for each thread, so its size determines the number
// of threads. Errors: the queue's.
absl::StatusOr<SquareSums> SumOnQueue(Accelerator::Queue& queue, std::span<const SumRun> runs,
                                      const SumMemory& tables, const SumMemory& sums);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_SUM_QUEUE_H_
