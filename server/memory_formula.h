// SPDX-License-Identifier: Apache-2.0
//
// How much memory a server may take, from its limits.
#ifndef EMA_SERVER_MEMORY_FORMULA_H_
#define EMA_SERVER_MEMORY_FORMULA_H_

#include <cstdint>

#include "server/device/device.h"
#include "server/ops/options.h"
#include "server/ops/server_state.h"

namespace ema {

MemoryFormula FormulaOf(const ServerOptions& options, const Device& device);

// What `--memory-bytes` is if nobody says it.
int64_t DefaultMemoryBytes(const ServerOptions& options, const Device& device);

// With a warning if the limits allow more than there is. `model_bytes`: of all models together.
void LogMemoryFormula(const ServerOptions& options, const MemoryFormula& formula,
                      const Device& device, int64_t model_bytes);

}  // namespace ema

#endif  // EMA_SERVER_MEMORY_FORMULA_H_
