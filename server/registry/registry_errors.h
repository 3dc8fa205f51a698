// SPDX-License-Identifier: Apache-2.0
//
// Errors that the implementations of Registry have in common.
#ifndef EMA_SERVER_REGISTRY_REGISTRY_ERRORS_H_
#define EMA_SERVER_REGISTRY_REGISTRY_ERRORS_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/base/quoted.h"

namespace ema {

inline absl::Status ConflictError(std::string_view key, int64_t expected, int64_t found) {
  return absl::AbortedError(absl::StrCat("key ", Quoted(key), " has revision ", found,
                                         ", expected ", expected, " (0: no such key)"));
}

// `value` is that of the process which has the key.
inline absl::Status OccupiedError(std::string_view key, std::string_view value) {
  return absl::AlreadyExistsError(absl::StrCat("key ", Quoted(key), " has the value ",
                                               Quoted(value),
                                               " of another process, which may have ended less "
                                               "than its TTL ago"));
}

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_REGISTRY_ERRORS_H_
