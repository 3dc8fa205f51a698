// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/model_saver.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/core/model_store.h"

namespace ema {
namespace {

constexpr size_t kMaxFailed = 64;

CheckpointInfo InfoOf(const CheckpointEntry& entry) {
  CheckpointInfo info{
      .name = entry.name,
      .state =
          entry.problem.ok() ? CheckpointInfo::State::kComplete : CheckpointInfo::State::kCorrupt,
      .id = entry.id.version_id(),
      .step = entry.id.step,
      .is_partial = entry.is_partial,
      .problem = std::string((entry.problem.ok() ? entry.read_error : entry.problem).message())};
  if (entry.details.has_value()) {
    info.commit_time = entry.details->commit_time;
    info.tracks = entry.details->tracks;
    info.total_bytes = entry.details->total_bytes;
  }
  return info;
}

// Of a version that is to be saved under `name`.
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

// The requested tracks, sorted and each once; empty: all that the snapshot has.
absl::StatusOr<std::vector<std::string>> ChooseTracks(const Model& model, const Snapshot& snapshot,
                                                      const std::vector<std::string>& requested) {
  const std::set<std::string> names(requested.begin(), requested.end());
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

// --- Saving ---

absl::StatusOr<ModelSaver::Saved> ModelSaver::Save(const Checkpoints::SaveRequest& request) {
  if (!request.label.empty()) {
    EMA_RETURN_IF_ERROR(versions_.CheckLabel(request.label));
    if (!request.tracks.empty()) {
      return BadRequest(absl::StrCat("label: \"", request.label,
                                     "\" given together with tracks; only a checkpoint with all "
                                     "tracks can have one"));
    }
  }
  const absl::StatusOr<SnapshotRef> pinned =
      context_.model.history().PinForSave(request.id.version, request.id.incarnation);
  if (!pinned.ok()) return FindSaved(request, pinned.status());
  Checkpoints::SaveRequest chosen = request;
  EMA_ASSIGN_OR_RETURN(chosen.tracks, ChooseTracks(context_.model, **pinned, request.tracks));
  if (chosen.async) return Enqueue(*pinned, chosen);
  SaveOptions options{.tracks = chosen.tracks, .with_new_settings = true};
  if (!chosen.label.empty()) options.label = CheckpointLabel{.name = chosen.label};
  return SaveSnapshot(*pinned, options);
}

absl::StatusOr<ModelSaver::Saved> ModelSaver::FindSaved(const Checkpoints::SaveRequest& request,
                                                        const absl::Status& not_pinned) const {
  EMA_RETURN_IF_ERROR(context_.model.CheckOpen());
  EMA_ASSIGN_OR_RETURN(const auto stored, versions_.Find(request.id));
  if (!stored.has_value()) return NotPinnedError(request.id, not_pinned);
  if (!request.tracks.empty()) return not_pinned;
  EMA_RETURN_IF_ERROR(versions_.CheckIsDurable(stored->id.version_id(), stored->is_partial));
  EMA_ASSIGN_OR_RETURN(const auto held, context_.folder.Hold(stored->name));
  if (held == nullptr) return versions_.VersionNotKeptError(request.id);
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest manifest, versions_.ReadManifest(*stored));
  if (!request.label.empty()) {
    EMA_RETURN_IF_ERROR(PutLabel(
        {.name = request.label, .id = manifest.record.id(), .step = manifest.record.step}));
  }
  return Saved{manifest.record, stored->name, manifest.total_bytes};
}

absl::Status ModelSaver::NotPinnedError(const VersionId& id, const absl::Status& status) const {
  if (GetErrorReason(status) != ErrorReason::kVersionNotKept) return status;
  EMA_ASSIGN_OR_RETURN(const auto partial, versions_.Find(id, /*is_partial=*/true));
  if (!partial.has_value()) return status;
  return MakeError(
      status.code(), ErrorReason::kVersionNotKept,
      absl::StrCat("model \"", context_.name(), "\": version ", id.version,
                   " is no longer in memory, and only a partial checkpoint of it is on the disk, ",
                   partial->name));
}

absl::StatusOr<ModelSaver::Saved> ModelSaver::SaveSnapshot(const SnapshotRef& snapshot,
                                                           const SaveOptions& options) {
  absl::StatusOr<Saved> saved = TrySave(snapshot, options);
  if (IsNewFailure(saved.status())) LogFailure(snapshot, options.tracks, saved.status(), {});
  return saved;
}

absl::StatusOr<ModelSaver::Saved> ModelSaver::TrySave(const SnapshotRef& snapshot,
                                                      const SaveOptions& options) {
  Model& model = context_.model;
  const std::string name = CheckpointFolder::NameOf(*snapshot, options.tracks);
  {
    absl::MutexLock lock(&mu_);
    Saving& saving = saving_[name];
    if (saving.count++ == 0) saving.info = InfoOf(name, *snapshot, options.tracks);
  }
  const VersionId durable = model.durable().version();
  const absl::Time begin = absl::Now();
  const auto saved =
      CatchExceptions([&] { return context_.folder.Save(model, snapshot, options); });
  const bool was_there = saved.ok() && !saved->was_written;
  // A partial save, or one that wrote nothing, does not postpone an automatic one.
  const bool is_newest = model.durable().version() > durable;
  // A model that was deleted meanwhile is not reported: another may have its name by now.
  if (!was_there && !absl::IsNotFound(saved.status())) {
    context_.observer.OnSaveEnded({.model = context_.name(),
                                   .status = saved.status(),
                                   .duration = absl::Now() - begin,
                                   .is_newest = is_newest});
  }
  if (!was_there) context_.data.NoteWritten(saved.status());
  if (is_newest) context_.scheduler.OnSaved(model);
  {
    absl::MutexLock lock(&mu_);
    NoteEndLocked(name, saved.status());
  }
  EMA_RETURN_IF_ERROR(saved.status());
  if (!was_there) {
    context_.Log(LogLevel::kInfo, "checkpoint saved",
                 {{"step", snapshot->record.step},
                  {"version", snapshot->record.number},
                  {"checkpoint", saved->name},
                  {"bytes", saved->total_bytes},
                  {"keep", options.keep}});
  }
  if (options.label.has_value()) {
    LogLabel(options.label->name, snapshot->record.number, snapshot->record.step);
  }
  return Saved{snapshot->record, saved->name, saved->total_bytes};
}

void ModelSaver::NoteEndLocked(const std::string& name, const absl::Status& status) {
  const auto it = saving_.find(name);
  std::erase_if(failed_, [&](const CheckpointInfo& info) { return info.name == name; });
  // A model that has been deleted misses no checkpoint.
  if (!status.ok() && !absl::IsNotFound(status)) {
    failed_.push_back(it->second.info);
    failed_.back().state = CheckpointInfo::State::kFailed;
    failed_.back().problem = status.ToString(absl::StatusToStringMode::kWithNoExtraData);
    if (failed_.size() > kMaxFailed) failed_.pop_front();
  }
  if (--it->second.count == 0) saving_.erase(it);
}

bool ModelSaver::IsNewFailure(const absl::Status& status) {
  // The end of the server logs every failure; a deleted model has none.
  const bool is_stopping = context_.queue.is_stopping();
  absl::MutexLock lock(&mu_);
  if (status.ok() || absl::IsNotFound(status) || is_stopping) {
    last_requested_error_ = absl::OkStatus();
    return !status.ok();
  }
  const bool is_new = last_requested_error_.code() != status.code() ||
                      GetErrorReason(last_requested_error_) != GetErrorReason(status);
  last_requested_error_ = status;
  return is_new;
}

void ModelSaver::LogFailure(const SnapshotRef& snapshot, const std::vector<std::string>& tracks,
                            const absl::Status& status, const std::vector<LogField>& more) const {
  if (absl::IsNotFound(status)) return;  // The model has been deleted.
  std::vector<LogField> fields;
  if (snapshot != nullptr) {
    fields = {{"step", snapshot->record.step},
              {"version", snapshot->record.number},
              {"checkpoint", CheckpointFolder::NameOf(*snapshot, tracks)}};
  }
  fields.insert(fields.end(), more.begin(), more.end());
  if (const ErrorReason reason = GetErrorReason(status); reason != ErrorReason::kUnspecified) {
    fields.emplace_back("reason", ErrorReasonName(reason));
  }
  fields.emplace_back("error", status);
  context_.Log(LogLevel::kError, kSaveFailed, std::move(fields));
}

absl::Status ModelSaver::PutLabel(const CheckpointLabel& label) const {
  EMA_RETURN_IF_ERROR(context_.folder.PutLabel(label));
  LogLabel(label.name, label.id.version, label.step);
  return absl::OkStatus();
}

void ModelSaver::LogLabel(std::string_view label, int64_t version, int64_t step) const {
  context_.Log(LogLevel::kInfo, "label set",
               {{"label", label}, {"version", version}, {"step", step}});
}

// --- Queued saves ---

absl::StatusOr<ModelSaver::Saved> ModelSaver::Enqueue(const SnapshotRef& snapshot,
                                                      const Checkpoints::SaveRequest& request) {
  const std::string name = CheckpointFolder::NameOf(*snapshot, request.tracks);
  Saved saved{.record = snapshot->record, .name = name, .state = CheckpointInfo::State::kSaving};
  if (request.label.empty()) {
    EMA_ASSIGN_OR_RETURN(const CheckpointList known, List(name));
    const CheckpointInfo* const info =
        known.checkpoints.empty() ? nullptr : &known.checkpoints.front();
    if (info != nullptr && info->state == CheckpointInfo::State::kComplete &&
        (!request.tracks.empty() || !context_.model.durable().HasOtherSettings(
                                        info->id, context_.model.Describe().settings_revision)) &&
        info->problem.empty() && versions_.CheckIsDurable(info->id, info->is_partial).ok()) {
      saved.state = info->state;
      saved.total_bytes = info->total_bytes;
      return saved;
    }
  }
  absl::MutexLock lock(&mu_);
  if (context_.queue.is_stopping()) return DrainingError();
  EMA_RETURN_IF_ERROR(CheckMayWaitLocked(saved.record.id()));
  if (const auto it = saving_.find(name); it == saving_.end() || !it->second.is_queued) {
    if (!context_.queue.Push([self = shared_from_this(), model = context_.model.shared_from_this(),
                              name, snapshot = SnapshotRef(snapshot),
                              tracks = request.tracks]() mutable {
          self->SaveQueued(name, std::move(snapshot), tracks);
        })) {
      return DrainingError();
    }
  }
  Saving& saving = saving_[name];
  if (!request.label.empty()) saving.labels.push_back(request.label);
  if (std::exchange(saving.is_queued, true)) return saved;
  if (saving.count++ == 0) saving.info = InfoOf(name, *snapshot, request.tracks);
  return saved;
}

absl::Status ModelSaver::CheckMayWaitLocked(const VersionId& id) const {
  std::set<VersionId> others;
  for (const auto& [name, saving] : saving_) {
    if (saving.info.id != id) others.insert(saving.info.id);
  }
  const int64_t limit = std::max<int64_t>(context_.model.config().max_pinned_versions - 1, 1);
  if (static_cast<int64_t>(others.size()) < limit) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyPins,
                   absl::StrCat("model \"", context_.name(), "\": ", others.size(),
                                " other versions are being saved or wait to be saved; the rest of "
                                "max_pinned_versions is left to readers"),
                   absl::Seconds(1));
}

void ModelSaver::SaveQueued(const std::string& name, SnapshotRef snapshot,
                            const std::vector<std::string>& tracks) {
  SaveOptions options{.tracks = tracks, .with_new_settings = true};
  absl::Status status;
  bool is_new_failure = false;
  std::set<std::string> unset_labels;  // After an error: the requested ones that are not set.
  // Saves once for each label, which may arrive meanwhile, and at least once. Only the first save
  // writes the checkpoint.
  for (bool is_done = false; !is_done && status.ok();) {
    {
      absl::MutexLock lock(&mu_);
      std::vector<std::string>& labels = saving_[name].labels;
      options.label.reset();
      if (!labels.empty()) {
        options.label = CheckpointLabel{.name = labels.back()};
        labels.pop_back();
      }
    }
    status = TrySave(snapshot, options).status();
    is_new_failure = IsNewFailure(status);
    absl::MutexLock lock(&mu_);
    Saving& saving = saving_[name];
    is_done = saving.labels.empty();
    if (!is_done && status.ok()) continue;
    if (!status.ok()) {
      unset_labels.insert(saving.labels.begin(), saving.labels.end());
      if (options.label.has_value()) unset_labels.insert(options.label->name);
    }
    saving.is_queued = false;
    saving.labels.clear();
  }
  const std::string unset = absl::StrJoin(unset_labels, ", ");
  // The caller who asked for a label has no answer, so a missing label is always logged.
  if (is_new_failure || !unset.empty()) {
    std::vector<LogField> more;
    if (!unset.empty()) more.emplace_back("unset_labels", unset);
    LogFailure(snapshot, options.tracks, status, more);
  }
  if (!unset.empty()) status = WithPrefix(status, absl::StrCat("labels not set: ", unset, ": "));
  snapshot = nullptr;  // The version is free once its record is gone.
  absl::MutexLock lock(&mu_);
  NoteEndLocked(name, status);
}

// --- Listing ---

absl::StatusOr<CheckpointList> ModelSaver::List(std::optional<std::string_view> name) const {
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> stored, versions_.List(name));
  const auto is_wanted = [&](std::string_view other) {
    return !name.has_value() || other == *name;
  };
  CheckpointList listing;
  EMA_ASSIGN_OR_RETURN(listing.labels, context_.folder.Labels());
  std::map<std::string, CheckpointInfo> by_name;
  for (const CheckpointEntry& entry : stored) by_name[entry.name] = InfoOf(entry);
  const VersionId durable = context_.model.durable().version();
  const bool is_healthy = context_.data.sync_error().ok();
  {
    absl::MutexLock lock(&mu_);
    for (const CheckpointInfo& info : failed_) {
      if (!is_wanted(info.name)) continue;
      const auto [it, is_new] = by_name.emplace(info.name, info);
      if (is_new) continue;
      // It has its name, but a restart may not find it.
      if (info.is_partial ? !is_healthy : info.id > durable) {
        it->second.state = CheckpointInfo::State::kFailed;
        it->second.problem = info.problem;
      }
      // It is there, but something else failed, such as its label.
      if (it->second.problem.empty()) it->second.problem = info.problem;
    }
    for (const auto& [saving_name, saving] : saving_) {
      if (is_wanted(saving_name)) by_name[saving_name] = saving.info;
    }
  }
  for (auto& [info_name, info] : by_name) {
    for (const CheckpointLabel& label : listing.labels) {
      if (label.id == info.id && !info.is_partial) info.labels.push_back(label.name);
    }
    listing.checkpoints.push_back(std::move(info));
  }
  std::stable_sort(listing.checkpoints.begin(), listing.checkpoints.end(),
                   [](const auto& a, const auto& b) { return a.id > b.id; });
  return listing;
}

absl::StatusOr<CheckpointInfo> ModelSaver::Get(std::string_view name) const {
  EMA_ASSIGN_OR_RETURN(const CheckpointList listing, List(name));
  if (!listing.checkpoints.empty()) return listing.checkpoints.front();
  return MakeError(absl::StatusCode::kNotFound, ErrorReason::kCheckpointNotFound,
                   absl::StrCat("model \"", context_.name(), "\" has no checkpoint \"",
                                std::string(name), "\""));
}

size_t ModelSaver::failed_count() const {
  absl::MutexLock lock(&mu_);
  return failed_.size();
}

}  // namespace ema
