// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_OPS_VERSION_H_
#define EMA_SERVER_OPS_VERSION_H_

#include <string_view>

namespace ema {

// Of this program, such as "0.1.0": the same wherever it is said.
std::string_view ServerVersion();

}  // namespace ema

#endif  // EMA_SERVER_OPS_VERSION_H_
