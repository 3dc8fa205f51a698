// SPDX-License-Identifier: Apache-2.0
#include "server/group/next_incarnation.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_folder.h"
#include "server/checkpoint/folder_files.h"
#include "server/format/checkpoint_name.h"

namespace ema::group {
namespace {

absl::Status CheckHasLatest(CheckpointStore& checkpoints, const std::string& model,
                            const ModelRecord& record) {
  EMA_ASSIGN_OR_RETURN(const std::optional<std::string> unrecorded,
                       FindUnrecordedLatest(checkpoints, model, record));
  if (!unrecorded.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "model \"", model, "\": the registry does not have its newest checkpoint, ", *unrecorded,
      ": the registry has been restored from an old backup; restore a newer one, or make the ",
      "model's record again with `emactl group recover`"));
}

// The step of the base of `record`, which has one.
int64_t BaseStep(const ModelRecord& record) {
  return record.BeginsWithCopy() ? record.copy->step : record.Find(*record.base)->step;
}

// Erases the record of a model that has neither a checkpoint nor a copy. Does nothing if it has
// changed since it had `revision`.
absl::Status EraseLost(Member& member, const std::string& model, int64_t revision,
                       std::string_view reason, const LogSink& log) {
  const absl::Status erased = member.Erase(model, revision);
  if (absl::IsAborted(erased)) return absl::OkStatus();
  EMA_RETURN_IF_ERROR(erased);
  LogTo(log, LogLevel::kWarning, "model lost",
        {{"model", model}, {"member", member.name()}, {"reason", reason}});
  return absl::OkStatus();
}

}  // namespace

bool NamesEarlierProcess(const Member& member, const ModelRecord& record) {
  if (record.state != ModelRecord::State::kActive) return false;
  if (!member.AddressOf(member.name(), member.boot()).has_value()) return false;
  return std::any_of(record.partitions.begin(), record.partitions.end(),
                     [&](const Partition& partition) {
                       return partition.member == member.name() && partition.boot != member.boot();
                     });
}

absl::Status BeginIncarnationAfterRestart(Member& member, CheckpointStore* checkpoints,
                                          const std::string& model, const ModelRecord& record,
                                          const LogSink& log) {
  EMA_ASSIGN_OR_RETURN(const auto stored, member.Read(model));
  if (!stored.has_value() || stored->record != record) return absl::OkStatus();
  if (checkpoints != nullptr) {
    EMA_RETURN_IF_ERROR(CheckHasLatest(*checkpoints, model, record));
  }
  if (!record.SurvivesCrash()) {
    return EraseLost(member, model, stored->revision,
                     "this member has restarted, and the model had no checkpoint", log);
  }
  IncarnationRequest request{.partitions = record.PartitionsWithBoot(member.name(), member.boot())};
  EMA_ASSIGN_OR_RETURN(request.newest_stored_incarnation,
                       NewestStoredIncarnation(checkpoints, model));
  request.now_micros = absl::ToUnixMicros(absl::Now());
  EMA_ASSIGN_OR_RETURN(const ModelRecord next, BeginIncarnation(record, request));
  const absl::Status written = member.Write(model, next, stored->revision).status();
  if (absl::IsAborted(written)) return absl::OkStatus();
  EMA_RETURN_IF_ERROR(written);
  LogTo(log, LogLevel::kWarning,
        next.BeginsWithCopy() ? "model returns to its newest copy"
                              : "model returns to its newest checkpoint",
        {{"model", model},
         {"member", member.name()},
         {"reason", "this member has restarted"},
         {"incarnation", next.incarnation},
         {"version", next.base->version},
         {"step", BaseStep(next)}});
  return absl::OkStatus();
}

absl::Status BeginIncarnationWithoutBase(Member& member, CheckpointStore& checkpoints,
                                         const std::string& model, const ModelRecord& record,
                                         const absl::Status& problem, const LogSink& log) {
  EMA_ASSIGN_OR_RETURN(const auto stored, member.Read(model));
  if (!stored.has_value() || stored->record != record) return absl::OkStatus();
  const bool is_copy = record.BeginsWithCopy();
  const GroupCheckpoint* const checkpoint = record.Find(*record.base);
  if (is_copy && record.NewestCheckpoint() == nullptr) {
    return EraseLost(
        member, model, stored->revision,
        absl::StrCat("it had no checkpoint, and its copy cannot be loaded: ", problem.message()),
        log);
  }
  if (!is_copy && checkpoint == nullptr) return absl::OkStatus();
  IncarnationRequest request{.partitions = record.partitions, .lost = record.base};
  EMA_ASSIGN_OR_RETURN(request.newest_stored_incarnation,
                       NewestStoredIncarnation(&checkpoints, model));
  request.now_micros = absl::ToUnixMicros(absl::Now());
  EMA_ASSIGN_OR_RETURN(const ModelRecord next, BeginIncarnation(record, request));
  const std::string name =
      CheckpointName({record.base->incarnation, record.base->version, BaseStep(record)});
  if (!is_copy) {
    // Another member may have set it aside.
    const absl::Status set_aside = checkpoints.FolderOf(model).SetAsideCorrupt(name, problem);
    if (!absl::IsNotFound(set_aside)) EMA_RETURN_IF_ERROR(set_aside);
  }
  const absl::Status written = member.Write(model, next, stored->revision).status();
  if (absl::IsAborted(written)) return absl::OkStatus();
  EMA_RETURN_IF_ERROR(written);
  LogTo(log, LogLevel::kError,
        is_copy ? "copy lost; model returns to its newest checkpoint"
                : "model returns to an older checkpoint",
        {{"model", model},
         {"member", member.name()},
         {is_copy ? "lost_copy" : "lost_checkpoint", name},
         {"error", problem},
         {"incarnation", next.incarnation},
         {"version", next.base->version},
         {"step", BaseStep(next)}});
  return absl::OkStatus();
}

absl::StatusOr<int64_t> NewestStoredIncarnation(CheckpointStore* checkpoints,
                                                const std::string& model) {
  if (checkpoints == nullptr) return 0;
  return checkpoints->data().NewestIncarnation(model);
}

absl::StatusOr<std::optional<std::string>> FindUnrecordedLatest(CheckpointStore& checkpoints,
                                                                const std::string& model,
                                                                const ModelRecord& record) {
  const FolderFiles files(checkpoints.data(), model);
  EMA_ASSIGN_OR_RETURN(const std::optional<std::string> name, files.ReadLatestName());
  if (!name.has_value()) return std::nullopt;
  const std::optional<CheckpointId> id = ParseCheckpointName(*name);
  if (!id.has_value() || record.Find(id->version_id()) != nullptr) return std::nullopt;
  // One that is set aside is no longer in the record.
  EMA_ASSIGN_OR_RETURN(const bool exists, files.Has(*name));
  return exists ? name : std::nullopt;
}

}  // namespace ema::group
