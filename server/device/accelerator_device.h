// SPDX-License-Identifier: Apache-2.0
//
// A device whose memory is not the host's.
//
// A push goes: receive buffer -> pinned slab (one copy, by the receiving thread) -> device slab
// (asynchronous copy) -> one kernel for all folds of the slab. Each stream has two slabs, and fills
// one while the other is on its way, so that network, copy and kernel overlap; many small folds
// share a slab.
#ifndef EMA_SERVER_DEVICE_ACCELERATOR_DEVICE_H_
#define EMA_SERVER_DEVICE_ACCELERATOR_DEVICE_H_

#include <cstdint>
#include <memory>

#include "server/device/accelerator.h"
#include "server/device/device.h"

namespace ema {

struct AcceleratorOptions {
  // Freed blocks of device memory that are kept for reuse.
  int64_t kept_free_bytes = 0;
  // Of one slab: larger ones cost fewer copies and launches, smaller ones overlap sooner, and those
  // of all busy streams stay in the processor's cache, from which the link reads them.
  int64_t slab_bytes = int64_t{8} << 20;
  // Pinned memory kept for the next readers: copies of blocks that nobody reads, the oldest of
  // which go first, and memory of copies that have gone; a sixteenth of it also while readers hold
  // as much.
  int64_t kept_host_bytes = int64_t{1} << 30;
};

// The first error of the accelerator, other than a lack of memory, breaks the device: it is what
// every call gives from then on, but for HostView() of what has been copied before.
std::unique_ptr<Device> MakeAcceleratorDevice(std::shared_ptr<Accelerator> accelerator,
                                              const AcceleratorOptions& options);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_ACCELERATOR_DEVICE_H_
