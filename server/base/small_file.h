// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_BASE_SMALL_FILE_H_
#define EMA_SERVER_BASE_SMALL_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace ema {

// All bytes of a regular file that others write, such as tokens: never waits for a pipe's writer,
// and never takes more than `max_bytes`. INVALID_ARGUMENT: it cannot be read, is something else, or
// is longer; the message says which, without the path.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, int64_t max_bytes);

}  // namespace ema

#endif  // EMA_SERVER_BASE_SMALL_FILE_H_
