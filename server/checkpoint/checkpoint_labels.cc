// SPDX-License-Identifier: Apache-2.0
//
// The part of CheckpointManager that has labels and scores, and opens what they name.
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "server/checkpoint/stored_track.h"
#include "server/format/label_file.h"

namespace ema {
namespace {

// Of a model. Who may report scores may have so many versions kept by them, and may not be one who
// may set labels.
constexpr int64_t kMaxScoreLabels = 16;

absl::Status BadScore(const Model& model, const CheckpointLabel& score, const std::string& why) {
  return BadRequest(
      absl::StrCat("model \"", model.config().name, "\", label \"", score.name, "\": ", why));
}

std::string_view Direction(bool lower_is_better) { return lower_is_better ? "lower" : "higher"; }

std::set<std::string> SavedTracks(const CheckpointManifest& checkpoint) {
  std::set<std::string> names;
  for (const CheckpointTrack& track : checkpoint.tracks) {
    if (track.weights.has_value()) names.insert(track.config.name);
  }
  return names;
}

bool IsInMemory(const Model& model, const VersionId& id) {
  const std::vector<VersionHistory::RecordEntry> records =
      model.history().RecordsAfter(id.version - 1, id.incarnation, /*limit=*/1);
  return !records.empty() && records[0].record.id() == id && records[0].available;
}

}  // namespace

void CheckpointManager::LogLabelSet(const Model& model, std::string_view label, int64_t version,
                                    int64_t step) const {
  Log(LogLevel::kInfo, "label set", model,
      {{"label", label}, {"version", version}, {"step", step}});
}

std::shared_ptr<absl::Mutex> CheckpointManager::LabelMutexOf(const Model& model) {
  absl::MutexLock lock(&mu_);
  std::erase_if(label_mutexes_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<absl::Mutex>& known = label_mutexes_[model.config().name];
  std::shared_ptr<absl::Mutex> mutex = known.lock();
  if (mutex == nullptr) known = mutex = std::make_shared<absl::Mutex>();
  return mutex;
}

absl::Status CheckpointManager::PutLabel(const Model& model, const CheckpointLabel& label) {
  EMA_RETURN_IF_ERROR(store_->PutLabel(model.config().name, label));
  LogLabelSet(model, label.name, label.id.version, label.step);
  return absl::OkStatus();
}

absl::StatusOr<CheckpointLabel> CheckpointManager::Place(Model& model, CheckpointLabel label,
                                                         const VersionId& id) {
  const absl::StatusOr<SnapshotRef> pinned = model.history().PinForSave(id.version, id.incarnation);
  if (pinned.ok()) {
    label.id = (*pinned)->record.id();
    label.step = (*pinned)->record.step;
    EMA_RETURN_IF_ERROR(SaveSnapshot(model, *pinned, {.label = label}).status());
  } else {
    EMA_RETURN_IF_ERROR(model.closed());
    EMA_ASSIGN_OR_RETURN(const auto stored, FindStored(model, id));
    if (!stored.has_value()) {
      if (GetErrorReason(pinned.status()) != ErrorReason::kVersionNotKept) return pinned.status();
      // Who reads a label's version may ask for any track.
      EMA_RETURN_IF_ERROR(CheckNotPartial(model, id));
      return NotKept(model, id);
    }
    label.id = stored->id.version_id();
    label.step = stored->id.step;
    EMA_RETURN_IF_ERROR(PutLabel(model, label));
  }
  return label;
}

absl::Status CheckpointManager::CheckLabel(const Model& model, std::string_view label) {
  if (FindLabel(model, label).ok()) return absl::OkStatus();
  return ValidateNewLabel(label);
}

absl::StatusOr<CheckpointLabel> CheckpointManager::SetLabel(Model& model, const std::string& label,
                                                            const VersionId& id) {
  EMA_RETURN_IF_ERROR(CheckLabel(model, label));
  const std::shared_ptr<absl::Mutex> label_mu = LabelMutexOf(model);
  absl::MutexLock lock(label_mu.get());
  return Place(model, {.name = label}, id);
}

absl::Status CheckpointManager::RemoveLabel(Model& model, const std::string& label) {
  EMA_RETURN_IF_ERROR(ValidateName("label", label));
  EMA_RETURN_IF_ERROR(model.closed());
  const std::shared_ptr<absl::Mutex> label_mu = LabelMutexOf(model);
  absl::MutexLock lock(label_mu.get());
  EMA_RETURN_IF_ERROR(store_->RemoveLabel(model.config().name, label));
  Log(LogLevel::kInfo, "label removed", model, {{"label", label}});
  return absl::OkStatus();
}

absl::Status CheckpointManager::CheckMayScore(const Model& model,
                                              const CheckpointLabel& score) const {
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointLabel> labels,
                       store_->Labels(model.config().name));
  const int64_t count =
      std::count_if(labels.begin(), labels.end(),
                    [](const CheckpointLabel& label) { return label.metric.has_value(); });
  if (count < kMaxScoreLabels) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kBadRequest,
                   absl::StrCat("model \"", model.config().name, "\", label \"", score.name,
                                "\": the model has ", count,
                                " labels that scores move, as many as it may have"));
}

absl::StatusOr<Checkpoints::MetricResult> CheckpointManager::ReportMetric(
    Model& model, const CheckpointLabel& score) {
  EMA_RETURN_IF_ERROR(CheckLabel(model, score.name));
  EMA_RETURN_IF_ERROR(model.closed());
  const double value = score.metric.value_or(std::numeric_limits<double>::quiet_NaN());
  if (!std::isfinite(value)) {
    return BadScore(model, score,
                    absl::StrCat("value: ", value, " given, expected a finite number"));
  }
  // Also with a score that moves nothing.
  const absl::Status known = model.history().Pin(score.id.version, score.id.incarnation).status();
  if (GetErrorReason(known) == ErrorReason::kVersionNotYet) return known;
  const std::shared_ptr<absl::Mutex> label_mu = LabelMutexOf(model);
  absl::MutexLock lock(label_mu.get());
  const absl::StatusOr<CheckpointStore::FoundLabel> found =
      store_->FindLabel(model.config().name, score.name);
  if (!found.ok() && !absl::IsNotFound(found.status())) return found.status();
  if (!found.ok()) {
    EMA_RETURN_IF_ERROR(CheckMayScore(model, score));
  } else {
    const CheckpointLabel& now = found->label;
    if (!now.metric.has_value()) {
      return BadScore(model, score,
                      "it was set without a score; scores move it once it has been removed");
    }
    if (now.lower_is_better != score.lower_is_better) {
      return BadScore(
          model, score,
          absl::StrCat("this score says that ", std::string(Direction(score.lower_is_better)),
                       " is better, those before said ",
                       std::string(Direction(now.lower_is_better))));
    }
    const bool is_better =
        score.lower_is_better ? *score.metric < *now.metric : *score.metric > *now.metric;
    if (!is_better) return MetricResult{.label = now, .moved = false};
  }
  EMA_ASSIGN_OR_RETURN(CheckpointLabel placed, Place(model, score, score.id));
  return MetricResult{.label = std::move(placed), .moved = true};
}

absl::StatusOr<VersionId> CheckpointManager::FindLabel(const Model& model, std::string_view label) {
  EMA_ASSIGN_OR_RETURN(const CheckpointStore::FoundLabel found,
                       store_->FindLabel(model.config().name, label));
  if (found.checkpoint.ok() || IsInMemory(model, found.label.id)) return found.label.id;
  return WithPlace(
      found.checkpoint,
      absl::StrCat("model \"", model.config().name, "\", label \"", std::string(label),
                   "\": version ", found.label.id.version, ", step ", found.label.step, ": "));
}

absl::StatusOr<SnapshotRef> CheckpointManager::OpenVersion(Model& model, const VersionId& id,
                                                           std::string_view track) {
  const std::string& model_name = model.config().name;
  EMA_ASSIGN_OR_RETURN(std::vector<CheckpointStore::Stored> found, store_->ListNames(model_name));
  std::erase_if(found, [&](const CheckpointStore::Stored& stored) {
    return !stored.problem.ok() || !id.Names(stored.id.version_id());
  });
  // Those with all tracks first.
  std::stable_partition(found.begin(), found.end(),
                        [](const CheckpointStore::Stored& stored) { return !stored.is_partial; });
  std::set<std::string> others;
  for (const CheckpointStore::Stored& stored : found) {
    // While its files are opened; they stay open after it has gone.
    EMA_ASSIGN_OR_RETURN(const auto held, store_->Hold(model_name, stored.name));
    if (held == nullptr) continue;
    EMA_ASSIGN_OR_RETURN(const CheckpointManifest checkpoint, ReadManifest(model, stored));
    if (stored.is_partial) {
      const std::set<std::string> tracks = SavedTracks(checkpoint);
      if (!tracks.contains(std::string(track))) {
        others.insert(tracks.begin(), tracks.end());
        continue;
      }
    }
    absl::StatusOr<SnapshotRef> opened = OpenStoredVersion(
        store_->file_system(), store_->Path(model_name, stored.name), checkpoint, track,
        [this, weak_model = model.weak_from_this(),
         name = stored.name](const absl::Status& problem) {
          const std::shared_ptr<Model> its_model = weak_model.lock();
          if (its_model != nullptr) StoredError(*its_model, name, problem).IgnoreError();
        });
    if (!opened.ok()) return StoredError(model, stored.name, opened.status());
    return opened;
  }
  if (others.empty()) return NotKept(model, id);
  return MakeError(
      absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
      absl::StrCat("model \"", model_name, "\", track \"", std::string(track), "\": of version ",
                   id.version, " only these tracks were saved: ", absl::StrJoin(others, ", ")));
}

}  // namespace ema
