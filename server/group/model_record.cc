// SPDX-License-Identifier: Apache-2.0
#include "server/group/model_record.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"
#include "ema/version_id.h"
#include "server/base/printable.h"
#include "server/format/json_file.h"
#include "server/format/record_json.h"

namespace ema::group {

// The templates of record_json.h look for these in the namespace of a record.
using ema::ReadJson;
using ema::to_json;

using State = ModelRecord::State;

std::string_view StateName(State state) {
  switch (state) {
    case State::kCreating:
      return "CREATING";
    case State::kActive:
      return "ACTIVE";
    case State::kDeleting:
      return "DELETING";
  }
  return "";
}

void to_json(Json& json, State state) { json = StateName(state); }

std::string ReadJson(const ParsedJson& json, State& state) {
  return ReadName(json, {State::kCreating, State::kActive, State::kDeleting}, state);
}

// Above the memory of any machine, and small enough that the sum of a model fits into int64_t.
constexpr int64_t kMaxPartitionBytes = int64_t{1} << 48;

void VisitFields(auto& io, MaybeConst<MemberRecord> auto& member) {
  io("boot", member.boot);
  io("address", member.address);
  io("device", member.device);
  io("memory_budget_bytes", member.memory_budget_bytes);
  io("program_version", member.program_version);
  io("protocol", member.protocol, 1);
}

void VisitFields(auto& io, MaybeConst<Partition> auto& partition) {
  io("member", partition.member);
  io("boot", partition.boot);
  io("first_tensor", partition.first_tensor);
  io("tensor_count", partition.tensor_count);
  io("memory_bytes", partition.memory_bytes, 0, kMaxPartitionBytes);
}

void VisitFields(auto& io, MaybeConst<GroupCheckpoint> auto& checkpoint) {
  io("incarnation", checkpoint.id.incarnation);
  io("version", checkpoint.id.version, 1, kMaxStoredCount);
  io("step", checkpoint.step, 0, kMaxStoredCount);
  io("total_bytes", checkpoint.total_bytes);
  io("keep", checkpoint.keep);
}

void VisitFields(auto& io, MaybeConst<GroupCopy> auto& copy) {
  io("incarnation", copy.id.incarnation);
  io("version", copy.id.version, 1, kMaxStoredCount);
  io("step", copy.step, 0, kMaxStoredCount);
}

void VisitFields(auto& io, MaybeConst<EarlierBase> auto& earlier) {
  io("incarnation", earlier.incarnation);
  io("base", earlier.base);
}

void VisitFields(auto& io, MaybeConst<ModelRecord> auto& record) {
  io("state", record.state);
  io("incarnation", record.incarnation, 1, kMaxStoredCount);
  io("base", record.base);
  io("earlier_bases", record.earlier_bases);
  io("fenced_run_epoch", record.fenced_run_epoch, 0, kMaxStoredCount);
  io("partitions", record.partitions);
  io("checkpoints", record.checkpoints);
  io.IfAny("copy", record.copy);
}

namespace {

std::string NameOf(const VersionId& id) {
  return absl::StrCat("version ", id.version, " of incarnation ", id.incarnation);
}

// The functions Find...Problem() return a problem as ReadJson() does.

std::string FindPartitionsProblem(const std::vector<Partition>& partitions) {
  if (partitions.empty()) return ".partitions is empty";
  absl::flat_hash_set<std::string_view> members;
  int64_t next_tensor = 0;
  for (size_t i = 0; i < partitions.size(); ++i) {
    const Partition& partition = partitions[i];
    const std::string place = absl::StrCat(".partitions[", i, "]");
    if (const absl::Status status = ValidateName("member", partition.member); !status.ok()) {
      return absl::StrCat(place, ": ", status.message());
    }
    if (!members.insert(partition.member).second) {
      return absl::StrCat(place, ".member: \"", partition.member, "\" is there twice");
    }
    if (partition.boot.empty()) return place + ".boot is empty";
    if (partition.first_tensor != next_tensor) {
      return absl::StrCat(place, ".first_tensor is ", partition.first_tensor, ", expected ",
                          next_tensor);
    }
    const int64_t most = kMaxTensorCount - next_tensor;
    if (partition.tensor_count < 1 || partition.tensor_count > most) {
      return absl::StrCat(place, ".tensor_count is ", partition.tensor_count, ", expected 1 to ",
                          most);
    }
    next_tensor += partition.tensor_count;
  }
  return "";
}

std::string FindCheckpointsProblem(const ModelRecord& record) {
  const std::vector<GroupCheckpoint>& checkpoints = record.checkpoints;
  for (size_t i = 0; i < checkpoints.size(); ++i) {
    const VersionId& id = checkpoints[i].id;
    const std::string place = absl::StrCat(".checkpoints[", i, "] is ", NameOf(id));
    if (id.incarnation > record.incarnation) {
      return absl::StrCat(place, ", but the model is in incarnation ", record.incarnation);
    }
    if (i > 0 && id <= checkpoints[i - 1].id) {
      return absl::StrCat(place, ", and comes after ", NameOf(checkpoints[i - 1].id));
    }
  }
  return "";
}

// Whether a version that this incarnation has made is on the disk, or has been copied.
bool HasOwnVersion(const ModelRecord& record) {
  const int64_t own = record.incarnation;
  return (!record.checkpoints.empty() && record.checkpoints.back().id.incarnation == own) ||
         (record.copy.has_value() && record.copy->id.incarnation == own);
}

std::string FindBaseProblem(const ModelRecord& record) {
  if (record.copy.has_value() && record.copy->id.incarnation != record.incarnation &&
      record.copy->id != record.base) {
    return absl::StrCat(".copy is ", NameOf(record.copy->id), ", expected one of incarnation ",
                        record.incarnation, ", or the base");
  }
  if (record.base.has_value() && !HasOwnVersion(record) && record.Find(*record.base) == nullptr &&
      !record.BeginsWithCopy()) {
    return absl::StrCat(".base is ", NameOf(*record.base), ", which is not in .checkpoints");
  }
  return "";
}

std::string FindEarlierBasesProblem(const ModelRecord& record) {
  for (size_t i = 0; i < record.earlier_bases.size(); ++i) {
    const EarlierBase& earlier = record.earlier_bases[i];
    const std::string place =
        absl::StrCat(".earlier_bases[", i, "] is of incarnation ", earlier.incarnation);
    if (earlier.incarnation >= record.incarnation) {
      return absl::StrCat(place, ", but the model is in incarnation ", record.incarnation);
    }
    if (i > 0 && earlier.incarnation <= record.earlier_bases[i - 1].incarnation) {
      return absl::StrCat(place, ", and comes after ", record.earlier_bases[i - 1].incarnation);
    }
    if (earlier.base.incarnation >= earlier.incarnation) {
      return absl::StrCat(place, ", but its base is ", NameOf(earlier.base));
    }
  }
  return "";
}

std::string FindProblem(const ModelRecord& record) {
  std::string problem = FindPartitionsProblem(record.partitions);
  if (problem.empty()) problem = FindCheckpointsProblem(record);
  if (problem.empty()) problem = FindBaseProblem(record);
  if (problem.empty()) problem = FindEarlierBasesProblem(record);
  return problem;
}

std::string FindProblem(const MemberRecord& record) {
  return record.boot.empty() ? ".boot is empty" : "";
}

std::string Message(std::string_view key, const std::string& problem) {
  // A problem may quote the record, which another program may have written.
  return EscapeUnprintable(absl::StrCat(std::string(key), ": ", absl::StripPrefix(problem, ".")));
}

template <typename Record>
std::string Format(const Record& record) {
  Json json = Json::object({{"format_version", kRecordFormatVersion}});
  json.update(Json(record));
  // A text of an option may be anything.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

template <typename Record>
absl::StatusOr<Record> Parse(std::string_view key, std::string_view text) {
  ParsedJson json;
  int64_t format_version = 0;
  Record record;
  std::string problem = ParseStrictJson(text, json);
  if (problem.empty()) {
    const auto it = json.find("format_version");
    problem = it == json.end() ? " is missing" : ReadJson(*it, format_version, 1);
    if (!problem.empty()) problem = "format_version" + problem;
  }
  if (problem.empty()) {
    if (format_version > kRecordFormatVersion) {
      return absl::FailedPreconditionError(
          absl::StrCat(std::string(key), ": written in format_version ", format_version,
                       "; this build reads only ", kRecordFormatVersion,
                       ": install the version of the other members, which is newer, on this one"));
    }
    json.erase("format_version");
    problem = ReadJson(json, record);
  }
  if (problem.empty()) problem = FindProblem(record);
  if (!problem.empty()) return absl::DataLossError(Message(key, problem));
  return record;
}

absl::Status CheckState(const ModelRecord& record, State expected) {
  if (record.state == expected) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("state: ", std::string(StateName(record.state)),
                                                    ", expected ",
                                                    std::string(StateName(expected))));
}

// Null: that incarnation began without a checkpoint, or nothing descends from it.
const EarlierBase* FindEarlierBase(const ModelRecord& record, int64_t incarnation) {
  const auto it =
      std::find_if(record.earlier_bases.begin(), record.earlier_bases.end(),
                   [&](const EarlierBase& one) { return one.incarnation == incarnation; });
  return it != record.earlier_bases.end() ? &*it : nullptr;
}

// Removes the bases that no history of a checkpoint, or of the current incarnation, needs.
void TrimEarlierBases(ModelRecord& record) {
  std::set<int64_t> needed;
  const auto add_history_of = [&](const VersionId& id) {
    const EarlierBase* earlier = FindEarlierBase(record, id.incarnation);
    while (earlier != nullptr && needed.insert(earlier->incarnation).second) {
      earlier = FindEarlierBase(record, earlier->base.incarnation);
    }
  };
  if (record.base.has_value()) add_history_of(*record.base);
  for (const GroupCheckpoint& checkpoint : record.checkpoints) add_history_of(checkpoint.id);
  std::erase_if(record.earlier_bases, [&](const EarlierBase& earlier) {
    const bool has_older_checkpoint =
        !record.checkpoints.empty() && record.checkpoints[0].id.incarnation < earlier.incarnation;
    return !has_older_checkpoint || !needed.contains(earlier.incarnation);
  });
}

// The newest checkpoint of the current history, other than `lost`. Null: there is none.
const GroupCheckpoint* FindNewest(const ModelRecord& record,
                                  const std::optional<VersionId>& lost = std::nullopt) {
  for (const VersionId& last : record.History()) {
    const auto it = std::find_if(
        record.checkpoints.rbegin(), record.checkpoints.rend(), [&](const GroupCheckpoint& one) {
          return one.id.incarnation == last.incarnation && one.id <= last && one.id != lost;
        });
    if (it != record.checkpoints.rend()) return &*it;
  }
  return nullptr;
}

bool HaveSamePlaces(const std::vector<Partition>& some, const std::vector<Partition>& others) {
  return std::equal(some.begin(), some.end(), others.begin(), others.end(),
                    [](const Partition& a, const Partition& b) {
                      return a.member == b.member && a.first_tensor == b.first_tensor &&
                             a.tensor_count == b.tensor_count;
                    });
}

// Whether the next incarnation should begin with the copy: its files are at certain members.
bool ShouldBeginWithCopy(const ModelRecord& record, const IncarnationRequest& request) {
  if (!record.copy.has_value() || request.base.has_value() || request.lost == record.copy->id) {
    return false;
  }
  const GroupCheckpoint* const durable = record.NewestCheckpoint();
  return (durable == nullptr || durable->id < record.copy->id) &&
         HaveSamePlaces(record.partitions, request.partitions);
}

// Nullopt: the model has neither a checkpoint nor a copy.
absl::StatusOr<std::optional<VersionId>> ChooseBase(const ModelRecord& record,
                                                    const IncarnationRequest& request) {
  if (ShouldBeginWithCopy(record, request)) return record.copy->id;
  const GroupCheckpoint* const durable = record.NewestCheckpoint();
  if (!request.base.has_value() && durable == nullptr && !request.lost.has_value()) {
    return std::nullopt;
  }
  if (request.base.has_value() && record.Find(*request.base) == nullptr) {
    return MakeError(absl::StatusCode::kNotFound, ErrorReason::kCheckpointNotFound,
                     absl::StrCat("base: there is no checkpoint of ", NameOf(*request.base)));
  }
  if (request.base.has_value() && request.base != request.lost) return request.base;
  if (const GroupCheckpoint* const newest = FindNewest(record, request.lost)) return newest->id;
  return MakeError(absl::StatusCode::kNotFound, ErrorReason::kCheckpointNotFound,
                   absl::StrCat("base: ", NameOf(*request.lost), " cannot be read, and the model ",
                                "has no older checkpoint"));
}

void ForgetCheckpoint(ModelRecord& record, const VersionId& id) {
  std::erase_if(record.checkpoints, [&](const GroupCheckpoint& one) { return one.id == id; });
}

int64_t TensorCount(const std::vector<Partition>& partitions) {
  int64_t count = 0;
  for (const Partition& partition : partitions) count += partition.tensor_count;
  return count;
}

}  // namespace

// --- Records ---

std::string FormatMemberRecord(const MemberRecord& record) { return Format(record); }

absl::StatusOr<MemberRecord> ParseMemberRecord(std::string_view key, std::string_view text) {
  return Parse<MemberRecord>(key, text);
}

absl::StatusOr<std::string> FormatModelRecord(std::string_view key, const ModelRecord& record) {
  if (const std::string problem = FindProblem(record); !problem.empty()) {
    return absl::InvalidArgumentError(Message(key, problem));
  }
  std::string text = Format(record);
  if (text.size() <= kMaxRecordBytes) return text;
  return absl::ResourceExhaustedError(
      absl::StrCat(std::string(key), ": the record would have ", text.size(), " bytes (limit ",
                   kMaxRecordBytes, ") with ", record.partitions.size(), " partitions and ",
                   record.checkpoints.size(), " checkpoints: delete checkpoints"));
}

absl::StatusOr<ModelRecord> ParseModelRecord(std::string_view key, std::string_view text) {
  return Parse<ModelRecord>(key, text);
}

int64_t TotalMemoryBytes(const std::vector<Partition>& partitions) {
  int64_t bytes = 0;
  for (const Partition& partition : partitions) bytes += partition.memory_bytes;
  return bytes;
}

const GroupCheckpoint* ModelRecord::Find(const VersionId& id) const {
  const auto it = std::find_if(checkpoints.begin(), checkpoints.end(),
                               [&](const GroupCheckpoint& one) { return one.id == id; });
  return it != checkpoints.end() ? &*it : nullptr;
}

const GroupCheckpoint* ModelRecord::NewestCheckpoint() const { return FindNewest(*this); }

bool ModelRecord::BeginsWithCopy() const {
  return base.has_value() && copy.has_value() && copy->id == *base && Find(*base) == nullptr;
}

std::vector<VersionId> ModelRecord::History() const {
  std::vector<VersionId> history = {{std::numeric_limits<int64_t>::max(), incarnation}};
  const VersionId* last = base.has_value() ? &*base : nullptr;
  while (last != nullptr) {
    history.push_back(*last);
    const EarlierBase* const earlier = FindEarlierBase(*this, last->incarnation);
    last = earlier != nullptr ? &earlier->base : nullptr;
  }
  return history;
}

std::optional<int64_t> ModelRecord::PartitionOf(std::string_view member,
                                                std::string_view boot) const {
  for (size_t i = 0; i < partitions.size(); ++i) {
    if (partitions[i].member == member && partitions[i].boot == boot) {
      return static_cast<int64_t>(i);
    }
  }
  return std::nullopt;
}

std::vector<Partition> ModelRecord::PartitionsWithBoot(std::string_view member,
                                                       std::string_view boot) const {
  std::vector<Partition> changed = partitions;
  for (Partition& partition : changed) {
    if (partition.member == member) partition.boot = boot;
  }
  return changed;
}

// --- Changes ---

absl::StatusOr<ModelRecord> Activate(ModelRecord record) {
  EMA_RETURN_IF_ERROR(CheckState(record, State::kCreating));
  record.state = State::kActive;
  return record;
}

absl::StatusOr<int64_t> NextIncarnation(int64_t record_incarnation, int64_t now_micros,
                                        int64_t newest_stored_incarnation) {
  const int64_t newest = std::max(record_incarnation, newest_stored_incarnation);
  if (newest >= kMaxStoredCount) {
    return absl::FailedPreconditionError(absl::StrCat("incarnation: ", newest,
                                                      " in the registry or in a checkpoint's name, "
                                                      "expected less than ",
                                                      kMaxStoredCount));
  }
  return std::max(newest + 1, now_micros);
}

absl::StatusOr<ModelRecord> BeginIncarnation(ModelRecord record,
                                             const IncarnationRequest& request) {
  EMA_RETURN_IF_ERROR(CheckState(record, State::kActive));
  if (request.newest_stored_incarnation > record.incarnation) {
    return absl::FailedPreconditionError(
        absl::StrCat("incarnation: ", record.incarnation, " in the registry, but the folder has a ",
                     "checkpoint of ", request.newest_stored_incarnation,
                     ": the registry has been restored from an old backup; restore a newer one, or "
                     "make the model's record again with `emactl group recover`"));
  }
  EMA_ASSIGN_OR_RETURN(const std::optional<VersionId> base, ChooseBase(record, request));
  if (request.lost.has_value()) ForgetCheckpoint(record, *request.lost);
  const int64_t tensor_count = TensorCount(record.partitions);
  if (const int64_t count = TensorCount(request.partitions); count != tensor_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("partitions: they have ", count, " tensors, expected ", tensor_count));
  }
  if (record.base.has_value()) record.earlier_bases.push_back({record.incarnation, *record.base});
  EMA_ASSIGN_OR_RETURN(record.incarnation, NextIncarnation(record.incarnation, request.now_micros,
                                                           request.newest_stored_incarnation));
  if (base.has_value()) record.base = base;
  if (!record.BeginsWithCopy()) record.copy.reset();
  record.fenced_run_epoch = std::max(record.fenced_run_epoch, request.fenced_run_epoch);
  record.partitions = request.partitions;
  TrimEarlierBases(record);
  return record;
}

absl::StatusOr<ModelRecord> AddCheckpoint(ModelRecord record, int64_t incarnation,
                                          const GroupCheckpoint& checkpoint) {
  EMA_RETURN_IF_ERROR(CheckState(record, State::kActive));
  if (incarnation != record.incarnation) {
    return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced,
                     absl::StrCat("incarnation: ", NameOf(checkpoint.id), " was saved in ",
                                  incarnation, ", but ", record.incarnation, " has begun"));
  }
  const auto it =
      std::lower_bound(record.checkpoints.begin(), record.checkpoints.end(), checkpoint.id,
                       [](const GroupCheckpoint& one, const VersionId& id) { return one.id < id; });
  if (it == record.checkpoints.end() || it->id != checkpoint.id) {
    record.checkpoints.insert(it, checkpoint);
    return record;
  }
  if (it->step != checkpoint.step || it->total_bytes != checkpoint.total_bytes) {
    return absl::AlreadyExistsError(absl::StrCat("checkpoint: ", NameOf(checkpoint.id), " at step ",
                                                 checkpoint.step, " with ", checkpoint.total_bytes,
                                                 " bytes was saved, but the record has it at step ",
                                                 it->step, " with ", it->total_bytes, " bytes"));
  }
  it->keep = it->keep || checkpoint.keep;
  return record;
}

absl::StatusOr<ModelRecord> SetCopy(ModelRecord record, const GroupCopy& copy) {
  EMA_RETURN_IF_ERROR(CheckState(record, State::kActive));
  if (!record.copy.has_value() || record.copy->id < copy.id) record.copy = copy;
  return record;
}

absl::StatusOr<ModelRecord> RemoveCheckpoint(ModelRecord record, const VersionId& id) {
  EMA_RETURN_IF_ERROR(CheckState(record, State::kActive));
  const GroupCheckpoint* const durable = record.NewestCheckpoint();
  if (durable != nullptr && durable->id == id) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kCheckpointInUse,
                     absl::StrCat("checkpoint: ", NameOf(id),
                                  " is the one from which a restarted member would continue"));
  }
  ForgetCheckpoint(record, id);
  return record;
}

}  // namespace ema::group
