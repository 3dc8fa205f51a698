// SPDX-License-Identifier: Apache-2.0
//
// The part of CheckpointManager that saves, at once or later.
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/base/steady_wait.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "server/core/model_store.h"

namespace ema {
namespace {

constexpr size_t kMaxFailed = 64;  // Of a model.

// What is known of a version that is to be saved under `name`.
CheckpointInfo InfoOf(const std::string& name, const Snapshot& snapshot,
                      const std::vector<std::string>& tracks) {
  CheckpointInfo info{.name = name,
                      .state = CheckpointInfo::State::kSaving,
                      .id = snapshot.record.id(),
                      .step = snapshot.record.step,
                      .commit_time = snapshot.record.commit_time,
                      .tracks = tracks,
                      .is_partial = !tracks.empty()};
  if (!tracks.empty()) return info;
  for (const TrackSnapshot& track : snapshot.tracks) info.tracks.push_back(track.track->name());
  return info;
}

// The tracks to be saved: sorted, once each; none: all that the model has are asked for.
absl::StatusOr<std::vector<std::string>> ChooseTracks(const Model& model, const Snapshot& snapshot,
                                                      const std::vector<std::string>& asked) {
  const std::set<std::string> names(asked.begin(), asked.end());
  for (const std::string& name : names) {
    if (snapshot.Find(name) != nullptr) continue;
    EMA_RETURN_IF_ERROR(model.tracks().CheckTrack(name));
    return MakeError(absl::StatusCode::kNotFound, ErrorReason::kTrackNotFound,
                     absl::StrCat("model \"", model.config().name, "\": track \"", name,
                                  "\" has no value in version ", snapshot.record.number));
  }
  const bool has_all =
      std::all_of(snapshot.tracks.begin(), snapshot.tracks.end(),
                  [&](const TrackSnapshot& track) { return names.contains(track.track->name()); });
  if (has_all) return std::vector<std::string>();
  return std::vector<std::string>(names.begin(), names.end());
}

}  // namespace

absl::StatusOr<Checkpoints::Saved> CheckpointManager::SaveSnapshot(
    Model& model, const SnapshotRef& snapshot, const CheckpointStore::SaveOptions& options) {
  absl::StatusOr<Saved> saved = TrySave(model, snapshot, options);
  if (IsNewFailure(model, saved.status())) {
    LogFailedSave(model, snapshot, options.tracks, saved.status(), {});
  }
  return saved;
}

bool CheckpointManager::IsNewFailure(const Model& model, const absl::Status& status) {
  const std::string& name = model.config().name;
  absl::MutexLock lock(&mu_);
  // What is lost at the end is said in any case; of a model that has been deleted, nothing is.
  if (status.ok() || absl::IsNotFound(status) || is_stopping_) {
    asked_errors_.erase(name);
    return !status.ok();
  }
  absl::Status& last = asked_errors_[name];
  const bool is_new =
      last.code() != status.code() || GetErrorReason(last) != GetErrorReason(status);
  last = status;
  return is_new;
}

void CheckpointManager::LogFailedSave(const Model& model, const SnapshotRef& snapshot,
                                      const std::vector<std::string>& tracks,
                                      const absl::Status& status,
                                      const std::vector<LogField>& more) const {
  // Of a model that has been deleted, nothing is missing.
  if (absl::IsNotFound(status)) return;
  std::vector<LogField> fields;
  if (snapshot != nullptr) {
    fields = {{"step", snapshot->record.step},
              {"version", snapshot->record.number},
              {"checkpoint", CheckpointStore::NameOf(*snapshot, tracks)}};
  }
  fields.insert(fields.end(), more.begin(), more.end());
  if (const ErrorReason reason = GetErrorReason(status); reason != ErrorReason::kUnspecified) {
    fields.emplace_back("reason", ErrorReasonName(reason));
  }
  fields.emplace_back("error", status);
  Log(LogLevel::kError, kSaveFailed, model, std::move(fields));
}

absl::StatusOr<Checkpoints::Saved> CheckpointManager::TrySave(
    Model& model, const SnapshotRef& snapshot, const CheckpointStore::SaveOptions& options) {
  const Key key{model.config().name, CheckpointStore::NameOf(*snapshot, options.tracks)};
  {
    absl::MutexLock lock(&mu_);
    Saving& saving = saving_[key];
    if (saving.count++ == 0) saving.info = InfoOf(key.second, *snapshot, options.tracks);
  }
  const VersionId durable = model.durable().version();
  const absl::Time begin = absl::Now();
  const auto saved = CatchExceptions([&] { return store_->Save(model, snapshot, options); });
  const bool was_there = saved.ok() && !saved->was_written;
  // Not some tracks only, or what was there before: that puts no automatic save off.
  const bool is_newest = model.durable().version() > durable;
  // Of a model that is deleted meanwhile nobody asks; another may have its name by now.
  if (!was_there && !absl::IsNotFound(saved.status())) {
    options_.observer->OnSaveEnded({.model = key.first,
                                    .status = saved.status(),
                                    .duration = absl::Now() - begin,
                                    .is_newest = is_newest});
  }
  if (!was_there) NoteWritten(saved.status());
  if (is_newest) scheduler_->OnSaved(model);
  {
    absl::MutexLock lock(&mu_);
    NoteEndLocked(key, saved.status());
  }
  EMA_RETURN_IF_ERROR(saved.status());
  if (!was_there) {
    Log(LogLevel::kInfo, "checkpoint saved", model,
        {{"step", snapshot->record.step},
         {"version", snapshot->record.number},
         {"checkpoint", saved->name},
         {"bytes", saved->total_bytes},
         {"keep", options.keep}});
  }
  if (options.label.has_value()) {
    LogLabelSet(model, options.label->name, snapshot->record.number, snapshot->record.step);
  }
  return Saved{snapshot->record, saved->name, saved->total_bytes};
}

void CheckpointManager::NoteEndLocked(const Key& key, const absl::Status& status) {
  const auto it = saving_.find(key);
  std::deque<CheckpointInfo>& failed = failed_[key.first];
  std::erase_if(failed, [&](const CheckpointInfo& info) { return info.name == key.second; });
  // Of a model that has been deleted, nothing is missing.
  if (!status.ok() && !absl::IsNotFound(status)) {
    failed.push_back(it->second.info);
    failed.back().state = CheckpointInfo::State::kFailed;
    failed.back().problem = status.ToString(absl::StatusToStringMode::kWithNoExtraData);
    if (failed.size() > kMaxFailed) failed.pop_front();
  }
  if (failed.empty()) failed_.erase(key.first);
  if (--it->second.count == 0) saving_.erase(it);
}

absl::Status CheckpointManager::NotPinned(const Model& model, const VersionId& id,
                                          const absl::Status& status) {
  if (GetErrorReason(status) != ErrorReason::kVersionNotKept) return status;
  EMA_ASSIGN_OR_RETURN(const auto partial, FindStored(model, id, /*is_partial=*/true));
  if (!partial.has_value()) return status;
  return MakeError(status.code(), ErrorReason::kVersionNotKept,
                   absl::StrCat("model \"", model.config().name, "\": version ", id.version,
                                " is not in memory any more, and only a partial checkpoint of it "
                                "is on the disk, ",
                                partial->name));
}

absl::StatusOr<Checkpoints::Saved> CheckpointManager::Save(Model& model,
                                                           const SaveRequest& request) {
  if (!request.label.empty()) {
    EMA_RETURN_IF_ERROR(CheckLabel(model, request.label));
    if (!request.tracks.empty()) {
      return BadRequest(absl::StrCat("label: \"", request.label,
                                     "\" given together with tracks; only a checkpoint with all "
                                     "tracks can have one"));
    }
  }
  const absl::StatusOr<SnapshotRef> pinned =
      model.history().PinForSave(request.id.version, request.id.incarnation);
  if (!pinned.ok()) {
    EMA_RETURN_IF_ERROR(model.closed());
    EMA_ASSIGN_OR_RETURN(const auto stored, FindStored(model, request.id));
    if (!stored.has_value()) return NotPinned(model, request.id, pinned.status());
    if (!request.tracks.empty()) return pinned.status();
    EMA_RETURN_IF_ERROR(CheckIsDurable(model, stored->id.version_id(), stored->is_partial));
    EMA_ASSIGN_OR_RETURN(const auto held, store_->Hold(model.config().name, stored->name));
    if (held == nullptr) return NotKept(model, request.id);
    EMA_ASSIGN_OR_RETURN(const CheckpointManifest manifest, ReadManifest(model, *stored));
    if (!request.label.empty()) {
      EMA_RETURN_IF_ERROR(PutLabel(
          model,
          {.name = request.label, .id = manifest.record.id(), .step = manifest.record.step}));
    }
    return Saved{manifest.record, stored->name, manifest.total_bytes};
  }
  SaveRequest wanted = request;
  EMA_ASSIGN_OR_RETURN(wanted.tracks, ChooseTracks(model, **pinned, request.tracks));
  if (wanted.async) return Enqueue(model, *pinned, wanted);
  CheckpointStore::SaveOptions options{.tracks = wanted.tracks, .with_new_settings = true};
  if (!wanted.label.empty()) options.label = CheckpointLabel{.name = wanted.label};
  return SaveSnapshot(model, *pinned, options);
}

absl::StatusOr<Checkpoints::Saved> CheckpointManager::Enqueue(Model& model,
                                                              const SnapshotRef& snapshot,
                                                              const SaveRequest& request) {
  const Key key{model.config().name, CheckpointStore::NameOf(*snapshot, request.tracks)};
  Saved saved{
      .record = snapshot->record, .name = key.second, .state = CheckpointInfo::State::kSaving};
  if (request.label.empty()) {
    EMA_ASSIGN_OR_RETURN(const auto known, FindInfo(model, key.second));
    if (known.has_value() && known->state == CheckpointInfo::State::kComplete &&
        (!request.tracks.empty() ||
         !model.durable().HasOtherSettings(known->id, model.Describe().settings_revision)) &&
        known->problem.empty() && CheckIsDurable(model, known->id, known->is_partial).ok()) {
      saved.state = known->state;
      saved.total_bytes = known->total_bytes;
      return saved;
    }
  }
  absl::MutexLock lock(&mu_);
  if (is_stopping_) return DrainingError();
  EMA_RETURN_IF_ERROR(CheckMayWaitLocked(model, saved.record.id()));
  Saving& saving = saving_[key];
  if (!request.label.empty()) saving.labels.push_back(request.label);
  if (saving.is_queued) return saved;
  if (saving.count++ == 0) saving.info = InfoOf(key.second, *snapshot, request.tracks);
  saving.is_queued = true;
  saving.snapshot = snapshot;
  saving.model = model.shared_from_this();
  saving.tracks = request.tracks;
  queue_.push_back(key);
  wait_.WakeAll();
  return saved;
}

absl::Status CheckpointManager::CheckMayWaitLocked(const Model& model, const VersionId& id) const {
  std::set<VersionId> others;
  for (const auto& [key, saving] : saving_) {
    if (key.first == model.config().name && saving.info.id != id) others.insert(saving.info.id);
  }
  const int64_t limit = std::max<int64_t>(model.config().max_pinned_versions - 1, 1);
  if (static_cast<int64_t>(others.size()) < limit) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyPins,
      absl::StrCat("model \"", model.config().name, "\": ", others.size(),
                   " other versions are being saved, or wait for that; readers need what "
                   "max_pinned_versions allows besides"),
      absl::Seconds(1));
}

absl::Status CheckpointManager::SaveQueued(const Key& key, Model& model,
                                           const SnapshotRef& snapshot,
                                           const std::vector<std::string>& tracks) {
  CheckpointStore::SaveOptions options{.tracks = tracks, .with_new_settings = true};
  absl::Status status;
  bool is_new_failure = false;
  std::set<std::string> unset_labels;  // After an error: those that were asked for.
  // Once, and once more for each label; what is on the disk then is not written again.
  for (bool is_done = false; !is_done && status.ok();) {
    {
      absl::MutexLock lock(&mu_);
      std::vector<std::string>& labels = saving_[key].labels;
      options.label.reset();
      if (!labels.empty()) {
        options.label = CheckpointLabel{.name = labels.back()};
        labels.pop_back();
      }
    }
    {
      const Heartbeat::Work at_work(queue_heartbeat_);
      status = TrySave(model, snapshot, options).status();
    }
    is_new_failure = IsNewFailure(model, status);
    absl::MutexLock lock(&mu_);
    Saving& saving = saving_[key];
    is_done = saving.labels.empty();
    if (!is_done && status.ok()) continue;
    if (!status.ok()) {
      unset_labels.insert(saving.labels.begin(), saving.labels.end());
      if (options.label.has_value()) unset_labels.insert(options.label->name);
    }
    saving.is_queued = false;
    saving.labels.clear();
    saving.snapshot = nullptr;
    saving.model = nullptr;
  }
  const std::string unset = absl::StrJoin(unset_labels, ", ");
  // Who has asked for a label waits for no answer: that it is missing is said each time.
  if (is_new_failure || !unset.empty()) {
    std::vector<LogField> more;
    if (!unset.empty()) more.emplace_back("unset_labels", unset);
    LogFailedSave(model, snapshot, options.tracks, status, more);
  }
  return unset.empty() ? status : WithPlace(status, absl::StrCat("labels not set: ", unset, ": "));
}

void CheckpointManager::RunQueue() {
  const auto is_ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return is_stopping_ || !queue_.empty();
  };
  while (true) {
    Key key;
    std::shared_ptr<Model> model;
    SnapshotRef snapshot;
    std::vector<std::string> tracks;
    {
      absl::MutexLock lock(&mu_);
      if (wait_.AwaitUntil(mu_, After(SteadyNow(), options_.free_space_interval), is_ready)) {
        if (queue_.empty()) return;  // What was asked for is done.
        key = queue_.front();
        const Saving& saving = saving_[key];
        model = saving.model;
        snapshot = saving.snapshot;
        tracks = saving.tracks;
      }
    }
    if (model == nullptr) {
      const Heartbeat::Work at_work(queue_heartbeat_);
      NoteFreeSpace();
      LookWhetherWritable();
      continue;
    }
    const absl::Status status = SaveQueued(key, *model, snapshot, tracks);
    NoteFreeSpace();
    // Lets go of the version before it is said that nothing is waiting.
    snapshot = nullptr;
    model = nullptr;
    absl::MutexLock lock(&mu_);
    queue_.pop_front();
    NoteEndLocked(key, status);
  }
}

}  // namespace ema
