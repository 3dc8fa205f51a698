// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/known_versions.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"

namespace ema {
namespace {

constexpr size_t kListedVersions = 16;

// `next` was made of `version` by one commit, or by going back to what that commit made.
bool IsNext(const KnownVersion& next, const KnownVersion& version) {
  return next.id.version == version.id.version + 1 ||
         (next.restored_from.has_value() && next.restored_from->version == version.id.version + 1);
}

}  // namespace

std::vector<KnownVersion> KnownVersions(const Model& model,
                                        absl::Span<const CheckpointStore::Stored> stored) {
  std::map<VersionId, KnownVersion, std::greater<>> known;
  for (const CheckpointStore::Stored& checkpoint : stored) {
    if (!checkpoint.problem.ok() || checkpoint.is_partial) continue;
    const VersionId id{checkpoint.id.version, checkpoint.id.incarnation};
    known[id] = {.id = id, .step = checkpoint.id.step, .can_restore = true};
  }
  for (const Model::RecordEntry& entry : model.RecordsAfter(
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

std::vector<KnownVersion> BranchOf(absl::Span<const KnownVersion> known,
                                   const VersionRecord& latest) {
  std::vector<KnownVersion> branch;
  int64_t version = latest.version + 1;
  int64_t step = latest.step;
  for (const KnownVersion& candidate : known) {
    if (candidate.id > latest.id() || candidate.id.version >= version || candidate.step > step) {
      continue;
    }
    branch.push_back(candidate);
    version = candidate.id.version;
    step = candidate.step;
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
