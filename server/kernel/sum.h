// SPDX-License-Identifier: Apache-2.0
//
// The CPU kernel of sum_element.h, many elements at a time.
#ifndef EMA_SERVER_KERNEL_SUM_H_
#define EMA_SERVER_KERNEL_SUM_H_

#include <span>

#include "server/kernel/fold_op.h"
#include "server/kernel/sum_element.h"

namespace ema {

// Device::SumSquares() on host memory, in this thread, with the widest instructions the processor
// has.
SquareSums SumSquaresOnCpu(std::span<const SumRun> runs);

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_SUM_H_
