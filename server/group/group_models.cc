// SPDX-License-Identifier: Apache-2.0
#include "server/group/group_models.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/format/verify.h"
#include "server/group/convert.h"
#include "server/group/fan_out.h"
#include "server/group/part_files.h"
#include "server/group/partition_config.h"
#include "server/group/placement.h"
#include "server/group/reform.h"
#include "server/rpc/convert.h"

namespace ema::group {
namespace {

// A creation that has not ended after this time was interrupted by a crash.
constexpr absl::Duration kMaxCreationTime = absl::Seconds(60);
// Making the tables of many tensors takes long.
constexpr absl::Duration kReserveTimeout = absl::Seconds(30);
constexpr absl::Duration kBusyDelay = absl::Milliseconds(50);

absl::Status Busy(std::string_view model, std::string_view what) {
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kSessionBusy,
                   absl::StrCat("model \"", std::string(model), "\" ", std::string(what)),
                   kBusyDelay);
}

absl::Status NotFound(std::string_view model) {
  EMA_RETURN_IF_ERROR(ValidateName("model", model));
  return MakeError(absl::StatusCode::kNotFound, ErrorReason::kModelNotFound,
                   absl::StrCat("model \"", std::string(model), "\" does not exist"));
}

absl::Status Fenced(std::string_view model, std::string_view why) {
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced,
                   absl::StrCat("model \"", std::string(model), "\": ", std::string(why)));
}

absl::Status RegistryError(const absl::Status& status) {
  if (!absl::IsUnavailable(status)) return status;
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kRegistryAway,
                   std::string(status.message()), absl::Seconds(1));
}

int64_t Sum(const std::vector<int64_t>& values) {
  int64_t sum = 0;
  for (const int64_t value : values) sum += value;
  return sum;
}

absl::Status NoDataDir() {
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoDataDir,
                   "the server was started without --data-dir");
}

bool IsNamed(const HostedPartition& partition, const Member& member, const ModelRecord& record) {
  return record.incarnation == partition.id().incarnation &&
         record.PartitionOf(member.name(), member.boot()) == partition.id().partition;
}

}  // namespace

void GroupModels::Start(Member* member) {
  {
    absl::MutexLock lock(&mu_);
    member_ = member;
  }
  member->SetOnChange([this] { reconciling_.Wake(); });
  reconciling_.Wake();
}

void GroupModels::Stop() {
  {
    absl::MutexLock lock(&mu_);
    is_stopping_.store(true, std::memory_order_relaxed);
    stop_wait_.WakeAll();
  }
  reconciling_.Stop();
  loading_.Stop();
  absl::MutexLock change_lock(&change_mu_);
  absl::MutexLock lock(&mu_);
  member_ = nullptr;
  for (const auto& [name, hosted] : hosted_) hosted.partition->Stop();
}

absl::StatusOr<Member*> GroupModels::GetMember() const {
  absl::MutexLock lock(&mu_);
  if (member_ != nullptr) return member_;
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                   "this server has not joined its group, or is leaving it", absl::Seconds(1));
}

std::shared_ptr<HostedPartition> GroupModels::Find(std::string_view model) const {
  absl::MutexLock lock(&mu_);
  const auto found = hosted_.find(model);
  return found != hosted_.end() ? found->second.partition : nullptr;
}

// --- Routing ---

absl::Status GroupModels::CheckHome(std::string_view model) const {
  EMA_ASSIGN_OR_RETURN(const Member* const member, GetMember());
  absl::MutexLock lock(&mu_);
  // The cache of the registry may not have the record yet.
  if (const auto found = hosted_.find(model); found != hosted_.end()) {
    const HostedPartition& partition = *found->second.partition;
    if (!partition.is_home()) return RedirectLocked(model, partition.partitions());
    EMA_RETURN_IF_ERROR(partition.CheckLoaded());
    return partition.is_active() ? absl::OkStatus() : Busy(model, "is being created");
  }
  const std::optional<ModelRecord> record = member->model(model);
  if (!record.has_value() || record->state == ModelRecord::State::kDeleting) {
    return NotFound(model);
  }
  if (record->state == ModelRecord::State::kCreating) return Busy(model, "is being created");
  EMA_RETURN_IF_ERROR(CheckNothingToLoadLocked(model, *member));
  return RedirectLocked(model, record->partitions);
}

absl::Status GroupModels::RedirectLocked(std::string_view model,
                                         const std::vector<Partition>& partitions) const {
  EMA_RETURN_IF_ERROR(CheckRunsLocked(model, partitions, 0));
  absl::Status error =
      MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotHome,
                absl::StrCat("model \"", std::string(model), "\": its home is member \"",
                             partitions[0].member, "\""));
  SetGroupHint(error, {.home = AddressLocked(partitions[0])});
  return error;
}

std::string GroupModels::AddressLocked(const Partition& partition) const {
  if (member_ == nullptr) return "";
  return member_->AddressOf(partition.member, partition.boot).value_or("");
}

absl::Status GroupModels::CheckRunsLocked(std::string_view model,
                                          const std::vector<Partition>& partitions,
                                          size_t partition) const {
  const Partition& of = partitions[partition];
  if (!AddressLocked(of).empty()) return absl::OkStatus();
  const auto since = missing_since_.find({of.member, of.boot});
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                   absl::StrCat("model \"", std::string(model), "\": the process of partition ",
                                partition, ", member \"", of.member, "\", is not in the registry",
                                since == missing_since_.end()
                                    ? ""
                                    : absl::StrCat(" since ", absl::FormatTime(since->second)),
                                "; when that member is back, the model continues from its newest "
                                "checkpoint"),
                   absl::Seconds(1));
}

absl::Status GroupModels::CheckLoaded(std::string_view model) const {
  absl::MutexLock lock(&mu_);
  const auto found = hosted_.find(model);
  if (found != hosted_.end()) return found->second.partition->CheckHasBase();
  return member_ != nullptr ? CheckNothingToLoadLocked(model, *member_) : absl::OkStatus();
}

absl::Status GroupModels::CheckNothingToLoadLocked(std::string_view model,
                                                   const Member& member) const {
  const std::optional<ModelRecord> record = member.model(model);
  if (!record.has_value() || record->state != ModelRecord::State::kActive ||
      record->durable() == nullptr) {
    return absl::OkStatus();
  }
  // Also one of an earlier process of this member: a new incarnation begins soon.
  const auto partition =
      std::find_if(record->partitions.begin(), record->partitions.end(),
                   [&](const Partition& one) { return one.member == member.name(); });
  if (partition == record->partitions.end()) return absl::OkStatus();
  const auto error = host_errors_.find(model);
  return MakeError(
      absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
      absl::StrCat("model \"", std::string(model), "\": partition ",
                   partition - record->partitions.begin(), " on member \"", member.name(),
                   "\" is loading",
                   error == host_errors_.end()
                       ? ""
                       : absl::StrCat("; the last attempt failed: ", error->second.message())),
      absl::Seconds(1));
}

absl::Status GroupModels::CheckAllServersRun(std::string_view model) const {
  const std::shared_ptr<HostedPartition> partition = Find(model);
  if (partition == nullptr) return NotFound(model);
  absl::MutexLock lock(&mu_);
  for (size_t i = 0; i < partition->partitions().size(); ++i) {
    EMA_RETURN_IF_ERROR(CheckRunsLocked(model, partition->partitions(), i));
  }
  return absl::OkStatus();
}

std::vector<std::string> GroupModels::ModelNames() const {
  std::vector<std::string> names;
  const absl::StatusOr<Member*> member = GetMember();
  if (!member.ok()) return names;
  for (const auto& [name, record] : (*member)->models()) {
    if (record.state == ModelRecord::State::kActive) names.push_back(name);
  }
  return names;
}

void GroupModels::DescribeWhole(bool in_a_list, v1::Model& model) const {
  const absl::StatusOr<Member*> member = GetMember();
  if (!member.ok()) return;
  std::shared_ptr<const Manifest> manifest;
  {
    absl::MutexLock lock(&mu_);
    const auto found = hosted_.find(model.name());
    if (found == hosted_.end()) {
      const std::optional<ModelRecord> record = (*member)->model(model.name());
      if (record.has_value()) DescribeLocked(record->partitions, record->incarnation, model);
      return;
    }
    const Hosted& hosted = found->second;
    DescribeLocked(hosted.partition->partitions(), hosted.partition->id().incarnation, model);
    model.set_reserved_bytes(hosted.reserved_bytes);
    manifest = hosted.config.manifest;
  }
  // Not under the lock: a manifest may have many thousands of tensors.
  model.set_manifest_digest(manifest->digest());
  model.clear_manifest();
  if (!in_a_list) ToProto(*manifest, model.mutable_manifest());
}

void GroupModels::DescribeLocked(const std::vector<Partition>& partitions, int64_t incarnation,
                                 v1::Model& model) const {
  model.set_incarnation(incarnation);
  model.clear_partitions();
  for (const Partition& partition : partitions) {
    v1::Partition& proto = *model.add_partitions();
    proto.set_member(partition.member);
    proto.set_address(AddressLocked(partition));
    proto.set_first_tensor(partition.first_tensor);
    proto.set_tensor_count(partition.tensor_count);
  }
}

// --- Creation and deletion ---

absl::StatusOr<v1::CreateModelResponse> GroupModels::CreateModel(
    const v1::CreateModelRequest& request) {
  EMA_ASSIGN_OR_RETURN(Member* const member, GetMember());
  EMA_ASSIGN_OR_RETURN(const ModelConfig config, ema::FromProto(request));
  EMA_RETURN_IF_ERROR(config.Validate(GlobBudget()));
  const auto stored = member->Read(config.name);
  if (!stored.ok()) return RegistryError(stored.status());
  if (stored->has_value()) {
    const ModelRecord& record = (*stored)->record;
    if (record.state == ModelRecord::State::kActive) return AnswerExisting(config, record);
    if (record.state == ModelRecord::State::kDeleting) {
      return Busy(config.name, "is being deleted; if that was interrupted, delete it again");
    }
    const absl::Duration age = absl::Now() - absl::FromUnixMicros(record.incarnation);
    if (age < kMaxCreationTime) return Busy(config.name, "is being created");
    LogTo(options_.log, LogLevel::kWarning, "unfinished model removed",
          {{"model", config.name}, {"age", age}});
    const absl::Status erased = member->Erase(config.name, (*stored)->revision);
    if (!erased.ok() && !absl::IsAborted(erased)) return RegistryError(erased);
  }
  return CreateNew(*member, request, config);
}

absl::StatusOr<v1::CreateModelResponse> GroupModels::AnswerExisting(const ModelConfig& config,
                                                                    const ModelRecord& record) {
  EMA_RETURN_IF_ERROR(CheckHome(config.name));
  {
    absl::MutexLock lock(&mu_);
    const auto found = hosted_.find(config.name);
    if (found == hosted_.end() || found->second.partition->id().incarnation != record.incarnation) {
      return Busy(config.name, "is being created again");
    }
    const std::string difference = config.DifferenceFrom(found->second.config);
    if (!difference.empty()) {
      return MakeError(
          absl::StatusCode::kAlreadyExists, ErrorReason::kModelDiffers,
          absl::StrCat("model \"", config.name,
                       "\" exists and differs (here: this call, there: the server): ", difference));
    }
  }
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, store_.Get(config.name));
  v1::CreateModelResponse response;
  *response.mutable_model() = ema::ToProto(*model, /*in_a_list=*/false);
  DescribeWhole(/*in_a_list=*/false, *response.mutable_model());
  return response;
}

absl::StatusOr<v1::CreateModelResponse> GroupModels::CreateNew(
    Member& member, const v1::CreateModelRequest& request, const ModelConfig& config) {
  const std::string& name = config.name;
  EMA_ASSIGN_OR_RETURN(const std::vector<int64_t> tensor_bytes, TensorBytes(config));
  ModelRecord record;
  EMA_ASSIGN_OR_RETURN(record.partitions, PlaceTensors(name, tensor_bytes, member.members()));
  EMA_ASSIGN_OR_RETURN(const int64_t stored_incarnation,
                       NewestStoredIncarnation(options_.checkpoints, name));
  EMA_ASSIGN_OR_RETURN(record.incarnation,
                       NextIncarnation(/*record_incarnation=*/0, absl::ToUnixMicros(absl::Now()),
                                       stored_incarnation));
  absl::StatusOr<int64_t> revision = member.Write(name, record, /*revision=*/0);
  if (absl::IsAborted(revision.status())) return Busy(name, "is being created by another call");
  if (!revision.ok()) return RegistryError(revision.status());

  absl::Status status = ReserveAll(member, request, record);
  if (status.ok()) {
    EMA_ASSIGN_OR_RETURN(const ModelRecord active, Activate(record));
    // If the record was changed, the creation took too long, and another one has begun.
    status = member.Write(name, active, *revision).status();
    if (absl::IsUnavailable(status)) return RegistryError(status);
  }
  if (!status.ok()) {
    // The other members drop their partitions when they see that the record is gone.
    member.Erase(name, *revision).IgnoreError();
    absl::MutexLock lock(&change_mu_);
    Drop(name, record.incarnation, "was not created");
    return status;
  }
  LogTo(options_.log, LogLevel::kInfo, "model created",
        {{"model", name},
         {"tensors", config.manifest->tensor_count()},
         {"tracks", config.tracks.size()},
         {"partitions", record.partitions.size()},
         {"home", record.partitions[0].member},
         {"reserved_bytes", Sum(tensor_bytes)}});
  const std::shared_ptr<HostedPartition> own = Find(name);
  if (own == nullptr) {  // There are fewer tensors than members.
    absl::MutexLock lock(&mu_);
    return RedirectLocked(name, record.partitions);
  }
  own->Activate();
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, store_.Get(name));
  v1::CreateModelResponse response;
  *response.mutable_model() = ema::ToProto(*model, /*in_a_list=*/false);
  DescribeWhole(/*in_a_list=*/false, *response.mutable_model());
  response.set_created(true);
  return response;
}

absl::Status GroupModels::ReserveAll(const Member& member, const v1::CreateModelRequest& request,
                                     const ModelRecord& record) {
  FanOut<v1::ReservePartitionResponse> calls(record.partitions);
  std::optional<v1::ReservePartitionRequest> own;
  size_t own_partition = 0;
  for (size_t i = 0; i < record.partitions.size(); ++i) {
    const Partition& partition = record.partitions[i];
    v1::ReservePartitionRequest to_reserve;
    to_reserve.set_model(request.model());
    to_reserve.set_incarnation(record.incarnation);
    to_reserve.set_partition(static_cast<int64_t>(i));
    to_reserve.set_boot(partition.boot);
    *to_reserve.mutable_config() = request;
    to_reserve.set_first_tensor(partition.first_tensor);
    to_reserve.set_tensor_count(partition.tensor_count);
    if (partition.boot == member.boot()) {
      own = std::move(to_reserve);
      own_partition = i;
      continue;
    }
    const std::optional<std::string> address = member.AddressOf(partition.member, partition.boot);
    if (address.has_value()) {
      peers_.ReservePartition(*address, to_reserve, kReserveTimeout, calls.EndOf(i));
    } else {
      calls.EndOf(i)(absl::UnavailableError("it has left the group"));
    }
  }
  if (own.has_value()) calls.EndOf(own_partition)(ReservePartition(*own));
  return calls.Wait().status();
}

absl::StatusOr<v1::ReservePartitionResponse> GroupModels::ReservePartition(
    const v1::ReservePartitionRequest& request) {
  EMA_ASSIGN_OR_RETURN(Member* const member, GetMember());
  absl::MutexLock lock(&change_mu_);
  EMA_RETURN_IF_ERROR(Reserve(*member, request).status());
  return v1::ReservePartitionResponse();
}

absl::StatusOr<std::shared_ptr<HostedPartition>> GroupModels::Reserve(
    Member& member, const v1::ReservePartitionRequest& request) {
  const std::string& name = request.model();
  const auto stored = member.Read(name);
  if (!stored.ok()) return RegistryError(stored.status());
  if (request.boot() != member.boot() || !stored->has_value() ||
      (*stored)->record.incarnation != request.incarnation() ||
      (*stored)->record.PartitionOf(member.name(), member.boot()) != request.partition()) {
    return Fenced(name,
                  absl::StrCat("the registry does not have partition ", request.partition(),
                               " of incarnation ", request.incarnation(), " on this process"));
  }
  if (const std::shared_ptr<HostedPartition> before = Find(name); before != nullptr) {
    if (before->id().incarnation == request.incarnation()) return before;
    Drop(name, before->id().incarnation, "has been deleted");
  }
  EMA_ASSIGN_OR_RETURN(ModelConfig config, ema::FromProto(request.config()));
  EMA_RETURN_IF_ERROR(config.Validate(GlobBudget()));
  return Host(member, (*stored)->record, request.partition(), std::move(config));
}

absl::StatusOr<std::shared_ptr<HostedPartition>> GroupModels::Host(Member& member,
                                                                   const ModelRecord& record,
                                                                   int64_t index,
                                                                   ModelConfig config) {
  const std::string name = config.name;
  const Partition& place = record.partitions[static_cast<size_t>(index)];
  EMA_ASSIGN_OR_RETURN(const std::vector<int64_t> tensor_bytes, TensorBytes(config));
  EMA_ASSIGN_OR_RETURN(ModelConfig part, PartitionConfig(config, place));
  auto partition = std::make_shared<HostedPartition>(HostedPartition::Options{
      .model = name,
      .id = {.incarnation = record.incarnation, .partition = index, .boot = member.boot()},
      .partitions = record.partitions,
      .base = record.base,
      .peers = &peers_,
      .member = &member,
      .session_timeout = options_.session_timeout,
      .registry_patience = options_.registry_patience,
      .log = options_.log});
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model,
                       store_.CreatePartition(std::move(part), record.incarnation, partition));
  // An earlier model of that name may have had other checkpoints.
  if (options_.checkpoints != nullptr) options_.checkpoints->FolderOf(name).Refresh();
  {
    absl::MutexLock lock(&mu_);
    host_errors_.erase(name);
    hosted_[name] = {partition, std::move(config), Sum(tensor_bytes)};
  }
  partition->Start(model);
  LogTo(options_.log, LogLevel::kInfo, "partition reserved",
        {{"model", name},
         {"incarnation", record.incarnation},
         {"partition", index},
         {"tensors", place.tensor_count},
         {"reserved_bytes", model->tracks().reserved_bytes()}});
  return partition;
}

void GroupModels::Drop(const std::string& model, int64_t incarnation,
                       const std::string& why_deleted) {
  std::shared_ptr<HostedPartition> partition;
  {
    absl::MutexLock lock(&mu_);
    const auto found = hosted_.find(model);
    if (found == hosted_.end() || found->second.partition->id().incarnation != incarnation) return;
    partition = found->second.partition;
    hosted_.erase(found);
  }
  partition->Stop();
  if (why_deleted.empty()) {
    store_.Drop(model, MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                                 absl::StrCat("model \"", model, "\": incarnation ", incarnation,
                                              " has ended: the model returns to a checkpoint"),
                                 absl::Seconds(1)));
  } else {
    store_.Delete(model);
  }
  LogTo(options_.log, LogLevel::kInfo, "partition dropped",
        {{"model", model},
         {"incarnation", incarnation},
         {"partition", partition->id().partition},
         {"reason", absl::StrCat("the model ",
                                 why_deleted.empty() ? "has a newer incarnation" : why_deleted)}});
}

absl::Status GroupModels::DeleteModel(const std::string& model, bool purge) {
  constexpr int kAttempts = 3;  // Another call may change the record meanwhile.
  EMA_ASSIGN_OR_RETURN(Member* const member, GetMember());
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const auto stored = member->Read(model);
    if (!stored.ok()) return RegistryError(stored.status());
    if (!stored->has_value()) return FinishDeletion(*member, model, /*revision=*/0, purge);
    ModelRecord record = (*stored)->record;
    int64_t revision = (*stored)->revision;
    if (record.state != ModelRecord::State::kDeleting) {
      record.state = ModelRecord::State::kDeleting;
      const absl::StatusOr<int64_t> written = member->Write(model, record, revision);
      if (absl::IsAborted(written.status())) continue;
      if (!written.ok()) return RegistryError(written.status());
      revision = *written;
    }
    {
      absl::MutexLock lock(&change_mu_);
      Drop(model, record.incarnation, "has been deleted");
    }
    EMA_RETURN_IF_ERROR(FinishDeletion(*member, model, revision, purge));
    LogTo(options_.log, LogLevel::kInfo, "model deleted",
          {{"model", model}, {"incarnation", record.incarnation}, {"purge", purge}});
    return absl::OkStatus();
  }
  return Busy(model, "is being changed by other calls");
}

absl::Status GroupModels::FinishDeletion(Member& member, const std::string& model, int64_t revision,
                                         bool purge) {
  CheckpointStore* const checkpoints = options_.checkpoints;
  // While the record is DELETING, no model of that name is created, whose checkpoints these were.
  if (revision != 0 && checkpoints != nullptr) {
    EMA_RETURN_IF_ERROR(checkpoints->DeleteModel(model));
  }
  if (revision != 0) {
    const absl::Status erased = member.Erase(model, revision);
    // ABORTED: another call has finished the deletion.
    if (!erased.ok() && !absl::IsAborted(erased)) return RegistryError(erased);
  }
  if (!purge || checkpoints == nullptr) return absl::OkStatus();
  return checkpoints->data().PurgeDeleted(model);
}

// --- The registry's changes ---

absl::Status GroupModels::Reconcile() {
  const absl::StatusOr<Member*> found = GetMember();
  if (!found.ok()) return absl::OkStatus();  // The server is stopping.
  Member& member = **found;
  NoteMissingMembers(member);
  absl::Status result;
  bool must_load = false;
  for (const auto& [name, record] : member.models()) {
    if (NamesEarlierProcess(member, record)) {
      result.Update(ReformAfterRestart(member, options_.checkpoints, name, record, options_.log));
    }
    must_load |= MustLoad(member, name, record);
  }
  {
    absl::MutexLock change_lock(&change_mu_);
    std::vector<std::pair<std::string, std::shared_ptr<HostedPartition>>> hosted;
    {
      absl::MutexLock lock(&mu_);
      for (const auto& [name, of] : hosted_) hosted.emplace_back(name, of.partition);
    }
    for (const auto& [name, partition] : hosted) {
      result.Update(FollowRecord(member, name, *partition));
    }
  }
  if (must_load) loading_.Wake();
  return result;
}

absl::Status GroupModels::FollowRecord(Member& member, const std::string& model,
                                       HostedPartition& partition) {
  std::optional<ModelRecord> record = member.model(model);
  if (!record.has_value() || !IsNamed(partition, member, *record)) {
    // The cache may be older than the reservation.
    EMA_ASSIGN_OR_RETURN(const auto stored, member.Read(model));
    record.reset();
    if (stored.has_value()) record = stored->record;
  }
  const int64_t incarnation = partition.id().incarnation;
  if (!record.has_value() || record->state == ModelRecord::State::kDeleting) {
    Drop(model, incarnation, "has been deleted");
  } else if (!IsNamed(partition, member, *record)) {
    Drop(model, incarnation, /*why_deleted=*/"");
  } else if (record->state == ModelRecord::State::kActive) {
    // LoadPartition() activates one that has a base.
    if (!record->base.has_value()) partition.Activate();
    const GroupCheckpoint* const durable = record->durable();
    if (durable == nullptr || !partition.is_active() || partition.is_home()) {
      return absl::OkStatus();
    }
    // The home has saved, or removed, a checkpoint.
    if (options_.checkpoints != nullptr) options_.checkpoints->FolderOf(model).Refresh();
    EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> here, store_.Get(model));
    here->durable().SetVersion(durable->id, durable->step, /*settings_revision=*/std::nullopt);
  }
  return absl::OkStatus();
}

void GroupModels::NoteMissingMembers(const Member& member) {
  std::map<std::pair<std::string, std::string>, absl::Time> missing;
  const absl::Time now = absl::Now();
  for (const auto& [name, record] : member.models()) {
    for (const Partition& partition : record.partitions) {
      if (member.AddressOf(partition.member, partition.boot).has_value()) continue;
      missing.try_emplace({partition.member, partition.boot}, now);
    }
  }
  absl::MutexLock lock(&mu_);
  for (auto& [process, since] : missing) {
    if (const auto known = missing_since_.find(process); known != missing_since_.end()) {
      since = known->second;
    }
  }
  missing_since_ = std::move(missing);
}

// --- Loading ---

absl::Status GroupModels::LoadPartitions() {
  const absl::StatusOr<Member*> member = GetMember();
  if (!member.ok()) return absl::OkStatus();  // The server is stopping.
  absl::Status result;
  for (const auto& [name, record] : (*member)->models()) {
    if (!MustLoad(**member, name, record)) continue;
    const absl::Status status = LoadPartition(**member, name, record);
    if (is_stopping_.load(std::memory_order_relaxed)) return absl::OkStatus();
    if (status.ok()) continue;
    result.Update(status);
    LogTo(options_.log, LogLevel::kError, "partition not loaded",
          {{"model", name}, {"incarnation", record.incarnation}, {"error", status}});
    const std::shared_ptr<HostedPartition> partition = Find(name);
    if (partition != nullptr) partition->SetLoadError(status);
    absl::MutexLock lock(&mu_);
    if (partition == nullptr) host_errors_[name] = status;
  }
  return result;
}

bool GroupModels::MustLoad(const Member& member, const std::string& model,
                           const ModelRecord& record) const {
  if (record.state != ModelRecord::State::kActive || !record.base.has_value() ||
      !record.PartitionOf(member.name(), member.boot()).has_value()) {
    return false;
  }
  const std::shared_ptr<HostedPartition> partition = Find(model);
  return partition == nullptr || partition->id().incarnation < record.incarnation ||
         (partition->id().incarnation == record.incarnation && !partition->is_active());
}

absl::Status GroupModels::LoadPartition(Member& member, const std::string& model,
                                        const ModelRecord& record) {
  if (options_.checkpoints == nullptr) return NoDataDir();
  const auto index = static_cast<size_t>(*record.PartitionOf(member.name(), member.boot()));
  const GroupCheckpoint* const listed = record.Find(*record.base);
  if (listed == nullptr) {  // The registry was restored from a backup.
    return absl::DataLossError(absl::StrCat("model \"", model, "\": version ", record.base->version,
                                            ", which it must load, is not among the checkpoints of "
                                            "its record in the registry"));
  }
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest base,
                       ReadGroupCheckpoint(*options_.checkpoints, model, *listed));
  std::shared_ptr<HostedPartition> partition;
  {
    absl::MutexLock lock(&change_mu_);
    const auto stored = member.Read(model);
    if (!stored.ok()) return RegistryError(stored.status());
    // Otherwise the watch reports the next record.
    if (!stored->has_value() || (*stored)->record.incarnation != record.incarnation ||
        (*stored)->record.state != ModelRecord::State::kActive) {
      return absl::OkStatus();
    }
    partition = Find(model);
    if (partition != nullptr && partition->id().incarnation != record.incarnation) {
      Drop(model, partition->id().incarnation, /*why_deleted=*/"");
      partition = nullptr;
    }
    if (partition == nullptr) {
      EMA_ASSIGN_OR_RETURN(partition,
                           Host(member, record, static_cast<int64_t>(index), ConfigOf(base)));
    }
  }
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> here, store_.Get(model));
  const absl::Time begin = absl::Now();
  const PauseHook rest = [this, &here] {
    if (is_stopping_.load(std::memory_order_relaxed)) return DrainingError();
    return here->closed();  // A newer incarnation has begun.
  };
  EMA_RETURN_IF_ERROR(LoadPart(*options_.checkpoints, base, record, index, *here, rest));
  partition->Activate();
  LogTo(options_.log, LogLevel::kInfo, "partition loaded",
        {{"model", model},
         {"incarnation", record.incarnation},
         {"partition", index},
         {"version", base.record.number},
         {"step", base.record.step},
         {"seconds", absl::ToDoubleSeconds(absl::Now() - begin)}});
  return absl::OkStatus();
}

// --- For saves ---

absl::StatusOr<GroupModels::Placement> GroupModels::PlacementOf(const std::string& model,
                                                                int64_t incarnation) const {
  absl::MutexLock lock(&mu_);
  const auto found = hosted_.find(model);
  if (member_ == nullptr || found == hosted_.end() ||
      found->second.partition->id().incarnation != incarnation) {
    return Fenced(model, absl::StrCat("incarnation ", incarnation, " is not on this server"));
  }
  Placement placement{.partitions = found->second.partition->partitions(),
                      .addresses = {},
                      .config = found->second.config};
  for (const Partition& partition : placement.partitions) {
    placement.addresses.push_back(AddressLocked(partition));
  }
  return placement;
}

absl::Status GroupModels::ChangeRecord(
    const std::string& model, int64_t incarnation,
    absl::FunctionRef<absl::StatusOr<ModelRecord>(const ModelRecord&)> change) {
  constexpr int kAttempts = 10;  // Another call may change the record meanwhile.
  EMA_ASSIGN_OR_RETURN(Member* const member, GetMember());
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const auto stored = member->Read(model);
    if (!stored.ok()) return RegistryError(stored.status());
    if (!stored->has_value() || (*stored)->record.state == ModelRecord::State::kDeleting) {
      return NotFound(model);
    }
    const ModelRecord& record = (*stored)->record;
    if (record.incarnation != incarnation) {
      return Fenced(model, absl::StrCat("incarnation ", incarnation, " has ended; ",
                                        record.incarnation, " has begun"));
    }
    EMA_ASSIGN_OR_RETURN(const ModelRecord next, change(record));
    if (next == record) return absl::OkStatus();
    absl::Status written = member->Write(model, next, (*stored)->revision).status();
    if (written.ok()) return written;
    if (!absl::IsAborted(written)) return RegistryError(written);
  }
  return Busy(model, "is being changed by other calls");
}

absl::Status GroupModels::RollBack(const std::string& model, int64_t incarnation,
                                   const VersionId& id, int64_t fenced_run_epoch) {
  EMA_RETURN_IF_ERROR(CheckAllServersRun(model));
  EMA_ASSIGN_OR_RETURN(const int64_t stored, NewestStoredIncarnation(options_.checkpoints, model));
  EMA_RETURN_IF_ERROR(ChangeRecord(model, incarnation, [&](const ModelRecord& record) {
    return Reform(record, {.now_micros = absl::ToUnixMicros(absl::Now()),
                           .newest_stored_incarnation = stored,
                           .partitions = record.partitions,
                           .base = id,
                           .fenced_run_epoch = fenced_run_epoch});
  }));
  absl::MutexLock lock(&change_mu_);
  Drop(model, incarnation, /*why_deleted=*/"");
  return absl::OkStatus();
}

absl::Status GroupModels::AwaitHome(const std::string& model) {
  constexpr absl::Duration kPollInterval = absl::Milliseconds(50);
  const auto is_stopping = [this] { return is_stopping_.load(std::memory_order_relaxed); };
  while (true) {
    absl::Status status = CheckHome(model);
    if (!absl::IsUnavailable(status)) return status;
    absl::MutexLock lock(&mu_);
    if (stop_wait_.AwaitUntil(mu_, After(SteadyNow(), kPollInterval), is_stopping)) return status;
  }
}

void GroupModels::SaveAtHomes(absl::Duration timeout) {
  std::vector<std::pair<std::string, std::string>>
      homes;  // Models and the addresses of their homes.
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [name, hosted] : hosted_) {
      const HostedPartition& partition = *hosted.partition;
      // A home that is not there has saved the model before it left.
      const std::string address = AddressLocked(partition.partitions()[0]);
      if (!partition.is_home() && !address.empty()) homes.emplace_back(name, address);
    }
  }
  std::erase_if(homes, [this](const auto& home) {
    const absl::StatusOr<std::shared_ptr<Model>> model = store_.Get(home.first);
    if (!model.ok()) return true;
    const std::optional<Version> latest = (*model)->history().latest();
    return !latest.has_value() || latest->id() == (*model)->durable().version();
  });
  absl::BlockingCounter running(static_cast<int>(homes.size()));
  for (const auto& [name, address] : homes) {
    v1::SaveNowRequest request;
    request.set_model(name);
    peers_.SaveNow(address, request, timeout, [&, name = name](const auto& response) {
      if (!response.ok()) {
        LogTo(options_.log, LogLevel::kWarning, "model not saved before this server leaves",
              {{"model", name}, {"error", response.status()}});
      }
      running.DecrementCount();
    });
  }
  running.Wait();
}

absl::StatusOr<v1::SavePartResponse> GroupModels::SavePart(const v1::SavePartRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<HostedPartition> partition,
                       FindForMessage(request.model()));
  if (request.boot() != partition->id().boot ||
      request.incarnation() != partition->id().incarnation) {
    return Fenced(request.model(), absl::StrCat("this process does not have a partition of "
                                                "incarnation ",
                                                request.incarnation()));
  }
  if (options_.checkpoints == nullptr) return NoDataDir();
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, store_.Get(request.model()));
  return group::SavePart(*options_.checkpoints, *model, request);
}

// --- Messages ---

absl::StatusOr<std::shared_ptr<HostedPartition>> GroupModels::FindForMessage(
    const std::string& model) const {
  if (std::shared_ptr<HostedPartition> partition = Find(model)) return partition;
  return NotFound(model);
}

void GroupModels::Prepare(const v1::PrepareRequest& request, StateReply reply) {
  const auto partition = FindForMessage(request.from().model());
  if (!partition.ok()) return reply(partition.status());
  (*partition)
      ->OnPrepare(FromProto(request),
                  [reply = std::move(reply)](const absl::StatusOr<GroupState>& state) {
                    if (!state.ok()) return reply(state.status());
                    reply(ToProto(*state));
                  });
}

absl::StatusOr<v1::GroupState> GroupModels::Sync(const v1::SyncRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<HostedPartition> partition,
                       FindForMessage(request.from().model()));
  EMA_ASSIGN_OR_RETURN(const GroupState state, partition->OnSync(FromProto(request)));
  return ToProto(state);
}

absl::StatusOr<v1::PublishStateResponse> GroupModels::PublishState(
    const v1::PublishStateRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<HostedPartition> partition,
                       FindForMessage(request.model()));
  partition->OnState(FromProto(request.state()));
  return v1::PublishStateResponse();
}

void GroupModels::StopHolding() {
  std::vector<std::shared_ptr<HostedPartition>> partitions;
  {
    absl::MutexLock lock(&mu_);
    is_stopping_.store(true, std::memory_order_relaxed);
    stop_wait_.WakeAll();
    for (const auto& [name, hosted] : hosted_) partitions.push_back(hosted.partition);
  }
  for (const std::shared_ptr<HostedPartition>& partition : partitions) partition->StopHolding();
}

}  // namespace ema::group
