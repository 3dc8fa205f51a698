// SPDX-License-Identifier: Apache-2.0
#include "server/group/registry_follower.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_load.h"
#include "server/checkpoint/folder_files.h"
#include "server/core/model.h"
#include "server/format/verify.h"
#include "server/group/group_errors.h"
#include "server/group/next_incarnation.h"
#include "server/group/part_files.h"

namespace ema::group {
namespace {

bool IsNamed(const HostedPartition& partition, const Member& member, const ModelRecord& record) {
  return record.incarnation == partition.id().incarnation &&
         record.PartitionOf(member.name(), member.boot()) == partition.id().partition;
}

// Nullopt: there is no such model.
absl::StatusOr<std::optional<ModelRecord>> CurrentRecord(Member& member, const std::string& model,
                                                         const HostedPartition& partition) {
  std::optional<ModelRecord> cached = member.model(model);
  if (cached.has_value() && IsNamed(partition, member, *cached)) return cached;
  // The cache may be older than the reservation.
  EMA_ASSIGN_OR_RETURN(const auto stored, member.Read(model));
  return stored.has_value() ? std::optional(stored->record) : std::nullopt;
}

}  // namespace

void RegistryFollower::Start(Member* member, std::function<void()> on_change) {
  const std::function<void()> wake = [this, on_change = std::move(on_change)] {
    reconciling_.Wake();
    on_change();
  };
  member->SetOnChange(wake);
  wake();
}

void RegistryFollower::Stop() {
  StopLoading();
  reconciling_.Stop();
  loading_.Stop();
}

absl::Status RegistryFollower::LoadError(std::string_view model) const {
  absl::MutexLock lock(&mu_);
  const auto found = load_errors_.find(model);
  return found != load_errors_.end() ? found->second : absl::OkStatus();
}

// --- The registry's changes ---

absl::Status RegistryFollower::Reconcile() {
  const absl::StatusOr<Member*> found = hosted_.GetMember();
  if (!found.ok()) return absl::OkStatus();  // The server is stopping.
  Member& member = **found;
  const std::map<std::string, ModelRecord> models = member.models();
  history_.Observe(member.members(), models, absl::Now());
  absl::Status result;
  bool must_load = false;
  for (const auto& [name, record] : models) {
    if (NamesEarlierProcess(member, record)) {
      const absl::Status begun =
          BeginIncarnationAfterRestart(member, checkpoints_, name, record, log_);
      if (absl::IsFailedPrecondition(begun)) NoteLoadEnded(name, record, begun);
      result.Update(begun);
    }
    must_load |= MustLoad(member, name, record);
  }
  {
    absl::MutexLock lock(&hosted_.change_mu());
    for (const auto& [name, hosted] : hosted_.All()) {
      result.Update(FollowRecord(member, name, *hosted->partition));
    }
  }
  if (must_load) loading_.Wake();
  // Last: it may take seconds. After an error the next change of the registry tries it again.
  if (const absl::Status removed = copies_.RemoveUnneeded(member.models()); !removed.ok()) {
    LogTo(log_, LogLevel::kWarning, "copies not removed", {{"error", removed}});
  }
  return result;
}

absl::Status RegistryFollower::FollowRecord(Member& member, const std::string& model,
                                            HostedPartition& partition) {
  EMA_ASSIGN_OR_RETURN(const std::optional<ModelRecord> record,
                       CurrentRecord(member, model, partition));
  const int64_t incarnation = partition.id().incarnation;
  if (!record.has_value() || record->state == ModelRecord::State::kDeleting) {
    hosted_.Drop(model, incarnation, "has been deleted");
  } else if (!IsNamed(partition, member, *record)) {
    hosted_.Drop(model, incarnation, /*why_deleted=*/"");
  } else if (record->state == ModelRecord::State::kActive) {
    // LoadPartition() activates one that has a base.
    if (!record->base.has_value()) partition.Activate();
    const GroupCheckpoint* const durable = record->NewestCheckpoint();
    if (durable == nullptr || !partition.is_active() || partition.is_home()) {
      return absl::OkStatus();
    }
    // The home has saved, or removed, a checkpoint.
    if (checkpoints_ != nullptr) checkpoints_->FolderOf(model).Refresh();
    EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> here, store_.Get(model));
    here->durable().SetVersion(durable->id, durable->step, /*settings_revision=*/std::nullopt);
  }
  return absl::OkStatus();
}

// --- Loading ---

absl::Status RegistryFollower::LoadPartitions() {
  const absl::StatusOr<Member*> member = hosted_.GetMember();
  if (!member.ok()) return absl::OkStatus();  // The server is stopping.
  absl::Status result;
  for (const auto& [name, record] : (*member)->models()) {
    if (!MustLoad(**member, name, record)) continue;
    const absl::Status status = LoadPartition(**member, name, record);
    if (is_stopping_.load(std::memory_order_relaxed)) return absl::OkStatus();
    NoteLoadEnded(name, record, status);
    HandleLostBase(**member, name, record, status);
    result.Update(status);
  }
  return result;
}

void RegistryFollower::NoteLoadEnded(const std::string& model, const ModelRecord& record,
                                     const absl::Status& status) {
  const std::shared_ptr<const HostedModel> hosted = hosted_.Find(model);
  {
    absl::MutexLock lock(&mu_);
    // The error of a partition that has been made is in that partition.
    load_errors_[model] = hosted == nullptr ? status : absl::OkStatus();
  }
  if (status.ok()) return;
  LogTo(log_, LogLevel::kError, "partition not loaded",
        {{"model", model}, {"incarnation", record.incarnation}, {"error", status}});
  if (hosted != nullptr) hosted->partition->SetLoadError(status);
}

void RegistryFollower::HandleLostBase(Member& member, const std::string& model,
                                      const ModelRecord& record, const absl::Status& problem) {
  if (checkpoints_ == nullptr) return;
  // On a network's file system another server may see a new folder late.
  const bool is_missing = absl::IsNotFound(problem) && record.IsHome(member.name(), member.boot());
  if (!absl::IsDataLoss(problem) && !is_missing) return;
  const absl::Status begun =
      BeginIncarnationWithoutBase(member, *checkpoints_, model, record, problem, log_);
  if (begun.ok()) return;
  LogTo(log_, LogLevel::kError, "model not returned to an older checkpoint",
        {{"model", model}, {"incarnation", record.incarnation}, {"error", begun}});
}

bool RegistryFollower::MustLoad(const Member& member, const std::string& model,
                                const ModelRecord& record) const {
  if (record.state != ModelRecord::State::kActive || !record.base.has_value() ||
      !record.PartitionOf(member.name(), member.boot()).has_value()) {
    return false;
  }
  const std::shared_ptr<const HostedModel> hosted = hosted_.Find(model);
  if (hosted == nullptr) return true;
  const HostedPartition& partition = *hosted->partition;
  return partition.id().incarnation < record.incarnation ||
         (partition.id().incarnation == record.incarnation && !partition.is_active());
}

absl::Status RegistryFollower::LoadPartition(Member& member, const std::string& model,
                                             const ModelRecord& record) {
  if (checkpoints_ == nullptr) return NoDataDirError();
  const auto index = static_cast<size_t>(*record.PartitionOf(member.name(), member.boot()));
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest base, ReadBase(model, record, index));
  std::shared_ptr<HostedPartition> partition;
  {
    absl::MutexLock lock(&hosted_.change_mu());
    const auto stored = member.Read(model);
    if (!stored.ok()) return RegistryError(stored.status());
    // Otherwise the watch reports the next record.
    if (!stored->has_value() || (*stored)->record.incarnation != record.incarnation ||
        (*stored)->record.state != ModelRecord::State::kActive) {
      return absl::OkStatus();
    }
    if (const auto hosted = hosted_.Find(model); hosted != nullptr) partition = hosted->partition;
    if (partition != nullptr && partition->id().incarnation != record.incarnation) {
      hosted_.Drop(model, partition->id().incarnation, /*why_deleted=*/"");
      partition = nullptr;
    }
    if (partition == nullptr) {
      EMA_ASSIGN_OR_RETURN(
          partition, hosted_.Add(member, record, static_cast<int64_t>(index), ConfigOf(base)));
    }
  }
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> here, store_.Get(model));
  if (here->is_home()) BeginIncarnation(model, record);
  const absl::Time begin = absl::Now();
  const PauseHook rest = [this, &here] {
    if (is_stopping_.load(std::memory_order_relaxed)) return DrainingError();
    return here->CheckOpen();  // A newer incarnation has begun.
  };
  if (record.BeginsWithCopy()) {
    EMA_RETURN_IF_ERROR(copies_.LoadPart(record, index, *here, rest));
    if (here->is_home()) {
      EMA_RETURN_IF_ERROR(RestoreKeptTime(FolderFiles(checkpoints_->data(), model), *here));
    }
  } else {
    EMA_RETURN_IF_ERROR(LoadPart(*checkpoints_, base, record, index, *here, rest));
  }
  partition->Activate();
  LogTo(log_, LogLevel::kInfo, "partition loaded",
        {{"model", model},
         {"incarnation", record.incarnation},
         {"partition", index},
         {"version", base.record.number},
         {"step", base.record.step},
         {"seconds", absl::ToDoubleSeconds(absl::Now() - begin)}});
  return absl::OkStatus();
}

absl::StatusOr<CheckpointManifest> RegistryFollower::ReadBase(const std::string& model,
                                                              const ModelRecord& record,
                                                              size_t partition) {
  if (record.BeginsWithCopy()) {
    return copies_.LoadManifest(model, record, partition, /*pause=*/[this] {
      return is_stopping_.load(std::memory_order_relaxed) ? DrainingError() : absl::OkStatus();
    });
  }
  const GroupCheckpoint* const listed = record.Find(*record.base);
  if (listed == nullptr) {  // The registry was restored from a backup.
    return absl::DataLossError(absl::StrCat("model \"", model, "\": version ", record.base->version,
                                            ", which it must load, is not among the checkpoints of "
                                            "its record in the registry"));
  }
  return ReadGroupCheckpoint(*checkpoints_, model, *listed);
}

void RegistryFollower::BeginIncarnation(const std::string& model, const ModelRecord& record) {
  std::optional<CheckpointId> newest;
  if (const GroupCheckpoint* const durable = record.NewestCheckpoint(); durable != nullptr) {
    newest = {durable->id.incarnation, durable->id.version, durable->step};
  }
  std::vector<VersionId> recorded;
  for (const GroupCheckpoint& checkpoint : record.checkpoints) recorded.push_back(checkpoint.id);
  const absl::StatusOr<std::vector<std::string>> set_aside =
      checkpoints_->FolderOf(model).BeginIncarnation(newest, recorded);
  if (!set_aside.ok()) {
    LogTo(log_, LogLevel::kWarning, "checkpoint folder does not follow the record",
          {{"model", model}, {"error", set_aside.status()}});
    return;
  }
  for (const std::string& name : *set_aside) {
    LogTo(log_, LogLevel::kWarning, "checkpoint set aside",
          {{"model", model},
           {"checkpoint", name},
           {"reason", "the registry does not have it: a server crashed while it was saved"}});
  }
}

}  // namespace ema::group
