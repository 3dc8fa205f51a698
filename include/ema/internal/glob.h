// SPDX-License-Identifier: Apache-2.0
//
// A pattern of fnmatch(3), compared with many names.
#ifndef EMA_INTERNAL_GLOB_H_
#define EMA_INTERNAL_GLOB_H_

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ema {

// Matches what glibc's fnmatch(3) does without flags in the "C" locale, byte by byte: a `?` is one
// byte. But a bracket expression that does not end is always a plain `[`. Thread-safe, but for its
// steps.
class Glob {
 public:
  // REQUIRES: no zero byte in `pattern`.
  explicit Glob(const std::string& pattern);

  bool Matches(std::string_view name);

  // What it has cost so far, in steps of one to four nanoseconds. A name takes a few if what is
  // before the first `*`, or behind the last one, differs; else as many as it has bytes, times
  // those of what lies between two `*` and has a `?` or a bracket.
  int64_t steps() const { return steps_; }

 private:
  struct Element {
    enum class Kind { kByte, kAnyByte, kOneOf, kAnyText } kind = Kind::kByte;
    char byte = 0;
    size_t set = 0;  // In sets_.
  };

  // Where the class in a bracket expression that may be at `begin` ends; npos: it is none.
  static size_t FindClassEnd(std::string_view pattern, size_t begin);
  // Returns where the bracket expression at `begin` ends; npos: it does not, and is a plain `[`.
  static size_t FindBracketEnd(std::string_view pattern, size_t begin);
  bool MatchesByte(const Element& element, char byte) const;
  // Where in `name` the first text ends that `part`, without a `*`, matches; npos: there is none.
  size_t EndOfFirst(std::span<const Element> part, std::string_view name);
  // Each byte by the element of its place; of equal length.
  bool MatchesAll(std::span<const Element> elements, std::string_view text);

  std::vector<Element> elements_;
  std::vector<std::bitset<256>> sets_;
  bool matches_nothing_ = false;
  int64_t steps_ = 0;
};

}  // namespace ema

#endif  // EMA_INTERNAL_GLOB_H_
