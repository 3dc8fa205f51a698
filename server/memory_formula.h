// SPDX-License-Identifier: Apache-2.0
//
// The upper bound of a server's memory, computed from its limits.
#ifndef EMA_SERVER_MEMORY_FORMULA_H_
#define EMA_SERVER_MEMORY_FORMULA_H_

#include <cstdint>

#include "server/device/device.h"
#include "server/ops/options.h"
#include "server/ops/server_state.h"

namespace ema {

// The limit of all windows together: memory of clients on this host from which the server reads
// weights of GPUs (SharedMemory::CreateWindow()).
int64_t MaxWindowBytes(const ServerOptions& options);

MemoryFormula FormulaOf(const ServerOptions& options, const Device& device);

// The default of --memory-bytes.
int64_t DefaultMemoryBytes(const ServerOptions& options, const Device& device);

// Logs the formula, with a warning if the limits allow more memory than exists. `model_bytes`: the
// budget of all models together.
void LogMemoryFormula(const ServerOptions& options, const MemoryFormula& formula,
                      const Device& device, int64_t model_bytes);

}  // namespace ema

#endif  // EMA_SERVER_MEMORY_FORMULA_H_
