// SPDX-License-Identifier: Apache-2.0
//
// Files that are read again and again while the server serves.
#ifndef EMA_SERVER_BASE_SMALL_FILE_H_
#define EMA_SERVER_BASE_SMALL_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace ema {

// What the file at `path` holds. Does not wait for somebody who writes, as a pipe's reader would.
// INVALID_ARGUMENT, without the path: it cannot be read, is no regular file, or is longer than
// `max_bytes`.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, int64_t max_bytes);

}  // namespace ema

#endif  // EMA_SERVER_BASE_SMALL_FILE_H_
