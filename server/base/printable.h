// SPDX-License-Identifier: Apache-2.0
//
// Tells text that may be shown on a terminal from control characters.
#ifndef EMA_SERVER_BASE_PRINTABLE_H_
#define EMA_SERVER_BASE_PRINTABLE_H_

#include <string>
#include <string_view>

namespace ema {

// True: `text` is UTF-8 without control characters.
bool IsPrintableUtf8(std::string_view text);

// Returns `text` with control characters, and bytes that are not UTF-8, escaped as in C.
std::string EscapeUnprintable(std::string_view text);

}  // namespace ema

#endif  // EMA_SERVER_BASE_PRINTABLE_H_
