// SPDX-License-Identifier: Apache-2.0
//
// Does the same with all servers of a group at once.
#ifndef EMA_CLIENT_CPP_GROUP_FOR_EACH_PART_H_
#define EMA_CLIENT_CPP_GROUP_FOR_EACH_PART_H_

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "client/cpp/transport/interrupt.h"

namespace ema::client_internal {

// Calls `work` with each number below `count`, each in a thread of its own, and returns when all
// have ended. If one fails, or `interrupt` is fired, the interrupt of the others is fired. Returns
// the first error. UNAVAILABLE: the system has no thread.
absl::Status ForEachPart(size_t count, Interrupt* interrupt,
                         absl::FunctionRef<absl::Status(size_t part, Interrupt* interrupt)> work);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GROUP_FOR_EACH_PART_H_
