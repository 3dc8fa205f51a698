// SPDX-License-Identifier: Apache-2.0
//
// The checkpoints and labels of one model, as they were last seen on the disk.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_INDEX_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_INDEX_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/core/checkpoint_counts.h"
#include "server/format/checkpoint_name.h"
#include "server/format/file_system.h"
#include "server/format/label_file.h"
#include "server/format/manifest_json.h"

namespace ema {

// A checkpoint, which may have been set aside; or a label file that was set aside, which has no
// version.
struct CheckpointEntry {
  std::string name;  // Its folder's name.
  CheckpointId id;
  bool is_partial = false;
  // Not OK: why it was set aside.
  absl::Status problem;
  // From its manifest. Absent: it was set aside, or its manifest was not read or is unreadable.
  struct Details {
    absl::Time commit_time;
    std::vector<std::string> tracks;  // Those that have a value in it.
    int64_t total_bytes = 0;
  };
  std::optional<Details> details;
  // Not OK: why it could not be read the last time. DATA_LOSS, CHECKPOINT_CORRUPT.
  // FAILED_PRECONDITION: a newer server has written it. UNAVAILABLE: the disk failed.
  absl::Status read_error;
};

CheckpointEntry::Details DetailsOf(const CheckpointManifest& checkpoint);

struct FoundLabel {
  CheckpointLabel label;
  // OK, or why the version cannot be read from the disk: OUT_OF_RANGE, VERSION_NOT_KEPT, or why it
  // was set aside.
  absl::Status checkpoint;
};

// OUT_OF_RANGE, VERSION_NOT_KEPT: the version of `label` is not on the disk.
absl::Status VersionGoneError(const CheckpointLabel& label);

// The content of the folder of one model's checkpoints when it was last listed, with the changes
// that the server has made since, and how many readers hold each checkpoint.
//
// Thread-safe. In memory only: no call waits for the disk.
class CheckpointIndex {
 public:
  explicit CheckpointIndex(std::string_view model_name) : model_name_(model_name) {}

  // False: the folder must be listed, and Replace() called, before the entries are used.
  bool is_current() const;
  void Invalidate();
  // Replaces all entries by a listing of the folder. `lost_labels`: not OK if a label file has been
  // set aside.
  void Replace(const std::vector<DirectoryEntry>& listing, LabelMap labels,
               const absl::Status& lost_labels);
  // Empties the index, because the model was deleted. It is then current.
  void Clear();

  // Newest first.
  std::vector<CheckpointEntry> All() const;
  std::optional<CheckpointEntry> Find(std::string_view name) const;
  // nullopt: there are no entries. CheckpointCounts::failed is 0.
  std::optional<CheckpointCounts> Count() const;
  void Put(CheckpointEntry entry);
  void Erase(std::string_view name);
  // These do nothing if the entry is gone.
  void SetDetails(std::string_view name, const CheckpointEntry::Details& details);
  // False: it is gone, or was set aside.
  bool SetUnread(std::string_view name, const absl::Status& status);

  // The checkpoint that LATEST named at the start although it was not there. It is listed as a bad
  // one until it is deleted or reappears.
  std::optional<CheckpointId> missing() const;
  void SetMissing(const CheckpointId& id);
  void ForgetMissing(const CheckpointId& id);

  // --- Readers ---

  // nullopt: there is no good checkpoint of that name. Otherwise Release() must follow.
  std::optional<CheckpointEntry> Hold(std::string_view name);
  // Holds these, whether they have an entry or not.
  void HoldAll(const std::vector<std::string>& names);
  void Release(const std::vector<std::string>& names);
  bool is_held(std::string_view name) const;
  // Removes the entry, which may be absent, so that it cannot be held from now on. False: it is
  // held, and stays. `taken`, unless null, receives the entry.
  bool EraseUnlessHeld(std::string_view name, std::optional<CheckpointEntry>* taken = nullptr);

  // --- Labels ---

  LabelMap labels() const;
  void SetLabels(LabelMap labels);
  // NOT_FOUND, LABEL_NOT_FOUND, listing the labels.
  absl::StatusOr<FoundLabel> FindLabel(std::string_view label) const;
  // DATA_LOSS: labels may have been lost, because their file was corrupt.
  absl::Status lost_labels() const;
  // Makes lost_labels() OK if no set-aside label file is left.
  void ClearLostLabelsIfDeleted();

 private:
  using Entries = std::map<std::string, CheckpointEntry, std::less<>>;

  const std::string model_name_;
  mutable absl::Mutex mu_;
  bool is_current_ ABSL_GUARDED_BY(mu_) = false;
  Entries entries_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, int, std::less<>> held_ ABSL_GUARDED_BY(mu_);  // How many readers each has.
  std::optional<CheckpointId> missing_ ABSL_GUARDED_BY(mu_);
  LabelMap labels_ ABSL_GUARDED_BY(mu_);
  absl::Status lost_labels_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_INDEX_H_
