// SPDX-License-Identifier: Apache-2.0
//
// A device and the budget of its memory.
#ifndef EMA_SERVER_CORE_DEVICE_MEMORY_H_
#define EMA_SERVER_CORE_DEVICE_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "ema/internal/status_macros.h"
#include "server/core/memory_budget.h"
#include "server/device/device.h"

namespace ema {

// What a model allocates its versions from. `budget` is that of all models.
struct DeviceMemory {
  std::shared_ptr<Device> device;
  std::shared_ptr<MemoryBudget> budget;

  // Like MemoryBudget::Reserve(). Destroy the result after the blocks that use the bytes, and
  // without a lock: its deleter trims the device's pool before the bytes can be reserved again.
  absl::StatusOr<std::shared_ptr<const MemoryBudget::Reservation>> Reserve(std::string_view what,
                                                                           int64_t bytes) const {
    EMA_ASSIGN_OR_RETURN(std::unique_ptr<MemoryBudget::Reservation> reserved,
                         budget->Reserve(what, bytes));
    return std::shared_ptr<const MemoryBudget::Reservation>(
        reserved.release(),
        [device = device, budget = budget](const MemoryBudget::Reservation* reservation) {
          // Memory that other reservations may use is kept, so that the next step need not map it
          // again.
          device->Trim(budget->reserved_bytes() - reservation->bytes());
          delete reservation;
        });
  }
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_DEVICE_MEMORY_H_
