// SPDX-License-Identifier: Apache-2.0
//
// Finds and opens the versions of one model that are on the disk.
#ifndef EMA_SERVER_CHECKPOINT_STORED_VERSIONS_H_
#define EMA_SERVER_CHECKPOINT_STORED_VERSIONS_H_

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/log_event.h"
#include "server/base/observer.h"
#include "server/checkpoint/checkpoint_folder.h"
#include "server/checkpoint/checkpoint_scheduler.h"
#include "server/checkpoint/data_directory.h"
#include "server/checkpoint/save_queue.h"
#include "server/core/known_versions.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"
#include "server/format/manifest_json.h"

namespace ema {

// The objects that the classes for one model's checkpoints share. All but the model outlive these
// classes; the caller of each of their functions holds the model.
struct ModelContext {
  Model& model;
  CheckpointFolder& folder;
  DataDirectory& data;
  CheckpointScheduler& scheduler;
  SaveQueue& queue;
  const LogSink& log;
  ServerObserver& observer;

  const std::string& name() const { return folder.model_name(); }
  void Log(LogLevel level, std::string_view event, std::vector<LogField> fields) const {
    fields.insert(fields.begin(), {"model", name()});
    LogTo(log, level, event, std::move(fields));
  }
};

// The versions of one model that are on the disk, as readers see them: a checkpoint that turns out
// to be bad is set aside, and if it was the newest, the newest version is saved again.
//
// Thread-safe; has no state of its own. Calls may block on the disk.
class StoredVersions {
 public:
  explicit StoredVersions(const ModelContext& context) : context_(context) {}

  // --- Finding ---

  // CheckpointFolder::List(), after bad checkpoints have been set aside.
  absl::StatusOr<std::vector<CheckpointEntry>> List(std::optional<std::string_view> name) const;
  // A good checkpoint of a version, with all tracks or, `is_partial`, with some; incarnation 0: the
  // newest with that number, in a group of the current history only. nullopt: there is none.
  absl::StatusOr<std::optional<CheckpointEntry>> Find(const VersionId& id,
                                                      bool is_partial = false) const;
  // Checkpoints::OnDisk(). In a group, without versions that have been discarded.
  absl::StatusOr<std::vector<KnownVersion>> OnDisk(bool with_partial) const;
  // Versions that are in memory, or on the disk with all tracks: newest first, each once.
  absl::StatusOr<std::vector<KnownVersion>> Known() const;
  // Those of them that led to `latest`, the model's newest version: BranchOf().
  absl::StatusOr<std::vector<KnownVersion>> Branch(const Version& latest) const;
  // Checkpoints::FindLabel().
  absl::StatusOr<VersionId> FindLabel(std::string_view label) const;

  // --- Errors ---

  // UNAVAILABLE: the version's checkpoint is there, but its save has not ended or has failed, so a
  // restart may not find it.
  absl::Status CheckIsDurable(const VersionId& id, bool is_partial) const;
  // FAILED_PRECONDITION, PARTIAL_CHECKPOINT: only some tracks of that version are on the disk.
  absl::Status CheckNotPartial(const VersionId& id) const;
  // INVALID_ARGUMENT, BAD_NAME: there is no such label, and none can be made.
  absl::Status CheckLabel(std::string_view label) const;
  // OUT_OF_RANGE, VERSION_NOT_KEPT, listing the known versions.
  absl::Status VersionNotKeptError(const VersionId& id) const;

  // --- Reading ---

  absl::StatusOr<CheckpointManifest> ReadManifest(const CheckpointEntry& entry) const;
  // Returns `checkpoint`, the manifest of `entry`; if the model is a partition, the part with its
  // tensors. DATA_LOSS, CHECKPOINT_CORRUPT: it is that of another model or version.
  absl::StatusOr<CheckpointManifest> CheckIsOf(const CheckpointEntry& entry,
                                               CheckpointManifest checkpoint) const;
  // Checkpoints::OpenVersion().
  absl::StatusOr<SnapshotRef> OpenVersion(const VersionId& id, std::string_view track) const;

  // --- Bad checkpoints ---

  // `status`, the error of reading a checkpoint, with the checkpoint's name. DATA_LOSS: it has been
  // set aside, unless the model is being saved.
  absl::Status HandleReadError(const std::string& name, const absl::Status& status) const;
  // `waits`: CheckpointFolder::SetAside().
  void SetAside(const std::string& name, const absl::Status& problem, bool waits) const;
  // Records that the disk could not read a checkpoint.
  void NoteUnreadable(const std::string& name, const absl::Status& problem) const;

 private:
  // Good checkpoints, newest first. In a group, a crash may have left one that is not durable, as
  // the registry does not have it; these are left out. `with_discarded`: also those that a group
  // has discarded.
  absl::StatusOr<std::vector<CheckpointEntry>> Readable(bool with_discarded) const;

  const ModelContext context_;
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_STORED_VERSIONS_H_
