// SPDX-License-Identifier: Apache-2.0
//
// Quotes text from clients for messages.
#ifndef EMA_SERVER_BASE_QUOTED_H_
#define EMA_SERVER_BASE_QUOTED_H_

#include <string>
#include <string_view>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace ema {

// `text` in quotes, escaped, and cut after 128 bytes.
inline std::string Quoted(std::string_view text) {
  constexpr size_t kMaxBytes = 128;
  return absl::StrCat("\"", absl::CHexEscape(std::string(text.substr(0, kMaxBytes))),
                      text.size() > kMaxBytes ? "...\"" : "\"");
}

}  // namespace ema

#endif  // EMA_SERVER_BASE_QUOTED_H_
