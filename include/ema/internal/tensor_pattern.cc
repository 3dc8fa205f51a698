// SPDX-License-Identifier: Apache-2.0
#include "include/ema/internal/tensor_pattern.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "include/ema/internal/glob.h"
#include "server/base/nearest_name.h"
#include "server/base/quoted.h"

namespace ema {
namespace {

// As MatchingTensors(); nullopt: it takes more than `budget`.
std::optional<std::vector<int64_t>> Match(const std::string& pattern, const Manifest& manifest,
                                          GlobBudget& budget) {
  // Long lists of names stay cheap.
  if (!IsGlob(pattern)) {
    std::optional<int64_t> exact = manifest.Find(pattern);
    if (!exact.has_value()) exact = manifest.FindAlias(pattern);
    return exact.has_value() ? std::vector<int64_t>{*exact} : std::vector<int64_t>();
  }
  Glob glob(pattern);
  const auto matches_glob = [&](const std::string& name) {
    // A tensor may have thousands of aliases.
    return glob.steps() <= budget.steps && (name == pattern || glob.Matches(name));
  };
  std::vector<int64_t> matches;
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    const TensorSpec& spec = manifest.tensor(i);
    if (matches_glob(spec.name) ||
        std::any_of(spec.aliases.begin(), spec.aliases.end(), matches_glob)) {
      matches.push_back(i);
    }
    if (glob.steps() > budget.steps) return std::nullopt;
  }
  budget.steps -= glob.steps();
  return matches;
}

}  // namespace

bool IsGlob(const std::string& pattern) {
  return pattern.find_first_of("*?[\\") != std::string::npos;
}

std::vector<int64_t> MatchingTensors(const std::string& pattern, const Manifest& manifest) {
  GlobBudget budget = GlobBudget::Unlimited();
  return *Match(pattern, manifest, budget);
}

absl::StatusOr<std::vector<int64_t>> MatchTensors(const std::string& pattern,
                                                  const Manifest& manifest, GlobBudget& budget) {
  const int64_t bytes = static_cast<int64_t>(pattern.size());
  if (bytes == 0 || bytes > kMaxTensorNameBytes || pattern.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("pattern ", Quoted(pattern), ": must be 1 to ",
                                                   kMaxTensorNameBytes,
                                                   " bytes without a zero, such as \"head.*\""));
  }
  std::optional<std::vector<int64_t>> matches = Match(pattern, manifest, budget);
  if (matches.has_value()) return *std::move(matches);
  return absl::InvalidArgumentError(absl::StrCat(
      "pattern \"", absl::CHexEscape(pattern),
      "\": with those before it takes too long to be looked for among ", manifest.tensor_count(),
      " tensors; give fewer or shorter patterns with wildcards, best with their text at the ends, "
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
