// SPDX-License-Identifier: Apache-2.0
#include "ema/track.h"

#include <fnmatch.h>

#include <algorithm>
#include <optional>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/nearest_name.h"

namespace ema {
namespace {

absl::Status BadTrack(const TrackConfig& track, std::string_view problem) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
                   absl::StrCat("track \"", track.name, "\": ", std::string(problem)));
}

bool IsGlob(const std::string& pattern) {
  return pattern.find_first_of("*?[\\") != std::string::npos;
}

// The tensors that `pattern` means.
std::vector<int64_t> Matches(const std::string& pattern, const Manifest& manifest) {
  std::vector<int64_t> matches;
  const std::optional<int64_t> exact = manifest.Find(pattern);
  // Without these bytes a pattern only matches itself: long lists of names stay cheap.
  if (!IsGlob(pattern)) {
    if (exact.has_value()) return {*exact};
    for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
      const std::vector<std::string>& aliases = manifest.tensor(i).aliases;
      if (std::find(aliases.begin(), aliases.end(), pattern) != aliases.end()) return {i};
    }
    return {};
  }
  const auto matches_glob = [&pattern](const std::string& name) {
    return name == pattern || fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  };
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    const TensorSpec& spec = manifest.tensor(i);
    if (matches_glob(spec.name) ||
        std::any_of(spec.aliases.begin(), spec.aliases.end(), matches_glob)) {
      matches.push_back(i);
    }
  }
  return matches;
}

absl::Status CheckPattern(const TrackConfig& track, const std::string& pattern,
                          const Manifest& manifest) {
  const int64_t bytes = static_cast<int64_t>(pattern.size());
  // fnmatch(3) would take a zero byte for the end.
  if (bytes == 0 || bytes > kMaxTensorNameBytes || pattern.find('\0') != std::string::npos) {
    constexpr size_t kMaxQuotedBytes = 64;
    return BadTrack(track, absl::StrCat("tensor_rules: pattern \"",
                                        absl::CHexEscape(pattern.substr(0, kMaxQuotedBytes)),
                                        "\": must be 1 to ", kMaxTensorNameBytes,
                                        " bytes without a zero, such as \"head.*\""));
  }
  if (!Matches(pattern, manifest).empty()) return absl::OkStatus();
  const std::string_view nearest = NearestName(
      pattern, manifest.tensors(), [](const TensorSpec& spec) -> const auto& { return spec.name; });
  return BadTrack(track, absl::StrCat("tensor_rules: pattern \"", absl::CHexEscape(pattern),
                                      "\" matches no tensor; the nearest name is \"",
                                      std::string(nearest), "\""));
}

}  // namespace

absl::Status ValidateTrack(const TrackConfig& track, const Manifest& manifest) {
  EMA_RETURN_IF_ERROR(ValidateName("track", track.name));
  if (track.buffers != TensorAction::kAverage && track.buffers != TensorAction::kCopy) {
    return BadTrack(track, absl::StrCat("buffers \"", std::string(TensorActionName(track.buffers)),
                                        "\": must be \"average\" or \"copy\"; to ignore some, give "
                                        "a rule, such as \"*.running_mean ignore\""));
  }
  if (track.compensated && track.schedule.is_copy()) {
    return BadTrack(track,
                    "compensated \"true\": has no use with copy, which loses nothing; use it with "
                    "an average, such as half_life=1000ba");
  }
  // Each is tried on every tensor.
  constexpr int64_t kMaxGlobs = 256;
  const int64_t globs = std::count_if(track.tensor_rules.begin(), track.tensor_rules.end(),
                                      [](const TensorRule& rule) { return IsGlob(rule.pattern); });
  if (globs > kMaxGlobs || static_cast<int64_t>(track.tensor_rules.size()) > kMaxTensorCount) {
    return BadTrack(track,
                    absl::StrCat("tensor_rules: ", track.tensor_rules.size(), " given, ", globs,
                                 " with wildcards; at most ", kMaxTensorCount, " and ", kMaxGlobs,
                                 " are allowed, such as \"head.*\" ignore"));
  }
  for (const TensorRule& rule : track.tensor_rules) {
    EMA_RETURN_IF_ERROR(CheckPattern(track, rule.pattern, manifest));
  }
  const std::vector<TensorAction> actions = ActionsOf(track, manifest);
  if (std::all_of(actions.begin(), actions.end(),
                  [](TensorAction action) { return action == TensorAction::kIgnore; })) {
    return BadTrack(track,
                    "tensor_rules: every tensor is ignored; average or copy one, such as by "
                    "\"head.* average\" before the others");
  }
  return absl::OkStatus();
}

std::vector<TensorAction> ActionsOf(const TrackConfig& track, const Manifest& manifest) {
  std::vector<std::optional<TensorAction>> ruled(manifest.tensors().size());
  for (const TensorRule& rule : track.tensor_rules) {
    for (const int64_t i : Matches(rule.pattern, manifest)) {
      if (!ruled[i].has_value()) ruled[i] = rule.action;
    }
  }
  std::vector<TensorAction> actions;
  actions.reserve(ruled.size());
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    const TensorSpec& spec = manifest.tensor(i);
    TensorAction action =
        ruled[i].value_or(spec.is_buffer ? track.buffers : TensorAction::kAverage);
    const bool can_average = !track.schedule.is_copy() && IsFloat(spec.dtype);
    if (action == TensorAction::kAverage && !can_average) action = TensorAction::kCopy;
    actions.push_back(action);
  }
  return actions;
}

TrackConfig WithoutIdleRules(TrackConfig track, const Manifest& manifest) {
  std::erase_if(track.tensor_rules, [&manifest](const TensorRule& rule) {
    return Matches(rule.pattern, manifest).empty();
  });
  return track;
}

std::string TrackText(const TrackConfig& track) {
  std::string text = track.schedule.ToString();
  if (track.buffers != TensorAction::kAverage) {
    absl::StrAppend(&text, "; buffers ", std::string(TensorActionName(track.buffers)));
  }
  if (track.compensated) absl::StrAppend(&text, "; compensated");
  if (track.paused) absl::StrAppend(&text, "; paused");
  constexpr size_t kShownRules = 8;
  constexpr size_t kShownBytes = 200;
  std::string rules;
  for (const TensorRule& rule : track.tensor_rules) {
    if (rules.size() > kShownBytes) break;
    absl::StrAppend(&rules, "; ", rule.pattern, " ", std::string(TensorActionName(rule.action)));
  }
  // Every version's record has this text.
  if (track.tensor_rules.size() > kShownRules || rules.size() > kShownBytes) {
    return absl::StrCat(text, "; ", track.tensor_rules.size(), " tensor rules");
  }
  return text + rules;
}

}  // namespace ema
