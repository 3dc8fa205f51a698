// SPDX-License-Identifier: Apache-2.0
//
// The checkpoints of a server with a data directory.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_MANAGER_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_MANAGER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/heartbeat.h"
#include "server/base/log_event.h"
#include "server/base/observer.h"
#include "server/checkpoint/checkpoint_scheduler.h"
#include "server/checkpoint/checkpoint_scrubber.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/model_labels.h"
#include "server/checkpoint/model_rollback.h"
#include "server/checkpoint/model_saver.h"
#include "server/checkpoint/save_queue.h"
#include "server/checkpoint/stored_versions.h"
#include "server/core/checkpoints.h"
#include "server/core/model.h"
#include "server/core/model_store.h"
#include "server/format/file_system.h"

namespace ema {

// The objects for the checkpoints of one model, for as long as the model lives: if it is deleted
// and created again, the new one gets new ones.
struct ModelCheckpoints {
  explicit ModelCheckpoints(const ModelContext& context)
      : model(context.model.weak_from_this()),
        name(context.name()),
        versions(context),
        saver(std::make_shared<ModelSaver>(context)),
        labels(context, *saver),
        rollback(context, *saver) {}

  const std::weak_ptr<Model> model;
  const std::string name;
  const StoredVersions versions;
  const std::shared_ptr<ModelSaver> saver;  // Its queued saves share it.
  ModelLabels labels;
  const ModelRollback rollback;
};

// Passes each call to the ModelCheckpoints of its model, and owns what all models share: the store,
// and the threads that save and scrub.
//
// Thread-safe.
class CheckpointManager final : public Checkpoints {
 public:
  struct Options {
    CheckpointStore::Options store;
    SavePolicy policy;
    // Delay before a failed automatic save is retried.
    absl::Duration retry_delay = absl::Seconds(10);
    // Interval at which every checkpoint is re-read, to find bytes that have gone bad. Zero: never.
    absl::Duration scrub_interval = absl::ZeroDuration();
    // Interval at which the disk's free space is read and, after a failed write, it is checked
    // whether the disk is writable again. Infinite: never.
    absl::Duration free_space_interval = absl::InfiniteDuration();
    LogSink log;
    // Called when saves have ended. Outlives the manager.
    ServerObserver* observer = &ServerObserver::None();
    // For the threads that save and scrub. Outlives the manager. May be null.
    Heartbeats* heartbeats = nullptr;
  };
  using ScrubReport = CheckpointScrubber::Report;

  static constexpr std::string_view kSaveFailed = ModelSaver::kSaveFailed;

  // Errors: CheckpointStore::Open().
  static absl::StatusOr<std::unique_ptr<CheckpointManager>> Open(FileSystem& file_system,
                                                                 Options options,
                                                                 absl::Time now = absl::Now());
  // Waits for the running save and the queued ones. REQUIRES: no call is running.
  ~CheckpointManager() override { Stop(); }

  int64_t incarnation() const { return store_->data().incarnation(); }
  // For models on several servers, whose partitions are written and loaded by the group layer.
  CheckpointStore& store() { return *store_; }

  // CheckpointStore::LoadAll(), with its report in the log; then starts to scrub. `models` outlives
  // this. To be called once.
  absl::Status LoadAll(ModelStore& models);
  // In place of LoadAll() in a group, whose registry says what each server loads: starts to scrub
  // the checkpoints of the models whose home this server is.
  void StartScrubbing(ModelStore& models);

  // None of these blocks on the disk.
  std::optional<int64_t> free_bytes() { return store_->data().free_bytes(); }
  std::map<std::string, CheckpointCounts> CountAll() ABSL_LOCKS_EXCLUDED(mu_);
  std::optional<absl::Time> scrub_time() { return scrubber_.time(); }

  // Model::Options::on_commit. Never waits for the disk.
  void OnCommit(const std::shared_ptr<Model>& model, const Snapshot& snapshot) {
    scheduler_.OnCommit(model, snapshot);
  }

  // Stops automatic saves and scrubs, waits for queued saves, and saves the newest version of every
  // model whose home this server is. Returns the first error, after trying all models. REQUIRES:
  // ModelStore::Drain() has returned. To be called once.
  absl::Status Drain(ModelStore& models);

  // Waits until queued saves have ended and nothing is due. For tests.
  void AwaitIdle();
  ScrubReport Scrub(ModelStore& models) { return scrubber_.Scrub(models); }

  // --- Checkpoints ---

  absl::StatusOr<Saved> Save(Model& model, const SaveRequest& request) override {
    return CheckpointsOf(model)->saver->Save(request);
  }
  absl::StatusOr<CheckpointInfo> Get(Model& model, std::string_view name) override {
    return CheckpointsOf(model)->saver->Get(name);
  }
  absl::StatusOr<CheckpointList> List(Model& model) override {
    return CheckpointsOf(model)->saver->List(std::nullopt);
  }
  absl::Status Delete(Model& model, std::string_view name) override;
  absl::StatusOr<Version> Restore(Model& model, const VersionId& id,
                                  std::string_view label) override {
    return CheckpointsOf(model)->rollback.Restore(id, label);
  }
  absl::StatusOr<std::optional<VersionId>> Resume(Model& model, const Launch& launch,
                                                  const ResumePoint& point) override {
    return CheckpointsOf(model)->rollback.Resume(launch, point);
  }
  absl::StatusOr<CheckpointLabel> SetLabel(Model& model, const std::string& label,
                                           const VersionId& id) override {
    return CheckpointsOf(model)->labels.Set(label, id);
  }
  absl::Status RemoveLabel(Model& model, const std::string& label) override {
    return CheckpointsOf(model)->labels.Remove(label);
  }
  absl::StatusOr<MetricResult> ReportMetric(Model& model, const CheckpointLabel& score) override {
    return CheckpointsOf(model)->labels.Report(score);
  }
  absl::StatusOr<Synthesis> Synthesize(Model& model, const SynthesisRequest& request) override;
  absl::Status CheckMayCreate(std::string_view model_name) override {
    return store_->CheckMayCreate(model_name);
  }
  absl::Status CheckMaySetAside() override;
  absl::Status SetAsideAll(std::string_view model_name) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Purge(std::string_view model_name) override {
    return store_->data().PurgeDeleted(model_name);
  }
  absl::Status health() const override { return store_->data().health(); }
  absl::StatusOr<VersionId> FindLabel(Model& model, std::string_view label) override {
    return CheckpointsOf(model)->versions.FindLabel(label);
  }
  absl::StatusOr<std::vector<KnownVersion>> OnDisk(Model& model, bool with_partial) override {
    return CheckpointsOf(model)->versions.OnDisk(with_partial);
  }
  absl::StatusOr<SnapshotRef> OpenVersion(Model& model, const VersionId& id,
                                          std::string_view track) override {
    return CheckpointsOf(model)->versions.OpenVersion(id, track);
  }

 private:
  CheckpointManager(Options options, std::unique_ptr<CheckpointStore> store);

  // Never blocks on the disk.
  std::shared_ptr<ModelCheckpoints> CheckpointsOf(Model& model) ABSL_LOCKS_EXCLUDED(mu_);
  ModelContext ContextOf(Model& model);
  CheckpointScheduler::Options SchedulerOptions();
  // Null without options_.heartbeats.
  Heartbeat* AddHeartbeat(const char* name) const;
  void LogReport(const LoadReport& report) const;
  void Stop();

  const Options options_;
  const std::unique_ptr<CheckpointStore> store_;

  absl::Mutex mu_;  // Never held across a call that may block.
  // Entries of deleted models stay until the next model gets one.
  std::map<const Model*, std::shared_ptr<ModelCheckpoints>> models_ ABSL_GUARDED_BY(mu_);

  Heartbeat* const scheduler_heartbeat_;
  // Their threads use all of the above.
  SaveQueue queue_;
  CheckpointScrubber scrubber_;
  CheckpointScheduler scheduler_;
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_MANAGER_H_
