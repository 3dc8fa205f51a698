// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_TESTS_TESTUTIL_FREE_PORTS_H_
#define EMA_TESTS_TESTUTIL_FREE_PORTS_H_

#include <vector>

namespace ema {

// Different TCP ports of 127.0.0.1 that are free now, for programs that must be told a port before
// they start.
std::vector<int> FindFreePorts(int count);

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_FREE_PORTS_H_
