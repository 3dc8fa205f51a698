// SPDX-License-Identifier: Apache-2.0
#include "server/ops/byte_count.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace ema {
namespace {

// Each 1024 of the one before.
constexpr std::array<char, 4> kUnits = {'k', 'm', 'g', 't'};

}  // namespace

absl::StatusOr<int64_t> ParseByteCount(std::string_view text) {
  constexpr int64_t kLimit = int64_t{1} << 62;
  const absl::Status bad = absl::InvalidArgumentError(absl::StrCat(
      "\"", std::string(text), "\" is not a number of bytes, such as 1048576, 512M or 4G"));
  int64_t bytes = 0;
  const char* const end = text.data() + text.size();
  const std::from_chars_result result = std::from_chars(text.data(), end, bytes);
  if (result.ec != std::errc() || bytes < 0 || bytes >= kLimit) return bad;
  std::string unit = absl::AsciiStrToLower(std::string(result.ptr, end - result.ptr));
  if (unit.size() == 3 && unit.substr(1) == "ib") unit.resize(1);
  if (unit.size() == 2 && unit[1] == 'b') unit.resize(1);
  if (unit.empty() || unit == "b") return bytes;
  const auto found = std::find(kUnits.begin(), kUnits.end(), unit[0]);
  if (unit.size() != 1 || found == kUnits.end()) return bad;
  for (auto it = kUnits.begin(); it <= found; ++it) {
    if (__builtin_mul_overflow(bytes, int64_t{1024}, &bytes) || bytes >= kLimit) return bad;
  }
  return bytes;
}

std::string FormatByteCount(int64_t bytes) {
  size_t unit = 0;  // How many of kUnits have been divided away.
  while (bytes > 0 && bytes % 1024 == 0 && unit < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  if (unit == 0) return absl::StrCat(bytes);
  return absl::StrCat(bytes, std::string(1, absl::ascii_toupper(kUnits[unit - 1])), "iB");
}

}  // namespace ema
