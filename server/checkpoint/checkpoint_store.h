// SPDX-License-Identifier: Apache-2.0
//
// A server's data directory: versions of models that outlive it.
//
//   LOCK                                  held by the one server that uses the directory, which
//                                         writes nothing while another file, or none, is there
//   INCARNATION                           durable counter, raised at each start
//   SCRUBBED                              when all checkpoints were last read again
//   models/<model>/checkpoints/LATEST     name of the newest complete checkpoint, and its CRC32C;
//                                         if that one has gone, the newest by name is it
//   models/<model>/checkpoints/LABELS.json
//                                         which versions have a name of their own: label_file.h
//   models/<model>/checkpoints/<name>/    manifest.json, tracks/<track>/model.safetensors
//   models/<model>/checkpoints/<name>/KEEP
//                                         an empty file: this checkpoint is not removed to make
//                                         room for newer ones, nor counted; a person may make or
//                                         remove it
//   models/<model>/checkpoints/<name>-part-<8 digits>/
//                                         some tracks of a version; never loaded at start
//   .tmp-*                                (in any of these folders) unfinished or being removed;
//                                         cleared at start
//   .corrupt-<name>                       a checkpoint that failed verification, kept for a person;
//                                         of LABELS.json: until it is deleted as a checkpoint is,
//                                         nothing is removed to make room
//   .abandoned-<name>                     one that a crash left newer than LATEST, kept likewise;
//                                         a save removes all but the newest without a KEEP file
//   models/.deleted-*-<model>             a deleted model, never loaded again
//
// Files: checkpoint_store.cc opens and saves; checkpoint_load.cc finds and loads;
// checkpoint_index.cc knows what there is, and its labels; checkpoint_removal.cc removes.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_

#include <atomic>
#include <cstdint>
#include <functional>
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
#include "server/checkpoint/sync_latch.h"
#include "server/core/checkpoint_counts.h"
#include "server/core/checkpoints.h"
#include "server/core/model.h"
#include "server/core/model_store.h"
#include "server/format/checkpoint_name.h"
#include "server/format/file_system.h"
#include "server/format/label_file.h"
#include "server/format/manifest_json.h"

namespace ema {

// The incarnation of a server without a data directory: microseconds since 1970, so that it grows
// from start to start.
int64_t IncarnationWithoutStore(absl::Time now = absl::Now());

// Saves versions so that they survive the server and the machine's power, and loads them at the
// next start.
//
// Thread-safe. Every call may block on the disk for as long as the model takes to write: not for a
// thread that serves RPCs. A failed sync (fsync) latches the store read-only: from then on it saves
// and deletes nothing, UNAVAILABLE with STORE_READ_ONLY, until the server is started again. While
// the disk is mounted read-only, or the data directory has gone or another is in its place, the
// error is the same, and ends with its cause.
class CheckpointStore {
 public:
  // A checkpoint that was set aside because a byte of it is wrong or missing, or because the disk
  // did not read it and it has been written anew.
  struct Quarantined {
    std::string model;
    std::string checkpoint;
    absl::Status problem;
  };
  struct Options {
    // Made if it is not there.
    std::string data_dir;
    // Checkpoints kept of each model, the newest ones, besides those with a KEEP file or a label;
    // and as many that have not all tracks. 1 or more. One that a crash has left comes on top.
    int64_t keep_count = 3;
    // Those whose step is a multiple of this are kept, too. 0: off.
    int64_t keep_step_multiple = 0;
    // As WriteOptions::max_file_bytes. 1 or more.
    int64_t max_file_bytes = 5'000'000'000;
    // Told once when the store has become read-only, and why. Called from any thread. May be empty.
    std::function<void(const std::string&)> on_read_only;
    // Told of each. Called from any thread, which may hold locks of the store. May be empty.
    std::function<void(const Quarantined&)> on_set_aside;
  };

  // Locks the directory, clears what a crash has left and raises the incarnation, durably.
  // `file_system` outlives the store. INVALID_ARGUMENT: bad options. FAILED_PRECONDITION: another
  // server uses the directory (the message says which), it may not be written, or a model's folder
  // is a symbolic link.
  // RESOURCE_EXHAUSTED, DISK_FULL. UNAVAILABLE: the disk failed. No lock is held after an error.
  static absl::StatusOr<std::unique_ptr<CheckpointStore>> Open(FileSystem& file_system,
                                                               const Options& options,
                                                               absl::Time now = absl::Now());

  // Frees the lock. REQUIRES: no call is running.
  ~CheckpointStore() = default;

  // Of this life of the server; above all that an earlier one's models and runs have taken.
  // Constant.
  int64_t incarnation() const { return incarnation_; }
  // So many from incarnation() on are this life's: each model that is created takes one, each run
  // that is opened an epoch. Only the first is on the disk, and the clock may be set back: so the
  // next life begins after the last of them. That is a run a minute for three months. They are
  // microseconds since 1970, and a server waits for the clock to be ahead of its first one: so the
  // clock, if it was not set back, tells lives apart even where the file is lost.
  static constexpr int64_t kIncarnationsPerLife = int64_t{1} << 17;

  struct Loaded {
    std::string model;
    std::string checkpoint;
    Version record;
    int64_t total_bytes = 0;
  };
  struct LoadReport {
    std::vector<Loaded> loaded;  // By model.
    // A model that is here but not in `loaded` had no good checkpoint left.
    std::vector<Quarantined> quarantined;
    // Models, and names of checkpoints that a crash had left newer than LATEST: set aside, too.
    std::vector<std::pair<std::string, std::string>> abandoned;
    // Checkpoints that LATEST names and that are neither there nor set aside: somebody has taken
    // them away. They are listed, as bad ones, until they are deleted.
    struct Missing {
      std::string model;
      std::string checkpoint;
      std::string loaded;  // In its place; empty: none.
    };
    std::vector<Missing> missing;
    // Folders that have a manifest.json, and none of a checkpoint's names: passed over.
    struct Misnamed {
      std::string model;
      std::string folder;
      std::string expected;  // The name that a server finds; empty: the manifest does not say.
    };
    std::vector<Misnamed> misnamed;
    // Models, and labels whose version has no good checkpoint.
    std::vector<std::pair<std::string, CheckpointLabel>> bare_labels;
    // Models some of whose labels may be lost, and why: their file was corrupt, so nothing of the
    // model is removed to make room until what was set aside of it has been deleted.
    std::vector<std::pair<std::string, absl::Status>> lost_labels;
    // Models that have checkpoints and no good one, and the error that CheckMayCreate() gives.
    std::vector<std::pair<std::string, absl::Status>> all_corrupt;
  };

  // Creates each model that has a checkpoint in `models`, and puts its newest good version in
  // place, verifying every byte: the one that LATEST names, else the newest by name. Bad
  // checkpoints are renamed and the next older one is tried; a model without a good one is not
  // created, and CheckMayCreate() refuses its name. The model's next run epoch is above every
  // earlier one. To be called once, after Open() and before `models` is served. An error that is
  // not the fault of a checkpoint's bytes fails the call, so that no model silently starts anew;
  // the message names model and checkpoint, and models loaded before it stay in `models`.
  // FAILED_PRECONDITION: written by a newer server. RESOURCE_EXHAUSTED: the model does not fit.
  // UNAVAILABLE: the disk failed.
  absl::StatusOr<LoadReport> LoadAll(ModelStore& models) ABSL_LOCKS_EXCLUDED(mu_);

  // Whether a model of that name may be created: a new average must not silently replace a lost
  // one. Never blocks on the disk. FAILED_PRECONDITION, ALL_CHECKPOINTS_CORRUPT: LoadAll() found
  // checkpoints of the model and no good one, and DeleteModel() has not succeeded since. The
  // message says how a person ends that.
  absl::Status CheckMayCreate(std::string_view model_name) ABSL_LOCKS_EXCLUDED(mu_);

  struct SaveOptions {
    // It has its KEEP file, too, and the kept time of model.durable() is set. Without this, one
    // that is written anew has the file if it had it before.
    bool keep = false;
    // Only these; empty: all. Such a checkpoint is no durable version of the model.
    std::vector<std::string> tracks;
    // If it is the model's newest on the disk, and the model's settings have changed since, one
    // with those takes its place; not if it has a track that was removed since, which would be
    // lost. Then the settings are on the disk with the next version.
    bool with_new_settings = false;
    // Put on it durably before anything is removed; its version and step are the snapshot's.
    // REQUIRES: no `tracks`.
    std::optional<CheckpointLabel> label;
  };
  struct SaveResult {
    std::string name;  // In the model's folder.
    int64_t total_bytes = 0;
    bool was_written = false;  // False: it was there already.
  };
  // The name that it will have.
  static std::string NameOf(const Snapshot& snapshot, const std::vector<std::string>& tracks);

  // Writes `snapshot`, a version of `model`, and sets model.durable(), also if then only the
  // label cannot be put. OK: it is on the disk, and is what will be loaded unless a newer one is
  // saved. Saving what is saved already is OK and writes nothing but what `options` ask for. Saves
  // of one model wait for each other; commits and readers do not wait for them. While the model is
  // being pushed it takes three times as long. Holds `snapshot` only while it runs.
  // RESOURCE_EXHAUSTED, DISK_FULL: works again when there is space. UNAVAILABLE, STORE_READ_ONLY.
  // UNAVAILABLE, DISK_FAILED. UNAVAILABLE, CHECKPOINT_IN_USE: one with new settings is to take its
  // place, and it is being read. UNIMPLEMENTED: the same, and the file system cannot exchange two
  // folders. FAILED_PRECONDITION: a tensor's name cannot be saved. NOT_FOUND, MODEL_NOT_FOUND: the
  // model has been deleted. INTERNAL, DEVICE. After any of these the checkpoints from before are as
  // they were; only one that was found bad, or not readable, may have been set aside.
  absl::StatusOr<SaveResult> Save(Model& model, SnapshotRef snapshot) ABSL_LOCKS_EXCLUDED(mu_) {
    return Save(model, std::move(snapshot), SaveOptions());
  }
  absl::StatusOr<SaveResult> Save(Model& model, SnapshotRef snapshot, const SaveOptions& options)
      ABSL_LOCKS_EXCLUDED(mu_);
  // A Save() is running.
  bool is_saving() const { return saving_count_.load(std::memory_order_relaxed) > 0; }

  // --- What there is ---

  // A checkpoint, or one that was set aside; or a labels' file that was, which has no version.
  struct Stored {
    std::string name;  // Of its directory.
    CheckpointId id;
    bool is_partial = false;
    // Not OK: it was set aside, because of this.
    absl::Status problem;
    // From its manifest; absent if it was set aside, nobody has asked, or that cannot be read.
    struct Details {
      absl::Time commit_time;
      std::vector<std::string> tracks;  // That have a value in it.
      int64_t total_bytes = 0;
    };
    std::optional<Details> details;
    // Not OK: why List() could not read its manifest, or as NoteRead() was told. DATA_LOSS,
    // CHECKPOINT_CORRUPT. FAILED_PRECONDITION: it is of a newer server. UNAVAILABLE: the disk
    // failed.
    absl::Status unread;
  };
  // All of a model, or the one of that name, newest first, with details. Manifests are read once.
  // UNAVAILABLE: the disk failed.
  absl::StatusOr<std::vector<Stored>> List(std::string_view model_name,
                                           std::optional<std::string_view> name = std::nullopt)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The same without details, and almost never waits for the disk: not for a running Save().
  absl::StatusOr<std::vector<Stored>> ListNames(std::string_view model_name)
      ABSL_LOCKS_EXCLUDED(mu_);

  // As ListNames() would count what was last seen, of every model that has any; none as failed.
  // Never waits for the disk.
  std::map<std::string, CheckpointCounts> CountAll() ABSL_LOCKS_EXCLUDED(mu_);
  // What the disk has left for us. UNAVAILABLE: it failed.
  absl::StatusOr<int64_t> FreeBytes() { return file_system_.FreeBytes(options_.data_dir); }

  // Removes a checkpoint, or one that was set aside or is missing, whatever retention says. OK if
  // it is not there. FAILED_PRECONDITION, CHECKPOINT_IN_USE: it has labels, is the newest, or is
  // held. Waits for a running Save(). UNAVAILABLE: STORE_READ_ONLY or DISK_FAILED.
  absl::Status Delete(std::string_view model_name, std::string_view name) ABSL_LOCKS_EXCLUDED(mu_);
  // Sets a checkpoint aside because of `problem`; OK if it is not there. True: it was the newest,
  // so that a restart would load an older one. `waits`: for a running Save(); else does nothing
  // while there is one, and whoever reads the checkpoint next finds the same.
  absl::StatusOr<bool> Quarantine(std::string_view model_name, std::string_view name,
                                  const absl::Status& problem, bool waits) ABSL_LOCKS_EXCLUDED(mu_);
  // Keeps in mind how reading a checkpoint has ended, for List() and CountAll(); nothing if it is
  // not there. After an error, which is UNAVAILABLE, the next Save() of its version writes it anew,
  // and then sets this one aside. True: that is due, for it is the newest. After an error, waits
  // for a running Save().
  absl::StatusOr<bool> NoteRead(std::string_view model_name, std::string_view name,
                                const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

  // When all checkpoints of the directory were last read again, as was noted, by an earlier server
  // or this. NOT_FOUND: nobody has noted a time. Other errors: the disk does not say.
  absl::StatusOr<absl::Time> ReadScrubTime();
  // Durable. Errors as Save(). One at a time.
  absl::Status NoteScrubTime(absl::Time time);

  // --- Labels ---

  // By name. Never blocks on the disk after the model has been loaded or saved.
  absl::StatusOr<std::vector<CheckpointLabel>> Labels(std::string_view model_name)
      ABSL_LOCKS_EXCLUDED(mu_);
  struct FoundLabel {
    CheckpointLabel label;
    // OK, or why the version cannot be read from the disk: OUT_OF_RANGE, VERSION_NOT_KEPT, or what
    // it was set aside for.
    absl::Status checkpoint;
  };
  // Never blocks. NOT_FOUND, LABEL_NOT_FOUND, listing the labels. A model's labels are known after
  // LoadAll(), or its first save.
  absl::StatusOr<FoundLabel> FindLabel(std::string_view model_name, std::string_view label)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Puts a label on a version that is on the disk, durably. OUT_OF_RANGE, VERSION_NOT_KEPT: it is
  // not. RESOURCE_EXHAUSTED: the model has kMaxLabels. UNAVAILABLE: STORE_READ_ONLY or DISK_FAILED.
  // Waits for a running Save().
  absl::Status PutLabel(std::string_view model_name, const CheckpointLabel& label)
      ABSL_LOCKS_EXCLUDED(mu_);
  // NOT_FOUND, LABEL_NOT_FOUND. Else as PutLabel().
  absl::Status RemoveLabel(std::string_view model_name, std::string_view label)
      ABSL_LOCKS_EXCLUDED(mu_);
  static constexpr size_t kMaxLabels = 1024;

 private:
  struct ModelDirectory;

 public:
  // A model's checkpoints as they were when it was made: neither Save() nor Delete() removes them
  // while it lives (DeleteModel() and Quarantine() set them aside all the same). Thread-safe;
  // outlived by its store.
  class HeldCheckpoints {
   public:
    explicit HeldCheckpoints(std::shared_ptr<ModelDirectory> folder) : folder_(std::move(folder)) {}
    ~HeldCheckpoints();
    HeldCheckpoints(const HeldCheckpoints&) = delete;
    HeldCheckpoints& operator=(const HeldCheckpoints&) = delete;

    // Newest first; those that have all tracks.
    const std::vector<CheckpointId>& ids() const { return ids_; }
    std::string Path(const CheckpointId& id) const;

   private:
    friend class CheckpointStore;
    const std::shared_ptr<ModelDirectory> folder_;
    // Constant after Hold...().
    std::vector<CheckpointId> ids_;
    std::vector<std::string> names_;
  };
  // Waits for a running Save() of the model. UNAVAILABLE: the disk failed.
  absl::StatusOr<std::unique_ptr<HeldCheckpoints>> HoldCheckpoints(std::string_view model_name)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Only the checkpoint of that name, which may be partial. Null: it is not there. Waits for
  // nothing.
  absl::StatusOr<std::unique_ptr<HeldCheckpoints>> Hold(std::string_view model_name,
                                                        std::string_view name)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Where it is.
  std::string Path(std::string_view model_name, std::string_view name) ABSL_LOCKS_EXCLUDED(mu_);

  // Where the checkpoints are.
  FileSystem& file_system() const { return file_system_; }

  // Sets a deleted model's checkpoints aside, durably; they are not loaded again. To be called
  // after ModelStore::Delete() of it, and before a model of that name is created again. Waits for
  // its running Save(). OK if there are none. Errors as Save(); then it is done before the next
  // Save() of that name, or they are loaded at the next start.
  absl::Status DeleteModel(std::string_view model_name) ABSL_LOCKS_EXCLUDED(mu_);

  // Removes what DeleteModel() has set aside of models of that name. Errors as Save(); then some of
  // it is still there.
  absl::Status PurgeDeleted(std::string_view model_name);

  // OK: a file can be made in the data directory, and it is ours. Errors as Save().
  absl::Status CheckWritable();

  // OK, or the failed sync that has latched the store: UNAVAILABLE, STORE_READ_ONLY. Never blocks.
  absl::Status health() const { return latch_.status(); }

 private:
  // The directory of one model's checkpoints.
  struct ModelDirectory {
    ModelDirectory(std::string_view model, std::string checkpoints_path)
        : model_name(model), path(std::move(checkpoints_path)) {}

    const std::string model_name;
    const std::string path;  // Of the checkpoints.
    // Serializes what changes the folder: held while the disk is waited for.
    absl::Mutex mu;
    // It is there, and so are its parents, durably; and `latest` is known.
    bool is_durable ABSL_GUARDED_BY(mu) = false;
    // DeleteModel() has failed.
    bool must_delete ABSL_GUARDED_BY(mu) = false;
    // As LoadReport::Missing.
    std::optional<CheckpointId> missing ABSL_GUARDED_BY(mu);
    // What a restart would load; all zero: nothing.
    CheckpointId latest ABSL_GUARDED_BY(mu);
    int64_t latest_bytes ABSL_GUARDED_BY(mu) = 0;  // 0: not known.

    absl::Mutex state_mu ABSL_ACQUIRED_AFTER(mu);  // Never held across a call of the file system.
    // By their directories' names: by how many it is held.
    std::map<std::string, int, std::less<>> held ABSL_GUARDED_BY(state_mu);
    // What follows is as on the disk.
    bool is_indexed ABSL_GUARDED_BY(state_mu) = false;
    std::map<std::string, Stored, std::less<>> index ABSL_GUARDED_BY(state_mu);
    LabelMap labels ABSL_GUARDED_BY(state_mu);
    absl::Status lost_labels ABSL_GUARDED_BY(state_mu);
    // What CheckMayCreate() returns.
    absl::Status creation_error ABSL_GUARDED_BY(state_mu);
  };

  CheckpointStore(FileSystem& file_system, const Options& options)
      : file_system_(file_system), options_(options), latch_(options.on_read_only) {}

  // Parts of Open().
  absl::Status Start(absl::Time now);
  absl::Status RaiseIncarnation(absl::Time now);
  absl::StatusOr<int64_t> HighestIncarnation();

  // Parts of LoadAll().
  absl::Status LoadModelLocked(const std::string& model_name, ModelDirectory& folder,
                               ModelStore& models, LoadReport& report)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  // Sets folder.missing.
  absl::Status NoteMissingLocked(ModelDirectory& folder) ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  absl::Status ReportMisnamed(const ModelDirectory& folder, LoadReport& report);
  // Puts what is missing into the report, once the model has been loaded or not.
  void ReportMissingLocked(ModelDirectory& folder, LoadReport& report)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  // Sets folder.creation_error if the model has checkpoints and none could be loaded.
  absl::Status NoteAllCorruptLocked(ModelDirectory& folder, LoadReport& report)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  absl::Status LoadCheckpoint(const std::string& model_name, const CheckpointId& id,
                              const ModelDirectory& folder, ModelStore& models, LoadReport& report);
  // Sets the model's kept time to that of the newest checkpoint with a KEEP file that is not after
  // what the model stands at.
  absl::Status RestoreKeptTime(const ModelDirectory& folder, Model& model);
  // Candidates of a folder, best first.
  absl::StatusOr<std::vector<CheckpointId>> FindCheckpoints(const ModelDirectory& folder);
  // The first of them, which a restart would load if it is good; all zero: there is none.
  absl::StatusOr<CheckpointId> FindLatest(const ModelDirectory& folder);
  // Renames a checkpoint, or the labels' file, durably, so that it is not found any more: from
  // `now_prefix` followed by `name` to `prefix` followed by `name`, and a number if there is one of
  // that name already. Returns the new name.
  absl::StatusOr<std::string> SetAside(const ModelDirectory& folder, const std::string& name,
                                       std::string_view prefix, std::string_view now_prefix = "");
  absl::Status SetAsideCorruptLocked(ModelDirectory& folder, const std::string& name,
                                     const absl::Status& problem, std::string_view now_prefix = "")
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);

  // What is known of the folder may not be what is on the disk: it is looked up again before it is
  // used, and before the next save.
  void ForgetLocked(ModelDirectory& folder) ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  static Stored::Details DetailsOf(const CheckpointManifest& checkpoint);
  // Why the checkpoint of that name is to be written anew; OK: it is not.
  static absl::Status UnreadProblem(ModelDirectory& folder, const std::string& name);
  // Reads what there is, and the labels, if that has not been done.
  absl::Status IndexLocked(ModelDirectory& folder) ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  // `entries` of the folder; if the file is set aside, its entry gets its new name.
  absl::Status ReadLabelsLocked(ModelDirectory& folder, std::vector<DirectoryEntry>& entries)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  absl::Status EnsureIndexed(ModelDirectory& folder) ABSL_LOCKS_EXCLUDED(folder.mu);
  // Reads the manifest of one that has no details yet. NOT_FOUND: it has gone meanwhile.
  absl::StatusOr<Stored::Details> ReadDetails(ModelDirectory& folder, const std::string& name)
      ABSL_LOCKS_EXCLUDED(folder.mu);
  // As Quarantine().
  absl::StatusOr<bool> QuarantineLocked(ModelDirectory& folder, const std::string& name,
                                        const absl::Status& problem)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  // NOT_FOUND: somebody else has removed it, as is noted. Else an error of the disk.
  absl::Status CheckIsThereLocked(ModelDirectory& folder, const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  absl::Status PutLabelLocked(ModelDirectory& folder, const CheckpointLabel& label)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  absl::Status WriteLabelsLocked(ModelDirectory& folder, LabelMap labels)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);

  // As clients of a save understand it: a folder that has gone or may not be written is no fault of
  // the call.
  absl::Status AsSaveError(const absl::Status& status);
  // UNAVAILABLE, STORE_READ_ONLY: the data directory has gone, or is not the one that was locked.
  absl::Status CheckPlace();
  // The same, or what has latched. Errors as Save(). Before anything is changed.
  absl::Status CheckMayWrite();

  // Parts of Save() and DeleteModel().
  absl::StatusOr<SaveResult> SaveLocked(Model& model, const Snapshot& snapshot,
                                        const SaveOptions& options, ModelDirectory& folder)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  absl::Status MakeDurableLocked(const std::string& model_name, ModelDirectory& folder)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  // The bytes of a checkpoint that is complete; nullopt: there is none of that name, or it is to be
  // written anew.
  absl::StatusOr<std::optional<int64_t>> FindCompleteLocked(ModelDirectory& folder,
                                                            const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  absl::StatusOr<int64_t> WriteAndRenameLocked(Model& model, const Snapshot& snapshot,
                                               const SaveOptions& options, ModelDirectory& folder,
                                               const std::string& name, bool has_old_settings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  // Gives a temporary checkpoint its name, durably, and sets aside the one that was there to be
  // written anew; or removes it, if it `has_old_settings`. Where the file system can exchange
  // names, one of the two has it at every moment.
  absl::Status TakeNameLocked(ModelDirectory& folder, const std::string& name,
                              bool has_old_settings) ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  // UNAVAILABLE, CHECKPOINT_IN_USE.
  static absl::Status CheckNotHeldLocked(const ModelDirectory& folder, const std::string& name)
      ABSL_SHARED_LOCKS_REQUIRED(folder.state_mu);
  // TakeNameLocked() where that has old settings.
  absl::Status ReplaceLocked(ModelDirectory& folder, const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  // The checkpoint of that name which is to be written anew, or was set aside, has its KEEP file.
  bool WasKept(const ModelDirectory& folder, const std::string& name);
  // Makes a checkpoint's KEEP file, durably; OK if it is there.
  absl::Status Keep(const std::string& checkpoint_path);
  // Removes what retention does not keep, but not what has just been saved. False: that is nothing.
  absl::StatusOr<bool> RemoveOldLocked(ModelDirectory& folder, std::string_view saved_name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  // Makes it temporary, to be cleared, and forgets it. False: somebody holds it.
  absl::StatusOr<bool> StartRemovingLocked(ModelDirectory& folder, const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  absl::Status DeleteLocked(const std::string& model_name, ModelDirectory& folder)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  absl::Status DeleteCheckpointLocked(ModelDirectory& folder, std::string_view name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  // Before one that was set aside, or is missing, is forgotten: LATEST names it no more, or a
  // restart would miss it.
  absl::Status TakeOffLatestLocked(ModelDirectory& folder, const Stored& stored)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);
  absl::Status RemoveLabelLocked(ModelDirectory& folder, std::string_view label)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(folder.mu);

  // What LATEST names.
  absl::StatusOr<std::optional<std::string>> ReadLatestName(const ModelDirectory& folder);
  // Replaces a file, durably and at once.
  absl::Status ReplaceFile(const std::string& directory, std::string_view name,
                           const std::string& text);
  // Removes all that begins with kTemporaryPrefix.
  absl::Status ClearTemporary(const std::string& directory);
  absl::Status Sync(const std::string& directory) {
    return latch_.Check(file_system_.SyncDirectory(directory));
  }
  // Directories with a model's name. FAILED_PRECONDITION: one is a symbolic link.
  absl::StatusOr<std::vector<std::string>> ModelNames();

  std::string ModelsPath() const { return JoinPath(options_.data_dir, "models"); }
  std::string ModelPath(std::string_view name) const { return JoinPath(ModelsPath(), name); }
  std::shared_ptr<ModelDirectory> GetDirectory(std::string_view model_name)
      ABSL_LOCKS_EXCLUDED(mu_);

  FileSystem& file_system_;
  const Options options_;
  std::unique_ptr<FileLock> lock_;  // Constant after Open(), as incarnation_.
  int64_t incarnation_ = 0;
  SyncLatch latch_;
  std::atomic<int> saving_count_ = 0;     // Relaxed: a hint for the scrub.
  std::atomic<int64_t> write_count_ = 0;  // Of CheckWritable(). Relaxed: it only tells them apart.

  absl::Mutex mu_;  // Never held across a call of file_system_.
  std::map<std::string, std::shared_ptr<ModelDirectory>, std::less<>> folders_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_
