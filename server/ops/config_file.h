// SPDX-License-Identifier: Apache-2.0
//
// The file of --config: TOML with one key for each option and no tables.
#ifndef EMA_SERVER_OPS_CONFIG_FILE_H_
#define EMA_SERVER_OPS_CONFIG_FILE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace ema {

struct ConfigEntry {
  std::string key;
  // The text that the flag would have; elements of an array are separated by commas.
  std::string value;
  int64_t line = 0;     // From 1.
  std::string problem;  // Why no option can have this value; empty if one can.
};

// The keys and values of a file, in no particular order. INVALID_ARGUMENT: it cannot be read, is no
// regular file, is longer than 1 MiB, or not TOML 1.0, with the line. Messages begin with `path`.
absl::StatusOr<std::vector<ConfigEntry>> ReadConfigFile(const std::string& path);

// `text` as a TOML string, with its quotes.
std::string TomlString(const std::string& text);

}  // namespace ema

#endif  // EMA_SERVER_OPS_CONFIG_FILE_H_
