// SPDX-License-Identifier: Apache-2.0
//
// The records that a group keeps in its registry, as JSON: one of each member and one of each
// model; and the changes of a model's record.
//
// Parse...() returns FAILED_PRECONDITION for a record in another format, and DATA_LOSS for one that
// is damaged: a field is missing, unknown, doubled or out of range. Messages begin with the key and
// name the field.
#ifndef EMA_SERVER_GROUP_MODEL_RECORD_H_
#define EMA_SERVER_GROUP_MODEL_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ema/version_id.h"

namespace ema::group {

// The format of the records that this build writes and reads.
inline constexpr int64_t kRecordFormatVersion = 1;
// The longest record. etcd accepts 1.5 MiB; an object of Kubernetes has 1 MiB with all else in it.
inline constexpr size_t kMaxRecordBytes = 1'000'000;

// A server process of the group. The value of the key members/NAME, which has a lease.
struct MemberRecord {
  std::string boot;     // Identifies one start of the server: RandomHex(4).
  std::string address;  // HOST:PORT, for clients and the other members.
  std::string device;   // Such as "cuda:0".
  int64_t memory_budget_bytes = 0;
  std::string program_version;
  int64_t protocol = 0;  // The version of the messages between members.

  friend bool operator==(const MemberRecord&, const MemberRecord&) = default;
};

std::string FormatMemberRecord(const MemberRecord& record);
absl::StatusOr<MemberRecord> ParseMemberRecord(std::string_view key, std::string_view text);

// Consecutive tensors of a model, kept by one member. The home of the model has partition 0.
struct Partition {
  std::string member;
  std::string boot;          // The boot of the process that has joined, or must join.
  int64_t first_tensor = 0;  // An index in the manifest.
  int64_t tensor_count = 0;
  int64_t memory_bytes = 0;  // The part of the member's memory budget that its tracks need.

  friend bool operator==(const Partition&, const Partition&) = default;
};

// The sum of Partition::memory_bytes.
int64_t TotalMemoryBytes(const std::vector<Partition>& partitions);

// A version that all partitions have on the disk.
struct GroupCheckpoint {
  VersionId id;
  int64_t step = 0;
  int64_t total_bytes = 0;
  bool keep = false;  // Retention never removes it.

  friend bool operator==(const GroupCheckpoint&, const GroupCheckpoint&) = default;
};

// A version that the members have outside the data directory: copy_directory.h.
struct GroupCopy {
  VersionId id;
  int64_t step = 0;

  friend bool operator==(const GroupCopy&, const GroupCopy&) = default;
};

// The checkpoint, or copy, that an earlier incarnation of a model began with.
struct EarlierBase {
  int64_t incarnation = 0;
  VersionId base;

  friend bool operator==(const EarlierBase&, const EarlierBase&) = default;
};

// What a group has decided about a model. The value of the key models/NAME; every change replaces
// the value, provided that it is the one that was read.
struct ModelRecord {
  enum class State {
    kCreating,  // The members reserve memory.
    kActive,
    kDeleting,
  };
  State state = State::kCreating;
  int64_t incarnation = 0;
  // The checkpoint, or the copy, that all partitions load at the beginning of the incarnation;
  // absent: none, the model has no version then. Once the incarnation has a checkpoint or a copy of
  // its own, the base may be removed.
  std::optional<VersionId> base;
  // In the order of the incarnations: only those from which the current one, or a checkpoint,
  // descends.
  std::vector<EarlierBase> earlier_bases;
  // The newest run epoch that a rollback has fenced; 0: none.
  int64_t fenced_run_epoch = 0;
  // Together they have all tensors, in order. No member has two.
  std::vector<Partition> partitions;
  std::vector<GroupCheckpoint> checkpoints;  // In the order of their commits.
  // The newest version of the current history that the members have copied; absent: none. It may be
  // older than the newest checkpoint.
  std::optional<GroupCopy> copy;

  // The checkpoint of that version; null: there is none.
  const GroupCheckpoint* Find(const VersionId& id) const;
  // The newest checkpoint of the current branch, see History(). Checkpoints that a rollback has
  // discarded may be newer, but are of earlier incarnations. Null: there is none.
  const GroupCheckpoint* NewestCheckpoint() const;
  // Whether the base is `copy`, and not a checkpoint.
  bool BeginsWithCopy() const;
  // Whether a crash takes the model back to a checkpoint or a copy. False: it is lost.
  bool SurvivesCrash() const { return copy.has_value() || NewestCheckpoint() != nullptr; }
  // The current branch, the versions that led to the newest one: the last of them in each
  // incarnation, newest incarnation first. Later versions of an earlier incarnation have been
  // discarded: by a rollback, or because a crash came before they were saved.
  std::vector<VersionId> History() const;
  // The partition of that process; nullopt: it has none. A process of another boot, which may be an
  // earlier process of the same member, has none.
  std::optional<int64_t> PartitionOf(std::string_view member, std::string_view boot) const;
  bool IsHome(std::string_view member, std::string_view boot) const {
    return PartitionOf(member, boot) == 0;
  }
  // The partitions, with the member's boot replaced: for BeginIncarnation(), when a member has
  // restarted. The same as `partitions` if the member has none, or has that boot there.
  std::vector<Partition> PartitionsWithBoot(std::string_view member, std::string_view boot) const;

  friend bool operator==(const ModelRecord&, const ModelRecord&) = default;
};

// "CREATING", "ACTIVE", "DELETING".
std::string_view StateName(ModelRecord::State state);

// INVALID_ARGUMENT: a text that ParseModelRecord() would call damaged. RESOURCE_EXHAUSTED: it is
// longer than kMaxRecordBytes. Messages begin with the key.
absl::StatusOr<std::string> FormatModelRecord(std::string_view key, const ModelRecord& record);
absl::StatusOr<ModelRecord> ParseModelRecord(std::string_view key, std::string_view text);

// --- Changes of a model's record ---
//
// Each returns the next record; FormatModelRecord() checks it. FAILED_PRECONDITION: the record is
// in another state. Messages do not name the model.

// All members have reserved the memory of the model: CREATING becomes ACTIVE.
absl::StatusOr<ModelRecord> Activate(ModelRecord record);

// A number for an incarnation that none has had, also if the registry or the clock went back: at
// least the current time in microseconds, and higher than that of the record and than any in the
// group's folder, each 0 if there is none. FAILED_PRECONDITION: there is no such number.
absl::StatusOr<int64_t> NextIncarnation(int64_t record_incarnation, int64_t now_micros,
                                        int64_t newest_stored_incarnation);

struct IncarnationRequest {
  // As for NextIncarnation().
  int64_t now_micros = 0;
  int64_t newest_stored_incarnation = 0;
  std::vector<Partition> partitions;
  // A checkpoint of the record. Nullopt: the copy if it is newer than NewestCheckpoint(), and every
  // partition stays at its member; else NewestCheckpoint().
  std::optional<VersionId> base;
  // A checkpoint, or the copy, that cannot be read. It is removed from the record; if it would be
  // the base, the newest other checkpoint of the current history is.
  std::optional<VersionId> lost;
  int64_t fenced_run_epoch = 0;  // Runs up to this epoch may not continue; 0: all may.
};
// Begins the next incarnation of an ACTIVE model: all versions in memory end, and the partitions
// load the base. A copy is as good a base as a checkpoint: every partition has published its
// version, so no partition can have decided otherwise. The record keeps the copy only if it is the
// base. NOT_FOUND, CHECKPOINT_NOT_FOUND: there is no such base, or no other than the lost
// checkpoint. FAILED_PRECONDITION: the registry is older than the group's folder. INVALID_ARGUMENT:
// the partitions have another number of tensors than before.
absl::StatusOr<ModelRecord> BeginIncarnation(ModelRecord record, const IncarnationRequest& request);

// All partitions have the checkpoint on the disk, and it has been verified. `incarnation`: the one
// in which it was saved. If the record has it already, only GroupCheckpoint::keep is set. ABORTED,
// FENCED: another incarnation. ALREADY_EXISTS: one of that version differs.
absl::StatusOr<ModelRecord> AddCheckpoint(ModelRecord record, int64_t incarnation,
                                          const GroupCheckpoint& checkpoint);
// All members have the files of `copy`, a version of the current incarnation. It replaces the
// record's copy, unless that is newer.
absl::StatusOr<ModelRecord> SetCopy(ModelRecord record, const GroupCopy& copy);
// OK if there is none. After this change its files can be removed. FAILED_PRECONDITION,
// CHECKPOINT_IN_USE: it is NewestCheckpoint().
absl::StatusOr<ModelRecord> RemoveCheckpoint(ModelRecord record, const VersionId& id);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_MODEL_RECORD_H_
