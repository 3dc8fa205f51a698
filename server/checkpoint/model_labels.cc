// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/model_labels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// Callers who may report scores but not set labels can keep this many versions of a model on the
// disk.
constexpr int64_t kMaxScoreLabels = 16;

std::string_view Direction(bool lower_is_better) { return lower_is_better ? "lower" : "higher"; }

}  // namespace

absl::StatusOr<CheckpointLabel> ModelLabels::PlaceLocked(CheckpointLabel label,
                                                         const VersionId& id) {
  const absl::StatusOr<SnapshotRef> pinned =
      context_.model.history().PinForSave(id.version, id.incarnation);
  if (pinned.ok()) {
    label.id = (*pinned)->record.id();
    label.step = (*pinned)->record.step;
    EMA_RETURN_IF_ERROR(saver_.SaveSnapshot(*pinned, {.label = label}).status());
    return label;
  }
  EMA_RETURN_IF_ERROR(context_.model.CheckOpen());
  EMA_ASSIGN_OR_RETURN(const auto stored, versions_.Find(id));
  if (!stored.has_value()) {
    if (GetErrorReason(pinned.status()) != ErrorReason::kVersionNotKept) return pinned.status();
    // Readers of a label may ask for any track.
    EMA_RETURN_IF_ERROR(versions_.CheckNotPartial(id));
    return versions_.VersionNotKeptError(id);
  }
  label.id = stored->id.version_id();
  label.step = stored->id.step;
  EMA_RETURN_IF_ERROR(saver_.PutLabel(label));
  return label;
}

absl::StatusOr<CheckpointLabel> ModelLabels::Set(const std::string& label, const VersionId& id) {
  EMA_RETURN_IF_ERROR(versions_.CheckLabel(label));
  absl::MutexLock lock(&mu_);
  return PlaceLocked({.name = label}, id);
}

absl::Status ModelLabels::Remove(const std::string& label) {
  EMA_RETURN_IF_ERROR(ValidateName("label", label));
  EMA_RETURN_IF_ERROR(context_.model.CheckOpen());
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(context_.folder.RemoveLabel(label));
  context_.Log(LogLevel::kInfo, "label removed", {{"label", label}});
  return absl::OkStatus();
}

absl::Status ModelLabels::CheckMayScore(const CheckpointLabel& score) const {
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointLabel> labels, context_.folder.Labels());
  const int64_t count =
      std::count_if(labels.begin(), labels.end(),
                    [](const CheckpointLabel& label) { return label.metric.has_value(); });
  if (count < kMaxScoreLabels) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kResourceExhausted, ErrorReason::kBadRequest,
      absl::StrCat("model \"", context_.name(), "\", label \"", score.name, "\": the model has ",
                   count, " labels that scores move, the maximum"));
}

absl::Status ModelLabels::BadScore(const CheckpointLabel& score, const std::string& why) const {
  return BadRequest(
      absl::StrCat("model \"", context_.name(), "\", label \"", score.name, "\": ", why));
}

absl::StatusOr<MetricResult> ModelLabels::Report(const CheckpointLabel& score) {
  EMA_RETURN_IF_ERROR(versions_.CheckLabel(score.name));
  EMA_RETURN_IF_ERROR(context_.model.CheckOpen());
  const double value = score.metric.value_or(std::numeric_limits<double>::quiet_NaN());
  if (!std::isfinite(value)) {
    return BadScore(score, absl::StrCat("value: ", value, " given, expected a finite number"));
  }
  // Also if the score moves no label.
  const absl::Status known =
      context_.model.history().Pin(score.id.version, score.id.incarnation).status();
  if (GetErrorReason(known) == ErrorReason::kVersionNotYet) return known;
  absl::MutexLock lock(&mu_);
  const absl::StatusOr<FoundLabel> found = context_.folder.FindLabel(score.name);
  if (!found.ok() && !absl::IsNotFound(found.status())) return found.status();
  if (!found.ok()) {
    EMA_RETURN_IF_ERROR(CheckMayScore(score));
  } else {
    const CheckpointLabel& best = found->label;
    if (!best.metric.has_value()) {
      return BadScore(
          score, "the label was set without a score; remove it before you report scores for it");
    }
    if (best.lower_is_better != score.lower_is_better) {
      return BadScore(
          score,
          absl::StrCat("the score is reported with ", std::string(Direction(score.lower_is_better)),
                       " is better, but earlier ones with ",
                       std::string(Direction(best.lower_is_better)), " is better"));
    }
    const bool is_better =
        score.lower_is_better ? *score.metric < *best.metric : *score.metric > *best.metric;
    if (!is_better) return MetricResult{.label = best, .moved = false};
  }
  EMA_ASSIGN_OR_RETURN(CheckpointLabel placed, PlaceLocked(score, score.id));
  return MetricResult{.label = std::move(placed), .moved = true};
}

}  // namespace ema
