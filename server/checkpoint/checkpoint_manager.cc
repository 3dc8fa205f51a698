// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_manager.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/restore.h"
#include "server/checkpoint/synthesis.h"
#include "server/format/json_fields.h"
#include "server/format/verify.h"

namespace ema {
namespace {

CheckpointInfo InfoOf(const CheckpointStore::Stored& stored) {
  CheckpointInfo info{
      .name = stored.name,
      .state =
          stored.problem.ok() ? CheckpointInfo::State::kComplete : CheckpointInfo::State::kCorrupt,
      .id = stored.id.version_id(),
      .step = stored.id.step,
      .is_partial = stored.is_partial,
      .problem = std::string((stored.problem.ok() ? stored.unread : stored.problem).message())};
  if (stored.details.has_value()) {
    info.commit_time = stored.details->commit_time;
    info.tracks = stored.details->tracks;
    info.total_bytes = stored.details->total_bytes;
  }
  return info;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointManager>> CheckpointManager::Open(FileSystem& file_system,
                                                                           Options options,
                                                                           absl::Time now) {
  options.store.on_read_only = [log = options.log](const std::string& why) {
    LogTo(log, LogLevel::kError, "checkpoints read-only", {{"error", why}});
  };
  options.store.on_set_aside = [log = options.log](const CheckpointStore::Quarantined& bad) {
    LogTo(log, LogLevel::kError, "checkpoint set aside",
          {{"model", bad.model}, {"checkpoint", bad.checkpoint}, {"error", bad.problem}});
  };
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<CheckpointStore> store,
                       CheckpointStore::Open(file_system, options.store, now));
  return std::unique_ptr<CheckpointManager>(
      new CheckpointManager(std::move(options), std::move(store)));
}

CheckpointManager::CheckpointManager(Options options, std::unique_ptr<CheckpointStore> store)
    : options_(std::move(options)),
      store_(std::move(store)),
      scheduler_heartbeat_(AddHeartbeat("checkpoint-scheduler")),
      queue_heartbeat_(AddHeartbeat("checkpoint-queue")),
      scrub_heartbeat_(AddHeartbeat("checkpoint-scrub")) {
  scheduler_ = std::make_unique<CheckpointScheduler>(CheckpointScheduler::Options{
      .policy = options_.policy,
      .save =
          [this](Model& model, const SnapshotRef& snapshot, bool keep) {
            const Heartbeat::Work at_work(scheduler_heartbeat_);
            return TrySave(model, snapshot, {.keep = keep}).status();
          },
      .on_error =
          [this](const Model& model, const SnapshotRef& snapshot, const absl::Status& status) {
            LogFailedSave(model, snapshot, {}, status, {{"automatic", true}, {"retry", true}});
            // It could not begin: TrySave() has not told of it.
            if (snapshot == nullptr) {
              options_.observer->OnSaveEnded({.model = model.config().name, .status = status});
            }
          },
      .retry_delay = options_.retry_delay});
  NoteFreeSpace();
  queue_thread_ = std::thread([this] { RunQueue(); });
}

CheckpointManager::~CheckpointManager() { Stop(); }

Heartbeat* CheckpointManager::AddHeartbeat(const char* name) const {
  if (options_.heartbeats == nullptr) return nullptr;
  return options_.heartbeats->Add(name, Heartbeats::Need::kCheckpoints);
}

void CheckpointManager::Stop() {
  {
    absl::MutexLock lock(&mu_);
    is_stopping_ = true;
    wait_.WakeAll();
  }
  scheduler_->Stop();
  if (queue_thread_.joinable()) queue_thread_.join();
  if (scrub_thread_.joinable()) scrub_thread_.join();
}

void CheckpointManager::Log(LogLevel level, std::string_view event, const Model& model,
                            std::vector<LogField> fields) const {
  fields.insert(fields.begin(), {"model", model.config().name});
  LogTo(options_.log, level, event, std::move(fields));
}

absl::Status CheckpointManager::LoadAll(ModelStore& models) {
  EMA_ASSIGN_OR_RETURN(const CheckpointStore::LoadReport report, store_->LoadAll(models));
  for (const auto& [model, name] : report.abandoned) {
    LogTo(options_.log, LogLevel::kError, "checkpoint set aside",
          {{"model", model},
           {"checkpoint", name},
           {"error", "a crash had left it newer than LATEST"}});
  }
  for (const CheckpointStore::LoadReport::Missing& missing : report.missing) {
    LogTo(options_.log, LogLevel::kError, "checkpoint missing",
          {{"model", missing.model},
           {"checkpoint", missing.checkpoint},
           {"loaded", missing.loaded.empty() ? "none" : missing.loaded},
           {"error", "LATEST names it, and there is no such folder"}});
  }
  for (const CheckpointStore::LoadReport::Misnamed& misnamed : report.misnamed) {
    LogTo(options_.log, LogLevel::kWarning, "folder passed over",
          {{"model", misnamed.model},
           {"folder", misnamed.folder},
           {"expected", misnamed.expected},
           {"error", "it has a manifest.json, and not the name of a checkpoint"}});
  }
  for (const auto& [model, label] : report.bare_labels) {
    LogTo(options_.log, LogLevel::kWarning, "label without a checkpoint",
          {{"model", model},
           {"label", label.name},
           {"checkpoint", CheckpointName({label.id.incarnation, label.id.version, label.step})}});
  }
  for (const auto& [model, problem] : report.lost_labels) {
    LogTo(options_.log, LogLevel::kError, "labels lost", {{"model", model}, {"error", problem}});
  }
  for (const auto& [model, error] : report.all_corrupt) {
    LogTo(options_.log, LogLevel::kError, "model not loaded", {{"model", model}, {"error", error}});
  }
  for (const CheckpointStore::Loaded& loaded : report.loaded) {
    LogTo(options_.log, LogLevel::kInfo, "restored",
          {{"model", loaded.model},
           {"step", loaded.record.step},
           {"version", loaded.record.number},
           {"checkpoint", loaded.checkpoint},
           {"bytes", loaded.total_bytes}});
  }
  models_ = &models;
  if (options_.scrub_interval > absl::ZeroDuration()) {
    const absl::Time now = absl::Now();
    const absl::StatusOr<absl::Time> before = store_->ReadScrubTime();
    if (absl::IsNotFound(before.status())) {
      NoteScrubTime(now);
    } else {
      absl::MutexLock lock(&mu_);
      scrub_time_ = std::min(before.value_or(now), now);
    }
    scrub_thread_ = std::thread([this] { RunScrub(); });
  }
  return absl::OkStatus();
}

absl::Status CheckpointManager::Drain(ModelStore& models) {
  Stop();
  absl::Status result;
  for (const std::shared_ptr<Model>& model : models.List()) {
    const SnapshotRef newest = model->history().newest();
    if (newest == nullptr) continue;
    CheckpointStore::SaveOptions save = {.keep = IsKeepDue(*newest, model->durable().kept_time()),
                                         .with_new_settings = true};
    absl::Status saved = TrySave(*model, newest, save).status();
    // There may still be room for one that is not kept.
    if (save.keep && GetErrorReason(saved) == ErrorReason::kDiskFull) {
      save.keep = false;
      saved = TrySave(*model, newest, save).status();
    }
    // Readers that are still there go.
    for (int i = 0; GetErrorReason(saved) == ErrorReason::kCheckpointInUse && i < 50; ++i) {
      absl::SleepFor(absl::Milliseconds(100));
      saved = TrySave(*model, newest, save).status();
    }
    // One that has been deleted meanwhile misses nothing.
    if (saved.ok() || absl::IsNotFound(saved)) continue;
    LogFailedSave(*model, newest, {}, saved, {});
    result.Update(saved);
  }
  return result;
}

// --- The disk's free space and health ---

void CheckpointManager::NoteFreeSpace() {
  if (options_.free_space_interval == absl::InfiniteDuration()) return;
  const absl::StatusOr<int64_t> bytes = store_->FreeBytes();
  absl::MutexLock lock(&mu_);
  free_bytes_ = bytes.ok() ? std::optional(*bytes) : std::nullopt;
}

void CheckpointManager::NoteWritten(const absl::Status& status) {
  const bool is_unwritable =
      GetErrorReason(status) == ErrorReason::kStoreReadOnly && store_->health().ok();
  {
    absl::MutexLock lock(&mu_);
    // Any other error says nothing of the disk as a whole.
    if (!status.ok() && !is_unwritable) return;
    if (unwritable_.ok() == status.ok()) return;
    unwritable_ = status;
  }
  if (is_unwritable) {
    LogTo(options_.log, LogLevel::kError, "checkpoints read-only", {{"error", status}});
  } else {
    LogTo(options_.log, LogLevel::kInfo, "checkpoints writable again", {});
  }
}

void CheckpointManager::LookWhetherWritable() {
  {
    absl::MutexLock lock(&mu_);
    if (unwritable_.ok()) return;
  }
  NoteWritten(store_->CheckWritable());
}

absl::Status CheckpointManager::health() const {
  EMA_RETURN_IF_ERROR(store_->health());
  absl::MutexLock lock(&mu_);
  return unwritable_;
}

void CheckpointManager::AwaitIdle() {
  scheduler_->AwaitIdle();
  const auto is_idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return queue_.empty(); };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&is_idle));
}

// --- What there is ---

std::optional<int64_t> CheckpointManager::free_bytes() {
  absl::MutexLock lock(&mu_);
  return free_bytes_;
}

std::map<std::string, CheckpointCounts> CheckpointManager::CountAll() {
  std::map<std::string, CheckpointCounts> counts = store_->CountAll();
  absl::MutexLock lock(&mu_);
  for (const auto& [model, failed] : failed_) counts[model].failed = std::ssize(failed);
  return counts;
}

absl::StatusOr<std::vector<CheckpointStore::Stored>> CheckpointManager::ListStored(
    Model& model, std::optional<std::string_view> name) {
  const std::string& model_name = model.config().name;
  EMA_ASSIGN_OR_RETURN(std::vector<CheckpointStore::Stored> stored, store_->List(model_name, name));
  bool is_any_bad = false;
  for (const CheckpointStore::Stored& checkpoint : stored) {
    if (!absl::IsDataLoss(checkpoint.unread)) continue;
    StoredError(model, checkpoint.name, checkpoint.unread).IgnoreError();
    is_any_bad = true;
  }
  if (!is_any_bad) return stored;
  return store_->List(model_name, name);  // By their new names.
}

absl::StatusOr<Checkpoints::Listing> CheckpointManager::List(Model& model,
                                                             std::optional<std::string_view> only) {
  const std::string& model_name = model.config().name;
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointStore::Stored> stored, ListStored(model, only));
  const auto is_asked = [&](std::string_view of) { return !only.has_value() || of == *only; };
  Listing listing;
  EMA_ASSIGN_OR_RETURN(listing.labels, store_->Labels(model_name));
  std::map<std::string, CheckpointInfo> by_name;
  for (const CheckpointStore::Stored& checkpoint : stored) {
    by_name[checkpoint.name] = InfoOf(checkpoint);
  }
  const VersionId durable = model.durable().version();
  const bool is_healthy = store_->health().ok();
  {
    absl::MutexLock lock(&mu_);
    if (const auto failed = failed_.find(model_name); failed != failed_.end()) {
      for (const CheckpointInfo& info : failed->second) {
        if (!is_asked(info.name)) continue;
        const auto [it, is_new] = by_name.emplace(info.name, info);
        if (is_new) continue;
        // It has got its name, but a restart may not find it.
        if (info.is_partial ? !is_healthy : info.id > durable) {
          it->second.state = CheckpointInfo::State::kFailed;
          it->second.problem = info.problem;
        }
        // It is there, but what was asked for with it is not, such as a label.
        if (it->second.problem.empty()) it->second.problem = info.problem;
      }
    }
    for (const auto& [key, saving] : saving_) {
      if (key.first == model_name && is_asked(key.second)) by_name[key.second] = saving.info;
    }
  }
  for (auto& [name, info] : by_name) {
    for (const CheckpointLabel& label : listing.labels) {
      if (label.id == info.id && !info.is_partial) info.labels.push_back(label.name);
    }
    listing.checkpoints.push_back(std::move(info));
  }
  std::stable_sort(listing.checkpoints.begin(), listing.checkpoints.end(),
                   [](const auto& a, const auto& b) { return a.id > b.id; });
  return listing;
}

absl::StatusOr<std::optional<CheckpointInfo>> CheckpointManager::FindInfo(Model& model,
                                                                          std::string_view name) {
  EMA_ASSIGN_OR_RETURN(Listing listing, List(model, name));
  if (listing.checkpoints.empty()) return std::optional<CheckpointInfo>();
  return std::optional(std::move(listing.checkpoints[0]));
}

absl::StatusOr<CheckpointInfo> CheckpointManager::Get(Model& model, std::string_view name) {
  EMA_ASSIGN_OR_RETURN(std::optional<CheckpointInfo> info, FindInfo(model, name));
  if (info.has_value()) return *std::move(info);
  return MakeError(absl::StatusCode::kNotFound, ErrorReason::kCheckpointNotFound,
                   absl::StrCat("model \"", model.config().name, "\" has no checkpoint \"",
                                std::string(name), "\""));
}

absl::Status CheckpointManager::Delete(Model& model, std::string_view name) {
  EMA_RETURN_IF_ERROR(model.closed());
  EMA_RETURN_IF_ERROR(store_->Delete(model.config().name, name));
  Log(LogLevel::kInfo, "checkpoint deleted", model, {{"checkpoint", name}});
  return absl::OkStatus();
}

absl::Status CheckpointManager::CheckMayForget() {
  const absl::Status status = store_->CheckWritable();
  NoteWritten(status);
  // On a full disk names can be changed, and deleting makes room.
  return absl::IsResourceExhausted(status) ? absl::OkStatus() : status;
}

absl::Status CheckpointManager::Forget(std::string_view model_name) {
  {
    absl::MutexLock lock(&mu_);
    if (const auto it = failed_.find(model_name); it != failed_.end()) failed_.erase(it);
    if (const auto it = asked_errors_.find(model_name); it != asked_errors_.end()) {
      asked_errors_.erase(it);
    }
  }
  return store_->DeleteModel(model_name);
}

absl::StatusOr<std::optional<CheckpointStore::Stored>> CheckpointManager::FindStored(
    const Model& model, const VersionId& id, bool is_partial) {
  EMA_ASSIGN_OR_RETURN(std::vector<CheckpointStore::Stored> all,
                       store_->ListNames(model.config().name));
  for (CheckpointStore::Stored& stored : all) {
    if (stored.problem.ok() && stored.is_partial == is_partial &&
        id.Names(stored.id.version_id())) {
      return std::optional(std::move(stored));
    }
  }
  return std::optional<CheckpointStore::Stored>();
}

absl::Status CheckpointManager::CheckIsDurable(const Model& model, const VersionId& id,
                                               bool is_partial) const {
  EMA_RETURN_IF_ERROR(store_->health());
  if (is_partial || id <= model.durable().version()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("model \"", model.config().name,
                                             "\": the save of version ", id.version,
                                             " has not ended, or has failed"));
}

absl::StatusOr<CheckpointManifest> CheckpointManager::CheckIsOf(
    const Model& model, const CheckpointStore::Stored& stored, CheckpointManifest checkpoint) {
  EMA_RETURN_IF_ERROR(CheckIdentity(checkpoint, model.config().name, stored.id, stored.is_partial));
  if (checkpoint.manifest != model.manifest()) {
    return CorruptManifest(absl::StrCat("it is of other tensors: ",
                                        checkpoint.manifest.DifferenceFrom(model.manifest())));
  }
  return checkpoint;
}

absl::StatusOr<CheckpointManifest> CheckpointManager::ReadManifest(
    Model& model, const CheckpointStore::Stored& stored) {
  absl::StatusOr<CheckpointManifest> checkpoint =
      ReadCheckpointManifest(store_->file_system(), store_->Path(model.config().name, stored.name));
  if (checkpoint.ok()) checkpoint = CheckIsOf(model, stored, *std::move(checkpoint));
  if (checkpoint.ok()) return checkpoint;
  return StoredError(model, stored.name, checkpoint.status());
}

absl::StatusOr<std::vector<KnownVersion>> CheckpointManager::OnDisk(const Model& model,
                                                                    bool with_partial) {
  EMA_ASSIGN_OR_RETURN(const std::vector<CheckpointStore::Stored> stored,
                       store_->ListNames(model.config().name));
  std::vector<KnownVersion> on_disk;
  for (const CheckpointStore::Stored& checkpoint : stored) {
    if (!checkpoint.problem.ok() || (checkpoint.is_partial && !with_partial)) continue;
    on_disk.push_back(
        {.id = checkpoint.id.version_id(), .step = checkpoint.id.step, .can_restore = true});
  }
  return on_disk;
}

absl::StatusOr<std::vector<KnownVersion>> CheckpointManager::Known(const Model& model) {
  EMA_ASSIGN_OR_RETURN(const std::vector<KnownVersion> on_disk,
                       OnDisk(model, /*with_partial=*/false));
  return KnownVersions(model.history(), on_disk);
}

absl::Status CheckpointManager::NotKept(const Model& model, const VersionId& id) {
  EMA_ASSIGN_OR_RETURN(const std::vector<KnownVersion> known, Known(model));
  int64_t step = 0;
  if (const std::optional<Version> latest = model.history().latest()) step = latest->step;
  return MakeError(
      absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
      absl::StrCat("model \"", model.config().name, "\": version ", id.version,
                   id.incarnation == 0 ? "" : absl::StrCat(" of incarnation ", id.incarnation),
                   " is neither in memory nor on the disk; there are ", ListNearest(known, step)));
}

absl::StatusOr<Synthesis> CheckpointManager::Synthesize(Model& model,
                                                        const SynthesisRequest& request) {
  const absl::Time begin = absl::Now();
  const auto on_error = [&](const std::string& checkpoint, const absl::Status& status) {
    return StoredError(model, checkpoint, status);
  };
  EMA_ASSIGN_OR_RETURN(Synthesis result, ema::Synthesize(*store_, model, request, on_error));
  Log(LogLevel::kInfo, "average synthesized", model,
      {{"track", request.name},
       {"step", result.record.step},
       {"snapshots", result.sources.size()},
       {"residual", result.residual},
       {"seconds", absl::ToDoubleSeconds(absl::Now() - begin)}});
  return result;
}

}  // namespace ema
