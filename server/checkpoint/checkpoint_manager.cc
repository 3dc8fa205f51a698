// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_manager.h"

#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/synthesis.h"

namespace ema {

absl::StatusOr<std::unique_ptr<CheckpointManager>> CheckpointManager::Open(FileSystem& file_system,
                                                                           Options options,
                                                                           absl::Time now) {
  options.store.log = options.log;
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<CheckpointStore> store,
                       CheckpointStore::Open(file_system, options.store, now));
  return std::unique_ptr<CheckpointManager>(
      new CheckpointManager(std::move(options), std::move(store)));
}

CheckpointManager::CheckpointManager(Options options, std::unique_ptr<CheckpointStore> store)
    : options_(std::move(options)),
      store_(std::move(store)),
      scheduler_heartbeat_(AddHeartbeat("checkpoint-scheduler")),
      queue_(store_->data(), options_.free_space_interval, AddHeartbeat("checkpoint-queue")),
      scrubber_(
          *store_, [this](Model& model) { return ContextOf(model); }, options_.log,
          AddHeartbeat("checkpoint-scrub")),
      scheduler_(SchedulerOptions()) {}

CheckpointScheduler::Options CheckpointManager::SchedulerOptions() {
  return {.policy = options_.policy,
          .save =
              [this](Model& model, const SnapshotRef& snapshot, bool keep) {
                const Heartbeat::Work at_work(scheduler_heartbeat_);
                return CheckpointsOf(model)->saver->TrySave(snapshot, {.keep = keep}).status();
              },
          .on_error =
              [this](Model& model, const SnapshotRef& snapshot, const absl::Status& status) {
                CheckpointsOf(model)->saver->LogFailure(snapshot, {}, status,
                                                        {{"automatic", true}, {"retry", true}});
                // TrySave() was not called, so the observer does not know.
                if (snapshot == nullptr) {
                  options_.observer->OnSaveEnded({.model = model.config().name, .status = status});
                }
              },
          .retry_delay = options_.retry_delay};
}

Heartbeat* CheckpointManager::AddHeartbeat(const char* name) const {
  if (options_.heartbeats == nullptr) return nullptr;
  return options_.heartbeats->Add(name, Heartbeats::NeededFor::kCheckpoints);
}

void CheckpointManager::Stop() {
  queue_.RequestStop();
  scrubber_.RequestStop();
  scheduler_.Stop();
  queue_.Stop();
  scrubber_.Stop();
}

std::shared_ptr<ModelCheckpoints> CheckpointManager::CheckpointsOf(Model& model) {
  absl::MutexLock lock(&mu_);
  // The caller holds `model`, so an entry of an earlier model at its address has expired.
  const auto found = models_.find(&model);
  if (found != models_.end() && !found->second->model.expired()) return found->second;
  std::erase_if(models_, [](const auto& entry) { return entry.second->model.expired(); });
  return models_[&model] = std::make_shared<ModelCheckpoints>(ContextOf(model));
}

ModelContext CheckpointManager::ContextOf(Model& model) {
  return {.model = model,
          .folder = store_->FolderOf(model.config().name),
          .data = store_->data(),
          .scheduler = scheduler_,
          .queue = queue_,
          .log = options_.log,
          .observer = *options_.observer};
}

absl::Status CheckpointManager::LoadAll(ModelStore& models) {
  EMA_ASSIGN_OR_RETURN(const LoadReport report, store_->LoadAll(models));
  LogReport(report);
  StartScrubbing(models);
  return absl::OkStatus();
}

void CheckpointManager::StartScrubbing(ModelStore& models) {
  if (options_.scrub_interval > absl::ZeroDuration()) {
    scrubber_.Start(models, options_.scrub_interval);
  }
}

void CheckpointManager::LogReport(const LoadReport& report) const {
  const auto log = [this](LogLevel level, std::string_view event, std::vector<LogField> fields) {
    LogTo(options_.log, level, event, std::move(fields));
  };
  for (const auto& [model, name] : report.abandoned) {
    log(LogLevel::kError, "checkpoint set aside",
        {{"model", model}, {"checkpoint", name}, {"error", "a crash left it newer than LATEST"}});
  }
  for (const LoadReport::Missing& missing : report.missing) {
    log(LogLevel::kError, "checkpoint missing",
        {{"model", missing.model},
         {"checkpoint", missing.checkpoint},
         {"loaded", missing.loaded.empty() ? "none" : missing.loaded},
         {"error", "LATEST names it, but the folder does not exist"}});
  }
  for (const LoadReport::Misnamed& misnamed : report.misnamed) {
    log(LogLevel::kWarning, "folder ignored",
        {{"model", misnamed.model},
         {"folder", misnamed.folder},
         {"expected", misnamed.expected},
         {"error", "it contains a manifest.json, but its name is not that of a checkpoint"}});
  }
  for (const auto& [model, label] : report.labels_without_checkpoint) {
    log(LogLevel::kWarning, "label without a checkpoint",
        {{"model", model},
         {"label", label.name},
         {"checkpoint", CheckpointName({label.id.incarnation, label.id.version, label.step})}});
  }
  for (const auto& [model, problem] : report.lost_labels) {
    log(LogLevel::kError, "labels lost", {{"model", model}, {"error", problem}});
  }
  for (const auto& [model, error] : report.all_corrupt) {
    log(LogLevel::kError, "model not loaded", {{"model", model}, {"error", error}});
  }
  for (const LoadReport::Loaded& loaded : report.loaded) {
    log(LogLevel::kInfo, "restored",
        {{"model", loaded.model},
         {"step", loaded.record.step},
         {"version", loaded.record.number},
         {"checkpoint", loaded.checkpoint},
         {"bytes", loaded.total_bytes}});
  }
}

absl::Status CheckpointManager::Drain(ModelStore& models) {
  Stop();
  absl::Status result;
  for (const std::shared_ptr<Model>& model : models.List()) {
    const SnapshotRef newest = model->history().newest();
    if (newest == nullptr || !model->is_home()) continue;
    const std::shared_ptr<ModelCheckpoints> checkpoints = CheckpointsOf(*model);
    ModelSaver& saver = *checkpoints->saver;
    ModelSaver::SaveOptions options = {.keep = IsKeepDue(*newest, model->durable().kept_time()),
                                       .with_new_settings = true};
    absl::Status saved = saver.TrySave(newest, options).status();
    // There may be room for one that is not kept for good.
    if (options.keep && GetErrorReason(saved) == ErrorReason::kDiskFull) {
      options.keep = false;
      saved = saver.TrySave(newest, options).status();
    }
    // Readers end soon.
    for (int i = 0; GetErrorReason(saved) == ErrorReason::kCheckpointInUse && i < 50; ++i) {
      absl::SleepFor(absl::Milliseconds(100));
      saved = saver.TrySave(newest, options).status();
    }
    // A model that was deleted meanwhile misses no checkpoint.
    if (saved.ok() || absl::IsNotFound(saved)) continue;
    saver.LogFailure(newest, {}, saved, {});
    result.Update(saved);
  }
  return result;
}

void CheckpointManager::AwaitIdle() {
  scheduler_.AwaitIdle();
  queue_.AwaitIdle();
}

std::map<std::string, CheckpointCounts> CheckpointManager::CountAll() {
  std::map<std::string, CheckpointCounts> counts = store_->CountAll();
  absl::MutexLock lock(&mu_);
  for (const auto& [model, checkpoints] : models_) {
    const auto failed_count = static_cast<int64_t>(checkpoints->saver->failed_count());
    if (failed_count > 0) counts[checkpoints->name].failed += failed_count;
  }
  return counts;
}

absl::Status CheckpointManager::Delete(Model& model, std::string_view name) {
  EMA_RETURN_IF_ERROR(model.CheckOpen());
  const ModelContext context = ContextOf(model);
  EMA_RETURN_IF_ERROR(context.folder.Delete(name, &model));
  context.Log(LogLevel::kInfo, "checkpoint deleted", {{"checkpoint", name}});
  return absl::OkStatus();
}

absl::StatusOr<Synthesis> CheckpointManager::Synthesize(Model& model,
                                                        const SynthesisRequest& request) {
  const absl::Time begin = absl::Now();
  const ModelContext context = ContextOf(model);
  const auto on_error = [&](const std::string& checkpoint, const absl::Status& status) {
    return StoredVersions(context).HandleReadError(checkpoint, status);
  };
  EMA_ASSIGN_OR_RETURN(Synthesis result, ema::Synthesize(context.folder, model, request, on_error));
  context.Log(LogLevel::kInfo, "average synthesized",
              {{"track", request.name},
               {"step", result.version.step},
               {"snapshots", result.sources.size()},
               {"residual", result.residual},
               {"seconds", absl::ToDoubleSeconds(absl::Now() - begin)}});
  return result;
}

absl::Status CheckpointManager::CheckMaySetAside() {
  const absl::Status status = store_->data().CheckWritable();
  // Renaming works on a full disk, and deleting makes room.
  return absl::IsResourceExhausted(status) ? absl::OkStatus() : status;
}

absl::Status CheckpointManager::SetAsideAll(std::string_view model_name) {
  {
    absl::MutexLock lock(&mu_);
    std::erase_if(models_, [&](const auto& entry) { return entry.second->name == model_name; });
  }
  return store_->DeleteModel(model_name);
}

}  // namespace ema
