// SPDX-License-Identifier: Apache-2.0
#include "include/ema/internal/tensor_pattern.h"

#include <re2/re2.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/nearest_name.h"
#include "server/base/quoted.h"

namespace ema {
namespace {

// The position behind the character class, such as [:digit:], that begins at `begin`; npos: none
// does.
size_t FindClassEnd(std::string_view glob, size_t begin) {
  if (glob.substr(begin, 2) != "[:") return std::string_view::npos;
  size_t end = begin + 2;
  while (end < glob.size() && absl::ascii_islower(static_cast<unsigned char>(glob[end]))) ++end;
  return glob.substr(end, 2) == ":]" ? end + 2 : std::string_view::npos;
}

// The position behind the bracket expression that begins at `begin`; npos if it does not end.
size_t FindBracketEnd(std::string_view glob, size_t begin) {
  size_t i = begin + 1;
  if (i < glob.size() && (glob[i] == '!' || glob[i] == '^')) ++i;
  for (bool is_first = true; i < glob.size(); is_first = false) {
    if (glob[i] == ']' && !is_first) return i + 1;
    const size_t class_end = FindClassEnd(glob, i);
    if (class_end != std::string_view::npos) {
      i = class_end;
    } else {
      i += glob[i] == '\\' ? 2 : 1;
    }
  }
  return std::string_view::npos;
}

// A bracket expression of fnmatch(3) as one of RE2. They differ in `!`, in what is escaped, and in
// two classes that only RE2 has: as any class that does not exist, they make the expression
// invalid.
std::string BracketRegex(std::string_view bracket) {
  std::string regex = "[";
  size_t i = 1;
  if (bracket[i] == '!' || bracket[i] == '^') {
    regex += '^';
    ++i;
  }
  while (i + 1 < bracket.size()) {
    if (const size_t end = FindClassEnd(bracket, i); end != std::string_view::npos) {
      const std::string_view name = bracket.substr(i, end - i);
      const bool is_only_in_re2 = name == "[:ascii:]" || name == "[:word:]";
      regex += is_only_in_re2 ? "[:unknown:]" : name;
      i = end;
    } else if (bracket[i] == '-') {
      regex += bracket[i++];
    } else {
      if (bracket[i] == '\\') ++i;
      regex += RE2::QuoteMeta(std::string(1, bracket[i++]));
    }
  }
  return regex + "]";
}

// `glob` as a regular expression. An escape at the end, and a bracket that does not end, are plain.
std::string GlobRegex(std::string_view glob) {
  std::string regex;
  for (size_t i = 0; i < glob.size(); ++i) {
    const size_t bracket_end = glob[i] == '[' ? FindBracketEnd(glob, i) : std::string_view::npos;
    if (glob[i] == '*') {
      if (!regex.ends_with(".*")) regex += ".*";  // Several are one.
    } else if (glob[i] == '?') {
      regex += '.';
    } else if (bracket_end != std::string_view::npos) {
      regex += BracketRegex(glob.substr(i, bracket_end - i));
      i = bracket_end - 1;
    } else {
      if (glob[i] == '\\' && i + 1 < glob.size()) ++i;
      regex += RE2::QuoteMeta(std::string(1, glob[i]));
    }
  }
  return regex;
}

// At most this many steps of RE2 compare all names with `glob`. A byte of a name is one step, or,
// if RE2's automaton may become too large for its cache, as many as `glob` has bytes.
int64_t MatchSteps(const std::string& glob, const Manifest& manifest) {
  int64_t name_bytes = 0;
  for (const TensorSpec& spec : manifest.tensors()) {
    name_bytes += static_cast<int64_t>(spec.name.size());
    for (const std::string& alias : spec.aliases) {
      name_bytes += static_cast<int64_t>(alias.size());
    }
  }
  const size_t star = glob.find('*');
  const bool may_grow =
      star != std::string::npos && glob.find_first_of("?[", star) != std::string::npos;
  return may_grow ? name_bytes * static_cast<int64_t>(glob.size()) : name_bytes;
}

}  // namespace

bool IsGlob(const std::string& pattern) {
  return pattern.find_first_of("*?[\\") != std::string::npos;
}

std::vector<int64_t> MatchingTensors(const std::string& pattern, const Manifest& manifest) {
  if (!IsGlob(pattern)) {
    std::optional<int64_t> exact = manifest.Find(pattern);
    if (!exact.has_value()) exact = manifest.FindAlias(pattern);
    return exact.has_value() ? std::vector<int64_t>{*exact} : std::vector<int64_t>();
  }
  RE2::Options options(RE2::Latin1);  // Byte by byte.
  options.set_dot_nl(true);
  options.set_never_capture(true);
  options.set_log_errors(false);
  // Matches nothing if it is invalid, such as [z-a].
  const RE2 regex(GlobRegex(pattern), options);
  const auto matches = [&](const std::string& name) {
    return name == pattern || RE2::FullMatch(name, regex);
  };
  std::vector<int64_t> tensors;
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    const TensorSpec& spec = manifest.tensor(i);
    if (matches(spec.name) || std::any_of(spec.aliases.begin(), spec.aliases.end(), matches)) {
      tensors.push_back(i);
    }
  }
  return tensors;
}

absl::StatusOr<std::vector<int64_t>> MatchTensors(const std::string& pattern,
                                                  const Manifest& manifest, GlobBudget& budget) {
  const int64_t bytes = static_cast<int64_t>(pattern.size());
  if (bytes == 0 || bytes > kMaxTensorNameBytes || pattern.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("pattern ", Quoted(pattern), ": must be 1 to ",
                                                   kMaxTensorNameBytes,
                                                   " bytes without a zero, such as \"head.*\""));
  }
  if (IsGlob(pattern)) budget.steps -= MatchSteps(pattern, manifest);
  if (budget.steps >= 0) return MatchingTensors(pattern, manifest);
  return absl::InvalidArgumentError(absl::StrCat(
      "pattern \"", absl::CHexEscape(pattern),
      "\": with those before it takes too long to compare with the names of ",
      manifest.tensor_count(),
      " tensors; give fewer or shorter patterns with wildcards, best without ? or [] after a *, "
      "such as \"head.*\""));
}

absl::StatusOr<std::vector<int64_t>> FindTensors(const std::string& pattern,
                                                 const Manifest& manifest, GlobBudget& budget) {
  EMA_ASSIGN_OR_RETURN(std::vector<int64_t> matches, MatchTensors(pattern, manifest, budget));
  if (!matches.empty()) return matches;
  const std::string_view nearest = NearestName(
      pattern, manifest.tensors(), [](const TensorSpec& spec) -> const auto& { return spec.name; });
  return absl::InvalidArgumentError(absl::StrCat("pattern \"", absl::CHexEscape(pattern),
                                                 "\" matches no tensor; the nearest name is \"",
                                                 std::string(nearest), "\""));
}

}  // namespace ema
