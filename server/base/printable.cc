// SPDX-License-Identifier: Apache-2.0
#include "server/base/printable.h"

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/escaping.h"

namespace ema {
namespace {

// Bytes of the UTF-8 sequence that `text` begins with; 0 if it is none, or a control character.
size_t PrintableSequenceBytes(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return lead >= 0x20 && lead != 0x7f ? 1 : 0;
  const size_t size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < size) return 0;
  uint32_t code_point = lead & (0x7f >> size);
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code_point = code_point << 6 | (byte(i) & 0x3f);
  }
  constexpr std::array<uint32_t, 5> kLeastBySize = {0, 0, 0xa0, 0x800, 0x10000};
  const bool is_surrogate = code_point >= 0xd800 && code_point <= 0xdfff;
  // U+0080 to U+009F are control characters too.
  if (code_point < kLeastBySize[size] || code_point > 0x10ffff || is_surrogate) return 0;
  return size;
}

size_t PrintablePrefixBytes(std::string_view text) {
  size_t bytes = 0;
  while (bytes < text.size()) {
    const size_t size = PrintableSequenceBytes(text.substr(bytes));
    if (size == 0) break;
    bytes += size;
  }
  return bytes;
}

}  // namespace

bool IsPrintableUtf8(std::string_view text) { return PrintablePrefixBytes(text) == text.size(); }

std::string EscapeUnprintable(std::string_view text) {
  std::string escaped;
  while (true) {
    const size_t printable = PrintablePrefixBytes(text);
    escaped += text.substr(0, printable);
    text.remove_prefix(printable);
    if (text.empty()) return escaped;
    size_t unprintable = 1;
    while (unprintable < text.size() && PrintableSequenceBytes(text.substr(unprintable)) == 0) {
      ++unprintable;
    }
    escaped += absl::CHexEscape(std::string(text.substr(0, unprintable)));
    text.remove_prefix(unprintable);
  }
}

}  // namespace ema
