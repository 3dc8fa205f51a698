// SPDX-License-Identifier: Apache-2.0
//
// The CPU kernel of fold_element.h, many elements at a time.
#ifndef EMA_SERVER_KERNEL_FOLD_H_
#define EMA_SERVER_KERNEL_FOLD_H_

#include <cstdint>
#include <optional>

#include "server/kernel/fold_op.h"

namespace ema {

// Does `op` on host memory, in this thread, with the widest instructions the processor has. Returns
// the index of the first element that is not finite, as FindNonFinite() says with
// op.rounds_to_float32(), if there is one. The source may have any alignment.
std::optional<int64_t> FoldOnCpu(const FoldOp& op);

// The same, one element at a time by UpdatedAverage(): the reference for tests.
std::optional<int64_t> FoldScalar(const FoldOp& op);

// The index of the first element that is NaN or infinity. `as_float32`: after it has been rounded
// to float32. REQUIRES: IsFloat(dtype).
std::optional<int64_t> FindNonFinite(Dtype dtype, const std::byte* source, int64_t element_count,
                                     bool as_float32);

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_FOLD_H_
