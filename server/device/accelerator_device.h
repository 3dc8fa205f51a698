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
  // Freed device blocks that are kept for reuse, in bytes.
  int64_t kept_free_bytes = 0;
  // Bytes of one slab. Larger slabs cost fewer copies and launches; smaller ones overlap sooner,
  // and those of all busy streams fit in the processor's cache, from which the link reads them.
  int64_t slab_bytes = int64_t{8} << 20;
  // Pinned memory kept for later readers: copies of blocks that are not being read, of which the
  // oldest are dropped first, and memory of dropped copies. A sixteenth of it is kept even while
  // readers hold this much.
  int64_t kept_host_bytes = int64_t{1} << 30;
};

// The first error of the accelerator, other than a lack of memory, breaks the device: every later
// call returns it, except HostView() of blocks that have been copied before.
std::unique_ptr<Device> MakeAcceleratorDevice(std::shared_ptr<Accelerator> accelerator,
                                              const AcceleratorOptions& options);

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_ACCELERATOR_DEVICE_H_
