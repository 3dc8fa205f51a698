// SPDX-License-Identifier: Apache-2.0
#include "server/base/tensor_pattern.h"

#include <fnmatch.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/nearest_name.h"

namespace ema {

bool IsGlob(const std::string& pattern) {
  return pattern.find_first_of("*?[\\") != std::string::npos;
}

absl::Status ValidatePattern(const std::string& pattern) {
  const int64_t bytes = static_cast<int64_t>(pattern.size());
  // fnmatch(3) would take a zero byte for the end.
  if (bytes > 0 && bytes <= kMaxTensorNameBytes && pattern.find('\0') == std::string::npos) {
    return absl::OkStatus();
  }
  constexpr size_t kMaxQuotedBytes = 64;
  return absl::InvalidArgumentError(absl::StrCat(
      "pattern \"", absl::CHexEscape(pattern.substr(0, kMaxQuotedBytes)), "\": must be 1 to ",
      kMaxTensorNameBytes, " bytes without a zero, such as \"head.*\""));
}

std::vector<int64_t> MatchingTensors(const std::string& pattern, const Manifest& manifest) {
  // Long lists of names stay cheap.
  if (!IsGlob(pattern)) {
    std::optional<int64_t> exact = manifest.Find(pattern);
    if (!exact.has_value()) exact = manifest.FindAlias(pattern);
    return exact.has_value() ? std::vector<int64_t>{*exact} : std::vector<int64_t>();
  }
  const auto matches_glob = [&pattern](const std::string& name) {
    return name == pattern || fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  };
  std::vector<int64_t> matches;
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    const TensorSpec& spec = manifest.tensor(i);
    if (matches_glob(spec.name) ||
        std::any_of(spec.aliases.begin(), spec.aliases.end(), matches_glob)) {
      matches.push_back(i);
    }
  }
  return matches;
}

absl::StatusOr<std::vector<int64_t>> FindTensors(const std::string& pattern,
                                                 const Manifest& manifest) {
  EMA_RETURN_IF_ERROR(ValidatePattern(pattern));
  std::vector<int64_t> matches = MatchingTensors(pattern, manifest);
  if (!matches.empty()) return matches;
  const std::string_view nearest = NearestName(
      pattern, manifest.tensors(), [](const TensorSpec& spec) -> const auto& { return spec.name; });
  return absl::InvalidArgumentError(absl::StrCat("pattern \"", absl::CHexEscape(pattern),
                                                 "\" matches no tensor; the nearest name is \"",
                                                 std::string(nearest), "\""));
}

}  // namespace ema
