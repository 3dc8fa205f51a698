// SPDX-License-Identifier: Apache-2.0
#include "include/ema/internal/glob.h"

#include <fnmatch.h>
#include <string.h>

#include <algorithm>

namespace ema {

size_t Glob::FindClassEnd(std::string_view pattern, size_t begin) {
  constexpr size_t kNone = std::string_view::npos;
  if (pattern[begin] != '[' || begin + 1 == pattern.size()) return kNone;
  const char kind = pattern[begin + 1];
  size_t end = kNone;
  if (kind == ':') {
    // glibc takes no z in a name, either.
    end = std::find_if(pattern.begin() + begin + 2, pattern.end(),
                       [](char byte) { return byte < 'a' || byte >= 'z'; }) -
          pattern.begin();
  } else if (kind == '=') {
    end = begin + 3;
  } else if (kind == '.') {
    end = pattern.find(".]", begin + 2);
  }
  const bool is_class = end < pattern.size() && pattern.substr(end, 2) == std::string{kind, ']'};
  return is_class ? end + 2 : kNone;
}

size_t Glob::FindBracketEnd(std::string_view pattern, size_t begin) {
  size_t i = begin + 1;
  if (i < pattern.size() && (pattern[i] == '!' || pattern[i] == '^')) ++i;
  for (bool is_first = true; i < pattern.size(); is_first = false) {
    if (pattern[i] == ']' && !is_first) return i + 1;
    if (pattern[i] == '\\') {
      i += 2;
      continue;
    }
    const size_t end = FindClassEnd(pattern, i);
    i = end != std::string_view::npos ? end : i + 1;
  }
  return std::string_view::npos;
}

Glob::Glob(const std::string& pattern) {
  using Kind = Element::Kind;
  for (size_t i = 0; i < pattern.size();) {
    const char byte = pattern[i];
    const size_t end = byte == '[' ? FindBracketEnd(pattern, i) : std::string::npos;
    if (byte == '*') {
      // Several are one.
      if (elements_.empty() || elements_.back().kind != Kind::kAnyText) {
        elements_.push_back({Kind::kAnyText});
      }
    } else if (byte == '?') {
      elements_.push_back({Kind::kAnyByte});
    } else if (byte == '\\') {
      // One at the end stands for nothing.
      if (++i == pattern.size()) matches_nothing_ = true;
      elements_.push_back({Kind::kByte, pattern[i]});
    } else if (end != std::string::npos) {
      const std::string expression = pattern.substr(i, end - i);
      elements_.push_back({Kind::kOneOf, '\0', sets_.size()});
      std::bitset<256>& set = sets_.emplace_back();
      for (int value = 1; value < 256; ++value) {
        const char text[] = {static_cast<char>(value), '\0'};
        set[value] = fnmatch(expression.c_str(), text, 0) == 0;
      }
      constexpr int64_t kStepsOfCall = 40;
      steps_ += 256 * (kStepsOfCall + std::ssize(expression));
      i = end - 1;
    } else {
      elements_.push_back({Kind::kByte, byte});
    }
    ++i;
  }
}

bool Glob::MatchesByte(const Element& element, char byte) const {
  switch (element.kind) {
    case Element::Kind::kByte:
      return element.byte == byte;
    case Element::Kind::kAnyByte:
      return true;
    case Element::Kind::kOneOf:
      return sets_[element.set][static_cast<unsigned char>(byte)];
    case Element::Kind::kAnyText:
      break;
  }
  return false;
}

bool Glob::MatchesAll(std::span<const Element> elements, std::string_view text) {
  for (size_t i = 0; i < elements.size(); ++i) {
    ++steps_;
    if (!MatchesByte(elements[i], text[i])) return false;
  }
  return true;
}

size_t Glob::EndOfFirst(std::span<const Element> part, std::string_view name) {
  if (std::all_of(part.begin(), part.end(),
                  [](const Element& e) { return e.kind == Element::Kind::kByte; })) {
    // Takes time that is linear, and short.
    std::string text;
    for (const Element& element : part) text += element.byte;
    steps_ += std::ssize(text) + std::ssize(name) / 4;
    const void* const found = memmem(name.data(), name.size(), text.data(), text.size());
    if (found == nullptr) return std::string_view::npos;
    return static_cast<const char*>(found) - name.data() + text.size();
  }
  for (size_t at = 0; at + part.size() <= name.size(); ++at) {
    if (MatchesAll(part, name.substr(at, part.size()))) return at + part.size();
  }
  return std::string_view::npos;
}

bool Glob::Matches(std::string_view name) {
  constexpr int64_t kStepsOfName = 8;
  steps_ += kStepsOfName;
  if (matches_nothing_) return false;
  const auto is_any_text = [](const Element& e) { return e.kind == Element::Kind::kAnyText; };
  std::span<const Element> rest(elements_);
  const auto head = std::find_if(rest.begin(), rest.end(), is_any_text) - rest.begin();
  if (head == std::ssize(rest)) {
    return name.size() == rest.size() && MatchesAll(rest, name);
  }
  const auto tail = std::find_if(rest.rbegin(), rest.rend(), is_any_text) - rest.rbegin();
  if (std::ssize(name) < head + tail ||
      !MatchesAll(rest.last(tail), name.substr(name.size() - tail)) ||
      !MatchesAll(rest.first(head), name.substr(0, head))) {
    return false;
  }
  // What lies between two `*` is best where it is found first.
  rest = rest.subspan(head, rest.size() - head - tail);
  name = name.substr(head, name.size() - head - tail);
  for (size_t begin = 1; begin < rest.size();) {
    const size_t count =
        std::find_if(rest.begin() + begin, rest.end(), is_any_text) - (rest.begin() + begin);
    const size_t end = EndOfFirst(rest.subspan(begin, count), name);
    if (end == std::string_view::npos) return false;
    name.remove_prefix(end);
    begin += count + 1;
  }
  return true;
}

}  // namespace ema
