// SPDX-License-Identifier: Apache-2.0
//
// Reads small files, also ones that are reloaded while the server runs.
#ifndef EMA_SERVER_BASE_SMALL_FILE_H_
#define EMA_SERVER_BASE_SMALL_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace ema {

// Returns the content of a regular file. Does not block on a pipe. INVALID_ARGUMENT, with a message
// that does not name the path: it cannot be read, is not a regular file, or is longer than
// `max_bytes`.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, int64_t max_bytes);

}  // namespace ema

#endif  // EMA_SERVER_BASE_SMALL_FILE_H_
