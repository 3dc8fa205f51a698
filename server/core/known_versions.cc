// SPDX-License-Identifier: Apache-2.0
#include "server/core/known_versions.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"

namespace ema {
namespace {

constexpr size_t kListedVersions = 16;

// `next` was made of `version` by one commit, or by going back to what that commit made.
bool IsNext(const KnownVersion& next, const KnownVersion& version) {
  return next.id.version == version.id.version + 1 ||
         (next.restored_from.has_value() && next.restored_from->version == version.id.version + 1);
}

}  // namespace

std::vector<KnownVersion> MergeKnownVersions(const VersionHistory& history,
                                             absl::Span<const KnownVersion> on_disk) {
  std::map<VersionId, KnownVersion, std::greater<>> known;
  for (const KnownVersion& version : on_disk) known[version.id] = version;
  for (const VersionHistory::RecordEntry& entry : history.RecordsAfter(
           /*version=*/0, /*incarnation=*/0, std::numeric_limits<int64_t>::max())) {
    KnownVersion& version = known[entry.record.id()];
    version.id = entry.record.id();
    version.step = entry.record.step;
    version.can_restore |= entry.available;
    version.restored_from = entry.record.restored_from;
  }
  std::vector<KnownVersion> result;
  result.reserve(known.size());
  for (const auto& [id, version] : known) result.push_back(version);
  return result;
}

bool BranchWalk::AdvanceIfOnBranch(const VersionId& id, int64_t step,
                                   const std::optional<VersionId>& restored_from) {
  if (id > latest_ || id.version >= version_ || step > step_) return false;
  version_ =
      restored_from.has_value() ? std::min(id.version, restored_from->version + 1) : id.version;
  step_ = step;
  return true;
}

std::vector<KnownVersion> BranchOf(absl::Span<const KnownVersion> known, const Version& latest) {
  std::vector<KnownVersion> branch;
  BranchWalk walk(latest);
  for (const KnownVersion& candidate : known) {
    if (walk.AdvanceIfOnBranch(candidate.id, candidate.step, candidate.restored_from))
      branch.push_back(candidate);
  }
  return branch;
}

std::optional<VersionId> VersionAfterStep(absl::Span<const KnownVersion> branch, int64_t step,
                                          bool is_complete) {
  const KnownVersion* later = nullptr;   // The last one of a later step.
  const KnownVersion* before = nullptr;  // The first one of this step, or an earlier one.
  bool is_known = is_complete;
  for (const KnownVersion& version : branch) {
    if (version.step > step) {
      later = &version;
      continue;
    }
    if (before == nullptr) before = &version;
    if (version.step != before->step) break;
    is_known = is_known || version.step == step || (later != nullptr && IsNext(*later, version));
  }
  if (!is_known || before == nullptr) return std::nullopt;
  for (const KnownVersion& version : branch) {
    if (version.step == before->step && version.can_restore) return version.id;
  }
  return std::nullopt;
}

absl::StatusOr<VersionId> VersionAtStep(std::string_view model_name,
                                        absl::Span<const KnownVersion> branch, int64_t step) {
  if (!branch.empty() && step > branch[0].step) {
    return StepNotYetError(model_name, step, branch[0].id, branch[0].step);
  }
  for (const KnownVersion& version : branch) {
    if (version.step == step && version.can_restore) return version.id;
  }
  return MakeError(
      absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
      absl::StrCat("model \"", std::string(model_name), "\": no version of step ", step,
                   " is in memory or on the disk; there are ", ListNearest(branch, step)));
}

absl::Status StepNotYetError(std::string_view model_name, int64_t step, const VersionId& latest,
                             int64_t latest_step) {
  return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotYet,
                   absl::StrCat("model \"", std::string(model_name), "\": step ", step,
                                " is not committed yet; the newest is step ", latest_step,
                                " (version ", latest.version, ")"));
}

std::string ListNearest(absl::Span<const KnownVersion> known, int64_t step) {
  std::vector<KnownVersion> nearest;
  for (const KnownVersion& version : known) {
    if (version.can_restore) nearest.push_back(version);
  }
  // Steps are not negative, so this does not overflow.
  const auto distance = [step](const KnownVersion& v) {
    return v.step > step ? v.step - step : step - v.step;
  };
  std::stable_sort(nearest.begin(), nearest.end(),
                   [&](const auto& a, const auto& b) { return distance(a) < distance(b); });
  if (nearest.size() > kListedVersions) nearest.resize(kListedVersions);
  std::stable_sort(nearest.begin(), nearest.end(),
                   [](const auto& a, const auto& b) { return a.step < b.step; });
  std::string text;
  for (const KnownVersion& version : nearest) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", "step ", version.step, " (version ",
                    version.id.version, ")");
  }
  return text.empty() ? "none" : text;
}

}  // namespace ema
