// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_OPS_PORT_FILE_H_
#define EMA_SERVER_OPS_PORT_FILE_H_

#include <string>

#include "absl/status/status.h"

namespace ema {

// Writes `port` and a line end to `path`, by a temporary file beside it and a rename, so that a
// reader sees all or nothing. UNAVAILABLE: it cannot be written; no temporary file is left.
absl::Status WritePortFile(const std::string& path, int port);

}  // namespace ema

#endif  // EMA_SERVER_OPS_PORT_FILE_H_
