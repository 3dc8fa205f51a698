// SPDX-License-Identifier: Apache-2.0
//
// Saves, lists, labels and removes the checkpoints of one model.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_FOLDER_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_FOLDER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/base/log_event.h"
#include "server/checkpoint/checkpoint_index.h"
#include "server/checkpoint/checkpoint_records.h"
#include "server/checkpoint/data_directory.h"
#include "server/checkpoint/folder_files.h"
#include "server/checkpoint/folder_labels.h"
#include "server/checkpoint/partitioned_saves.h"
#include "server/core/model.h"
#include "server/format/checkpoint_name.h"

namespace ema {

struct CheckpointStoreOptions {
  // Created if it does not exist.
  std::string data_dir;
  // The name of this server in its group, whose servers share the data directory; empty: no group.
  std::string member;
  // How checkpoints of models on several servers are written. Outlives the store. Null: each model
  // is on this server only.
  PartitionedSaves* partitions = nullptr;
  // How many of the newest checkpoints of each model are kept, not counting those with a KEEP file;
  // partial checkpoints are counted separately. 1 or more. Checkpoints with a label are kept, too,
  // and so is the newest abandoned one.
  int64_t keep_count = 3;
  // Checkpoints whose step is a multiple of this are kept, too. 0: none.
  int64_t keep_step_multiple = 0;
  // WriteOptions::max_file_bytes. 1 or more.
  int64_t max_file_bytes = 5'000'000'000;
  LogSink log;
};

// The checkpoints of the model with one name, also after it was deleted and created again. The
// checkpoints in its index are on the disk, and one that was reported as saved survives a power
// failure.
//
// Thread-safe. Calls may block on the disk for as long as the model takes to write, unless they say
// otherwise. Errors of all calls that change something: UNAVAILABLE, STORE_READ_ONLY: a sync has
// failed since the start, the disk is mounted read-only, or the data directory is gone or replaced.
// UNAVAILABLE, DISK_FAILED. Such a call waits for a running Save().
class CheckpointFolder {
 public:
  // `data` and `options` outlive this.
  CheckpointFolder(DataDirectory& data, const CheckpointStoreOptions& options,
                   std::string_view model_name)
      : data_(data),
        options_(options),
        model_name_(model_name),
        files_(data, model_name),
        index_(model_name),
        labels_(files_, index_),
        records_(options.partitions, model_name) {}
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;

  const std::string& model_name() const { return model_name_; }
  FileSystem& file_system() const { return data_.file_system(); }
  std::string Path(std::string_view name) const { return files_.Path(name); }
  // CheckpointStoreOptions::partitions.
  PartitionedSaves* partitions() const { return options_.partitions; }

  // --- Saving ---

  struct SaveOptions {
    // The checkpoint gets a KEEP file, and the kept time of model.durable() is set. Without this, a
    // checkpoint that is written again keeps the file that it had.
    bool keep = false;
    // Only these tracks; empty: all. A partial checkpoint is not a durable version of the model.
    std::vector<std::string> tracks;
    // If the snapshot is the newest version on the disk, and the model's settings (tracks and
    // attached files) have changed since it was written, it is written again with the new settings.
    // In a group, or if the snapshot has a track that the model no longer has and that would be
    // lost, it is not written again: the settings reach the disk with the next version.
    bool with_new_settings = false;
    // A label to put on the version before old checkpoints are removed; its version and step become
    // the snapshot's. REQUIRES: no `tracks`.
    std::optional<CheckpointLabel> label;
  };
  struct SaveResult {
    std::string name;  // The name of its folder.
    int64_t total_bytes = 0;
    bool was_written = false;  // False: it existed already.
  };
  // The name of the checkpoint that Save() makes.
  static std::string NameOf(const Snapshot& snapshot, const std::vector<std::string>& tracks);

  // Writes `snapshot`, a version of `model`, and sets model.durable(), which stays set if only the
  // label fails. OK: it is on the disk, and the next start loads it unless a newer one is saved. If
  // it was there already, only the additions of `options` are written. Saves of one model wait for
  // each other; commits and readers do not wait for them. While pushes arrive, a save works a third
  // of the time. Holds `snapshot` only while it runs. RESOURCE_EXHAUSTED, DISK_FULL. UNAVAILABLE,
  // CHECKPOINT_IN_USE: new settings would replace a checkpoint that is being read. UNIMPLEMENTED:
  // new settings would replace a checkpoint, and the file system cannot exchange two folders.
  // FAILED_PRECONDITION: a tensor's name cannot be saved. NOT_FOUND, MODEL_NOT_FOUND: the model has
  // been deleted. INTERNAL, DEVICE. Errors also as PartitionedSaves::Write() and Commit(). After an
  // error the earlier checkpoints are unchanged, but bad or unreadable ones may have been set
  // aside.
  absl::StatusOr<SaveResult> Save(Model& model, const SnapshotRef& snapshot,
                                  const SaveOptions& options) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<SaveResult> Save(Model& model, const SnapshotRef& snapshot)
      ABSL_LOCKS_EXCLUDED(mu_) {
    return Save(model, snapshot, SaveOptions());
  }
  // A hint: Save() is running.
  bool is_saving() const { return saving_count_.load(std::memory_order_relaxed) > 0; }

  // --- Listing ---

  // All checkpoints, or the one of that name, newest first, with details. Each manifest is read
  // once. UNAVAILABLE: the disk failed.
  absl::StatusOr<std::vector<CheckpointEntry>> List(
      std::optional<std::string_view> name = std::nullopt) ABSL_LOCKS_EXCLUDED(mu_);
  // List() without details. Waits for the disk, and a running Save(), only if the folder must be
  // listed again.
  absl::StatusOr<std::vector<CheckpointEntry>> ListNames() ABSL_LOCKS_EXCLUDED(mu_);
  // How many checkpoints of each kind there are; nullopt: none. Never blocks.
  std::optional<CheckpointCounts> Count() const { return index_.Count(); }

  // Removes a checkpoint, or one that was set aside or is missing, whatever retention says. OK if
  // it is not there. `model` is needed in a group only. FAILED_PRECONDITION, CHECKPOINT_IN_USE: it
  // has labels, is the newest, or is held. Errors also as PartitionedSaves::Remove().
  absl::Status Delete(std::string_view name, Model* model = nullptr) ABSL_LOCKS_EXCLUDED(mu_);
  // Sets all checkpoints aside. To be called when the model has been deleted, before a model of
  // that name is created again. OK if there are none. After an error the next Save() tries again;
  // until that has succeeded, a restart would load them.
  absl::Status SetAsideAll() ABSL_LOCKS_EXCLUDED(mu_);
  // Sets a checkpoint aside because of `problem`; OK if it is not there. True: it was the newest,
  // so a restart would load an older one. Unless `waits`, it does nothing while another change,
  // such as a Save(), is running; the next reader then finds the same problem.
  absl::StatusOr<bool> SetAside(std::string_view name, const absl::Status& problem, bool waits)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Records how reading a checkpoint ended: OK or UNAVAILABLE. After an error the next Save() of
  // its version writes it again and then sets this one aside. True: it is the newest, so that save
  // is due.
  absl::StatusOr<bool> NoteRead(std::string_view name, const absl::Status& status)
      ABSL_LOCKS_EXCLUDED(mu_);

  // --- Readers ---

  // Checkpoints that neither Save() nor Delete() removes while this lives; SetAsideAll() and
  // SetAside() still rename them. Thread-safe; the folder outlives it.
  class Held {
   public:
    ~Held() { folder_.index_.Release(names_); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    // Newest first; those that have all tracks.
    const std::vector<CheckpointId>& ids() const { return ids_; }
    std::string Path(const CheckpointId& id) const { return folder_.Path(CheckpointName(id)); }

   private:
    friend class CheckpointFolder;
    explicit Held(CheckpointFolder& folder) : folder_(folder) {}

    CheckpointFolder& folder_;
    // Constant after Hold() and HoldAll().
    std::vector<CheckpointId> ids_;
    std::vector<std::string> names_;
  };
  // Holds all checkpoints that have all tracks. Waits for a running Save(). UNAVAILABLE: the disk
  // failed.
  absl::StatusOr<std::unique_ptr<Held>> HoldAll() ABSL_LOCKS_EXCLUDED(mu_);
  // Holds only the checkpoint of that name, which may be partial. Null: it is not there. Blocks
  // like ListNames().
  absl::StatusOr<std::unique_ptr<Held>> Hold(std::string_view name) ABSL_LOCKS_EXCLUDED(mu_);

  // --- Labels ---

  // Sorted by name. Blocks like ListNames().
  absl::StatusOr<std::vector<CheckpointLabel>> Labels() ABSL_LOCKS_EXCLUDED(mu_);
  // CheckpointIndex::FindLabel(), which knows the labels after Recover() or the first save. Never
  // blocks.
  absl::StatusOr<FoundLabel> FindLabel(std::string_view label) const {
    return index_.FindLabel(label);
  }
  // Puts a label on a version that is on the disk. OUT_OF_RANGE, VERSION_NOT_KEPT: it is not.
  // RESOURCE_EXHAUSTED: the model has FolderLabels::kMaxLabels.
  absl::Status PutLabel(const CheckpointLabel& label) ABSL_LOCKS_EXCLUDED(mu_);
  // NOT_FOUND, LABEL_NOT_FOUND.
  absl::Status RemoveLabel(std::string_view label) ABSL_LOCKS_EXCLUDED(mu_);

  // --- At the start, for LoadModel() ---

  // Syncs the renames of an earlier server, and reads the folder into the index. False: there is no
  // folder.
  absl::StatusOr<bool> Recover() ABSL_LOCKS_EXCLUDED(mu_);
  // Sets a checkpoint aside that LoadModel() has found to be bad.
  absl::Status SetAsideCorrupt(const std::string& name, const absl::Status& problem)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Sets a checkpoint aside that is newer than the one that was loaded. Returns its new name.
  absl::StatusOr<std::string> Abandon(const CheckpointId& id) ABSL_LOCKS_EXCLUDED(mu_);
  // In a group, on the home of a new incarnation, whose newest checkpoint is `newest`, if it has
  // one: makes LATEST name it, and sets the checkpoints aside that have all tracks but are not
  // `recorded`: a crash came before the registry had them. Returns their new names.
  absl::StatusOr<std::vector<std::string>> BeginIncarnation(
      const std::optional<CheckpointId>& newest, const std::vector<VersionId>& recorded)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Another server may have changed the folder: it is listed again before the index is used. Never
  // blocks.
  void Refresh() { index_.Invalidate(); }
  std::optional<CheckpointId> missing() const { return index_.missing(); }
  absl::Status lost_labels() const { return index_.lost_labels(); }

 private:
  // --- Parts of Save(), in its order ---

  absl::StatusOr<SaveResult> SaveLocked(Model& model, const Snapshot& snapshot,
                                        const SaveOptions& options)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status MakeDurableLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The size of a complete checkpoint. nullopt: there is none of that name, or it must be written
  // again.
  absl::StatusOr<std::optional<int64_t>> FindCompleteLocked(const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<int64_t> WriteLocked(Model& model, const Snapshot& snapshot,
                                      const SaveOptions& options, const std::string& name,
                                      bool has_old_settings) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Gives a temporary checkpoint its name. An existing one of that name is set aside if it was
  // unreadable, or removed if it `has_old_settings`. Where the file system can exchange names, the
  // name is never absent.
  absl::Status MoveIntoPlaceLocked(const std::string& name, bool has_old_settings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The part of MoveIntoPlaceLocked() that replaces a checkpoint with old settings.
  absl::Status ReplaceLocked(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // UNAVAILABLE, CHECKPOINT_IN_USE: a checkpoint with new settings cannot replace it now.
  absl::Status CannotReplaceError(std::string_view name, std::string_view why) const;
  // Removes the checkpoints that retention does not keep, but never `saved_name`. Returns whether
  // any was removed.
  absl::StatusOr<bool> RemoveOldLocked(Model& model, std::string_view saved_name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // --- The index ---

  // Marks the index as possibly wrong: the folder is read again before the next use.
  void ForgetLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Lists the folder and reads the labels, unless the index is current.
  absl::Status IndexLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status EnsureIndexed() ABSL_LOCKS_EXCLUDED(mu_);
  // Reads the manifest of a checkpoint that has no details. NOT_FOUND: it is gone.
  absl::StatusOr<CheckpointEntry::Details> ReadDetails(const std::string& name)
      ABSL_LOCKS_EXCLUDED(mu_);
  // NOT_FOUND: the folder `name` is gone, and so is its entry now.
  absl::Status CheckIsThereLocked(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<bool> SetAsideLocked(const std::string& name, const absl::Status& problem)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status SetAsideCorruptLocked(const std::string& name, const absl::Status& problem,
                                     std::string_view old_prefix = "")
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // --- Parts of the other calls ---

  // Whether a restart would find that version: in a group, the registry has it, else LATEST does
  // not name an older one.
  absl::StatusOr<bool> IsDurableLocked(const CheckpointId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status PutLabelLocked(const CheckpointLabel& label) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status RemoveLabelLocked(std::string_view label) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status DeleteLocked(std::string_view name, Model* model) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status DeleteAllLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Renames the checkpoint to a temporary name, which is cleared later. In a group, first removes
  // it from the registry; this needs `model`. False: the checkpoint is held.
  absl::StatusOr<bool> StartRemovingLocked(const std::string& name, Model* model)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Before a checkpoint that was set aside or is missing is removed: LATEST must not name it, or
  // the next start would miss it.
  absl::Status UpdateLatestBeforeRemovalLocked(const CheckpointEntry& entry)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  DataDirectory& data_;
  const CheckpointStoreOptions& options_;
  const std::string model_name_;

  FolderFiles files_;
  CheckpointIndex index_;
  std::atomic<int> saving_count_ = 0;  // Relaxed: a hint for the scrub.

  absl::Mutex mu_;  // Serializes changes of the folder: held while waiting for the disk.
  // The folder and its parents are there, durably, and latest_ is known.
  bool is_durable_ ABSL_GUARDED_BY(mu_) = false;
  bool must_delete_ ABSL_GUARDED_BY(mu_) = false;  // SetAsideAll() has failed.
  // The checkpoint that a restart would load; all zero: none.
  CheckpointId latest_ ABSL_GUARDED_BY(mu_);
  int64_t latest_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // 0: unknown.
  FolderLabels labels_ ABSL_GUARDED_BY(mu_);
  CheckpointRecords records_ ABSL_GUARDED_BY(mu_);  // Of a group.
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_FOLDER_H_
