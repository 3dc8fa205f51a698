// SPDX-License-Identifier: Apache-2.0
//
// How much memory a server may take, from its limits.
#ifndef EMA_SERVER_MEMORY_FORMULA_H_
#define EMA_SERVER_MEMORY_FORMULA_H_

#include <cstdint>

#include "server/device/device.h"
#include "server/ops/options.h"

namespace ema {

// What the process can use at most, beside the program. Models, and what is cast for readers,
// reserve their part before they use it.
struct MemoryFormula {
  int64_t push_bytes = 0;  // Of one stream, as what follows.
  int64_t pull_bytes = 0;
  int64_t lane_bytes = 0;
  int64_t lane_count = 0;
  int64_t stream_bytes = 0;   // Of all together.
  int64_t waiting_bytes = 0;  // Requests whose turn has not come.
  int64_t record_bytes = 0;   // Of all models together, beside what they reserve.
  int64_t kept_bytes = 0;
  int64_t process_bytes = 0;  // Before the first of these.
  // ModelStore::Options::host_memory_bytes: 0 where models are in the host's memory.
  int64_t host_budget_bytes = 0;
};

MemoryFormula FormulaOf(const ServerOptions& options, const Device& device);

// What `--memory-bytes` is if nobody says it.
int64_t DefaultMemoryBytes(const ServerOptions& options, const Device& device);

// With a warning if the limits allow more than there is. `model_bytes`: of all models together.
void LogMemoryFormula(const ServerOptions& options, const MemoryFormula& formula,
                      const Device& device, int64_t model_bytes);

}  // namespace ema

#endif  // EMA_SERVER_MEMORY_FORMULA_H_
