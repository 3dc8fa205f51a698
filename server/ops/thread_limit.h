// SPDX-License-Identifier: Apache-2.0
//
// Whether the system lets the process have the threads that it needs.
#ifndef EMA_SERVER_OPS_THREAD_LIMIT_H_
#define EMA_SERVER_OPS_THREAD_LIMIT_H_

#include <cstdint>

namespace ema {

// Makes so many threads, all at once, and ends them: whether they and their memory could be had.
bool CanMakeThreads(int64_t count);

}  // namespace ema

#endif  // EMA_SERVER_OPS_THREAD_LIMIT_H_
