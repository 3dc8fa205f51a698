// SPDX-License-Identifier: Apache-2.0
//
// Numbers of bytes as people write them.
#ifndef EMA_SERVER_OPS_BYTE_COUNT_H_
#define EMA_SERVER_OPS_BYTE_COUNT_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace ema {

// Bytes in "4096", "512K", "512M", "4G" or "1T": powers of 1024; "4GiB" and "4gb" mean the same.
// INVALID_ARGUMENT: anything else, or 2^62 and more.
absl::StatusOr<int64_t> ParseByteCount(std::string_view text);

// The text that ParseByteCount() reads as `bytes`, in the largest unit that gives a whole number:
// "8MiB", "5000000000". REQUIRES: bytes >= 0.
std::string FormatByteCount(int64_t bytes);

}  // namespace ema

#endif  // EMA_SERVER_OPS_BYTE_COUNT_H_
