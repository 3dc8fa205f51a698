// SPDX-License-Identifier: Apache-2.0
//
// The checkpoints of a server with a data directory: what calls ask for, and what happens by
// itself.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_MANAGER_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_MANAGER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
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
#include "server/base/steady_wait.h"
#include "server/checkpoint/checkpoint_scheduler.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/core/checkpoints.h"
#include "server/core/known_versions.h"
#include "server/core/model.h"
#include "server/core/model_store.h"
#include "server/format/file_system.h"
#include "server/format/manifest_json.h"

namespace ema {

// What ema_service.proto says of checkpoints and labels, over a CheckpointStore; saves by itself
// what is due; reads again, now and then, what is kept. Thread-safe.
//
// Files: checkpoint_manager.cc opens, loads and drains, lists and deletes, synthesizes, and knows
// the disk's free space and health; checkpoint_saves.cc saves; checkpoint_labels.cc has labels and
// scores, and opens versions for readers; checkpoint_rollback.cc goes back to earlier versions;
// checkpoint_scrub.cc reads again.
class CheckpointManager final : public Checkpoints {
 public:
  struct Options {
    CheckpointStore::Options store;
    SavePolicy policy;
    // How long after a failed automatic save it is tried again.
    absl::Duration retry_delay = absl::Seconds(10);
    // Every checkpoint is read again, to find bytes that have gone bad, once in so long. Zero:
    // never.
    absl::Duration scrub_interval = absl::ZeroDuration();
    // How often the disk is asked how much is free, and, where it could not be written, whether it
    // can be. Infinite: never.
    absl::Duration free_space_interval = absl::InfiniteDuration();
    LogSink log;
    // Told how saves have ended. Outlives the manager.
    ServerObserver* observer = &ServerObserver::None();
    // Where the threads that save and read again show that they get on. Outlives the manager; null:
    // nowhere.
    Heartbeats* heartbeats = nullptr;
  };

  // The log's event of a save that has failed, of which the observer has been told, too.
  static constexpr std::string_view kSaveFailed = "checkpoint failed";

  // As CheckpointStore::Open().
  static absl::StatusOr<std::unique_ptr<CheckpointManager>> Open(FileSystem& file_system,
                                                                 Options options,
                                                                 absl::Time now = absl::Now());
  // Waits for the save that is running, and for those that were asked for. REQUIRES: no call is
  // running.
  ~CheckpointManager() override;

  int64_t incarnation() const { return store_->incarnation(); }

  // As CheckpointStore::LoadAll(), and tells the log. `models` outlives this; from here on its
  // checkpoints are read again now and then. To be called once.
  absl::Status LoadAll(ModelStore& models);

  // What the disk had free when it was last asked. Absent: it was not, or did not say. Never blocks
  // on the disk.
  std::optional<int64_t> free_bytes() ABSL_LOCKS_EXCLUDED(mu_);
  // Of every model that has any. Never blocks on the disk.
  std::map<std::string, CheckpointCounts> CountAll() ABSL_LOCKS_EXCLUDED(mu_);
  // When the last complete scrub that skipped none ended, of this server or an earlier one of the
  // same directory; the first LoadAll() there counts as one, and any to which the disk does not
  // say. Absent: there are none.
  std::optional<absl::Time> scrub_time() ABSL_LOCKS_EXCLUDED(mu_);

  // As Model::Options::on_commit. Never waits for the disk.
  void OnCommit(const std::shared_ptr<Model>& model, const Snapshot& snapshot) {
    scheduler_->OnCommit(model, snapshot);
  }

  // Ends what happens by itself, waits for what was asked for, and saves every model's newest
  // version. The first error; the other models are saved all the same. REQUIRES:
  // ModelStore::Drain() has returned. Once.
  absl::Status Drain(ModelStore& models);

  // Waits until all that was asked for with SaveRequest::async has ended, and what is due by
  // itself. For tests.
  void AwaitIdle() ABSL_LOCKS_EXCLUDED(mu_);
  struct ScrubReport {
    int64_t bad_count = 0;         // Set aside.
    int64_t unreadable_count = 0;  // The disk failed. Read again by the next scrub.
    // Not read for a reason that is not the disk's: too many files are open, or it is of a newer
    // server. Models that could not be listed count, too.
    int64_t skipped_count = 0;
    bool is_complete = true;  // False: Drain() has begun.
  };
  // Reads every checkpoint of all models again; sets bad ones aside. If the newest is bad or cannot
  // be read, the newest version is saved anew. Blocks for as long as that takes; ends within a few
  // MiB when Drain() begins.
  ScrubReport Scrub(ModelStore& models) ABSL_LOCKS_EXCLUDED(mu_);

  // --- Checkpoints ---

  absl::StatusOr<Saved> Save(Model& model, const SaveRequest& request) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<CheckpointInfo> Get(Model& model, std::string_view name) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Listing> List(Model& model) override ABSL_LOCKS_EXCLUDED(mu_) {
    return List(model, std::nullopt);
  }
  absl::Status Delete(Model& model, std::string_view name) override;
  absl::StatusOr<Version> Restore(Model& model, const VersionId& id,
                                  std::string_view label) override;
  absl::StatusOr<std::optional<VersionId>> Resume(Model& model, const Launch& launch,
                                                  const ResumePoint& point) override;
  absl::StatusOr<CheckpointLabel> SetLabel(Model& model, const std::string& label,
                                           const VersionId& id) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status RemoveLabel(Model& model, const std::string& label) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<MetricResult> ReportMetric(Model& model, const CheckpointLabel& score) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Synthesis> Synthesize(Model& model, const SynthesisRequest& request) override;
  absl::Status CheckMayCreate(std::string_view model_name) override {
    return store_->CheckMayCreate(model_name);
  }
  absl::Status CheckMayForget() override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Forget(std::string_view model_name) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Purge(std::string_view model_name) override {
    return store_->PurgeDeleted(model_name);
  }
  absl::Status health() const override ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<VersionId> FindLabel(const Model& model, std::string_view label) override;
  absl::StatusOr<std::vector<KnownVersion>> OnDisk(const Model& model, bool with_partial) override;
  absl::StatusOr<SnapshotRef> OpenVersion(Model& model, const VersionId& id,
                                          std::string_view track) override;

 private:
  // Model and checkpoint.
  using Key = std::pair<std::string, std::string>;
  // A checkpoint that is being written, or waits for that.
  struct Saving {
    CheckpointInfo info;
    int count = 0;  // Of those who do.
    // Of SaveRequest::async.
    bool is_queued = false;
    SnapshotRef snapshot;  // Holds its model.
    std::shared_ptr<Model> model;
    std::vector<std::string> tracks;
    std::vector<std::string> labels;  // Still to be put on it.
  };

  CheckpointManager(Options options, std::unique_ptr<CheckpointStore> store);

  // Tells the log, with the model's name.
  void Log(LogLevel level, std::string_view event, const Model& model,
           std::vector<LogField> fields) const;

  // Serializes changes of a model's labels, which read before they write: held while the disk is
  // waited for, and taken before mu_.
  std::shared_ptr<absl::Mutex> LabelMutexOf(const Model& model) ABSL_LOCKS_EXCLUDED(mu_);
  void LogLabelSet(const Model& model, std::string_view label, int64_t version, int64_t step) const;
  // As that of the store, and tells the log.
  absl::Status PutLabel(const Model& model, const CheckpointLabel& label);
  // Saves, and keeps in mind that it is done, or why not; tells the log, of the same failure of a
  // model once until a save succeeds.
  absl::StatusOr<Saved> SaveSnapshot(Model& model, const SnapshotRef& snapshot,
                                     const CheckpointStore::SaveOptions& options)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The same, but leaves it to the caller to tell the log of a failure.
  absl::StatusOr<Saved> TrySave(Model& model, const SnapshotRef& snapshot,
                                const CheckpointStore::SaveOptions& options)
      ABSL_LOCKS_EXCLUDED(mu_);
  // `snapshot` null: there was none to be saved. `more` stands before the error.
  void LogFailedSave(const Model& model, const SnapshotRef& snapshot,
                     const std::vector<std::string>& tracks, const absl::Status& status,
                     const std::vector<LogField>& more) const;
  // `status`: of a save that was asked for. True: the last one of the model failed otherwise, or
  // did not.
  bool IsNewFailure(const Model& model, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  // What Save() says of a version that is not on the disk with all tracks: `status`, as
  // VersionHistory::Pin() gave it, or, if only some tracks are there, that.
  absl::Status NotPinned(const Model& model, const VersionId& id, const absl::Status& status);
  // Leaves the rest to RunQueue().
  absl::StatusOr<Saved> Enqueue(Model& model, const SnapshotRef& snapshot,
                                const SaveRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  // RESOURCE_EXHAUSTED, TOO_MANY_PINS: so many other versions of the model are being saved, or wait
  // for RunQueue(), that readers could pin none with this one. A step that is saved exactly, and
  // waits for the scheduler, comes on top of these.
  absl::Status CheckMayWaitLocked(const Model& model, const VersionId& id) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void RunQueue() ABSL_LOCKS_EXCLUDED(mu_);
  // A save that was left to it, with the labels for it. An error, which the log is told of, names
  // those that are not set, and are not waited for any more.
  absl::Status SaveQueued(const Key& key, Model& model, const SnapshotRef& snapshot,
                          const std::vector<std::string>& tracks) ABSL_LOCKS_EXCLUDED(mu_);
  void NoteFreeSpace() ABSL_LOCKS_EXCLUDED(mu_);
  // `status`: of something that was written, or could not be. Tells the log when it turns.
  void NoteWritten(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  // Where nothing could be written, looks whether that is over.
  void LookWhetherWritable() ABSL_LOCKS_EXCLUDED(mu_);
  void NoteEndLocked(const Key& key, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // As that of the store; bad ones have been set aside.
  absl::StatusOr<std::vector<CheckpointStore::Stored>> ListStored(
      Model& model, std::optional<std::string_view> name);
  // All, or the one of that name.
  absl::StatusOr<Listing> List(Model& model, std::optional<std::string_view> only)
      ABSL_LOCKS_EXCLUDED(mu_);
  // As Get(); nullopt: there is none.
  absl::StatusOr<std::optional<CheckpointInfo>> FindInfo(Model& model, std::string_view name)
      ABSL_LOCKS_EXCLUDED(mu_);
  // A good checkpoint of a version, with all tracks or, `is_partial`, with some; incarnation 0: the
  // newest of that number. nullopt: there is none.
  absl::StatusOr<std::optional<CheckpointStore::Stored>> FindStored(const Model& model,
                                                                    const VersionId& id,
                                                                    bool is_partial = false);
  // Versions in memory, and on the disk with all tracks: newest first, each once.
  absl::StatusOr<std::vector<KnownVersion>> Known(const Model& model);
  // OK: a restart finds the checkpoint of that version, which is there. UNAVAILABLE: it may not:
  // it has got its name, but its save has not ended well.
  absl::Status CheckIsDurable(const Model& model, const VersionId& id, bool is_partial) const;
  // RESOURCE_EXHAUSTED: no more labels of scores may be made.
  absl::Status CheckMayScore(const Model& model, const CheckpointLabel& score) const;
  // `checkpoint`, which was found as `stored`. DATA_LOSS, CHECKPOINT_CORRUPT: it is of another
  // model, or version.
  static absl::StatusOr<CheckpointManifest> CheckIsOf(const Model& model,
                                                      const CheckpointStore::Stored& stored,
                                                      CheckpointManifest checkpoint);
  absl::StatusOr<CheckpointManifest> ReadManifest(Model& model,
                                                  const CheckpointStore::Stored& stored);
  // OUT_OF_RANGE, VERSION_NOT_KEPT, listing what there is.
  absl::Status NotKept(const Model& model, const VersionId& id);

  // INVALID_ARGUMENT, BAD_NAME: there is no such label, and shall not be.
  absl::Status CheckLabel(const Model& model, std::string_view label);
  // Puts `label` on a version, saving that if need be; `id` as SaveRequest's.
  absl::StatusOr<CheckpointLabel> Place(Model& model, CheckpointLabel label, const VersionId& id);

  // Restore() from memory or the disk, and the save after it.
  absl::StatusOr<Version> GoBack(Model& model, const VersionId& id);
  absl::StatusOr<SnapshotRef> GoBackToStored(Model& model, const CheckpointStore::Stored& stored);
  // PARTIAL_CHECKPOINT: of that version only some tracks are on the disk.
  absl::Status CheckNotPartial(const Model& model, const VersionId& id);
  // Saves the newest version, which is, or came of, `rollback`. UNAVAILABLE: it is in memory only.
  absl::Status SaveRollback(Model& model, const Version& rollback, const SnapshotRef& newest);
  // The same, if there is a rollback after what is on the disk.
  absl::Status SaveRollbackInMemory(Model& model);
  // Which version Resume() must go back to; nullopt: the model, at `latest`, stands there.
  absl::StatusOr<std::optional<VersionId>> TargetAtVersion(Model& model, const ResumePoint& point,
                                                           const std::optional<Version>& latest);
  absl::StatusOr<std::optional<VersionId>> TargetAtStep(Model& model, const ResumePoint& point,
                                                        const std::optional<Version>& latest);
  // Of a version in memory or on the disk.
  absl::StatusOr<TrackStates> TrackStatesAt(Model& model, const VersionId& id);
  // RESUME_MISMATCH: the trainer was to update a track between `from` and `point`, which has a
  // time.
  absl::Status CheckNotDue(Model& model, const ResumePoint& point,
                           const std::optional<TrackStates>& from, const std::string& where);
  // RESUME_MISMATCH, listing what there is.
  absl::Status Mismatch(const Model& model, const ResumePoint& point, const std::string& why);

  // `status`, which reading a checkpoint has given, with its place. DATA_LOSS: it is set aside, but
  // while the model is being saved.
  absl::Status StoredError(Model& model, const std::string& name, const absl::Status& status);
  // Sets a bad checkpoint aside; has the newest version saved if it was that.
  void SetAside(Model& model, const std::string& name, const absl::Status& problem, bool waits);
  // Tells the log; has the newest version saved, in its place if need be, if it was the newest.
  void NoteUnreadable(Model& model, const std::string& name, const absl::Status& problem);
  void NoteScrubTime(absl::Time time) ABSL_LOCKS_EXCLUDED(mu_);
  // Verifies a checkpoint. CANCELLED: Drain() has begun. Only this is the scrub's own work: what is
  // made of the result may wait for a save.
  absl::Status ReadAgain(Model& model, const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  void RunScrub() ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for so long. False: Drain() has begun.
  bool Rest(absl::Duration time) ABSL_LOCKS_EXCLUDED(mu_);
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

  // Null if nobody looks.
  Heartbeat* AddHeartbeat(const char* name) const;

  const Options options_;
  const std::unique_ptr<CheckpointStore> store_;
  // Of the threads that save what is due, save what was asked for, and read again.
  Heartbeat* const scheduler_heartbeat_;
  Heartbeat* const queue_heartbeat_;
  Heartbeat* const scrub_heartbeat_;

  mutable absl::Mutex mu_;  // Never held across a call of the store or a model.
  std::map<Key, Saving> saving_ ABSL_GUARDED_BY(mu_);
  std::deque<Key> queue_ ABSL_GUARDED_BY(mu_);
  // Of each model, those that could not be written, oldest first.
  std::map<std::string, std::deque<CheckpointInfo>, std::less<>> failed_ ABSL_GUARDED_BY(mu_);
  // By model: what the last save that was asked for has failed with.
  std::map<std::string, absl::Status, std::less<>> asked_errors_ ABSL_GUARDED_BY(mu_);
  // By model: those of LabelMutexOf() that somebody holds, and some that have gone.
  std::map<std::string, std::weak_ptr<absl::Mutex>> label_mutexes_ ABSL_GUARDED_BY(mu_);
  bool is_stopping_ ABSL_GUARDED_BY(mu_) = false;
  SteadyWait wait_;  // Woken when there is more to do, or the end has begun.
  // STORE_READ_ONLY, though not latched: the last save could not be written.
  absl::Status unwritable_ ABSL_GUARDED_BY(mu_);
  std::optional<int64_t> free_bytes_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Time> scrub_time_ ABSL_GUARDED_BY(mu_);

  ModelStore* models_ = nullptr;  // Constant after LoadAll().
  std::unique_ptr<CheckpointScheduler> scheduler_;
  std::thread queue_thread_;  // Joined by Stop(), as scrub_thread_.
  std::thread scrub_thread_;  // Runs from LoadAll() on, if there is a scrub_interval.
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_MANAGER_H_
