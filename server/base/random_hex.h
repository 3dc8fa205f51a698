// SPDX-License-Identifier: Apache-2.0
//
// Random names.
#ifndef EMA_SERVER_BASE_RANDOM_HEX_H_
#define EMA_SERVER_BASE_RANDOM_HEX_H_

#include <random>
#include <string>

#include "absl/strings/str_cat.h"

namespace ema {

// Eight hexadecimal digits per word from the system's random source, for names that must be unique
// across processes and containers.
inline std::string RandomHex(int words) {
  std::random_device random;
  std::string digits;
  for (int i = 0; i < words; ++i) absl::StrAppend(&digits, absl::Hex(random(), absl::kZeroPad8));
  return digits;
}

}  // namespace ema

#endif  // EMA_SERVER_BASE_RANDOM_HEX_H_
