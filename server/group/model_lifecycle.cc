// SPDX-License-Identifier: Apache-2.0
#include "server/group/model_lifecycle.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"
#include "server/group/fan_out.h"
#include "server/group/group_errors.h"
#include "server/group/next_incarnation.h"
#include "server/group/partition_config.h"
#include "server/group/placement.h"
#include "server/group/recover.h"
#include "server/rpc/convert_core.h"

namespace ema::group {
namespace {

// A creation that has not ended after this time was interrupted by a crash.
constexpr absl::Duration kMaxCreationTime = absl::Seconds(60);
// Making the tables of many tensors takes long.
constexpr absl::Duration kReserveTimeout = absl::Seconds(30);

}  // namespace

// --- Creation ---

absl::StatusOr<ModelLifecycle::Created> ModelLifecycle::Create(
    const v1::CreateModelRequest& request, const ModelConfig& config) {
  EMA_ASSIGN_OR_RETURN(Member* const member, hosted_.GetMember());
  const auto stored = member->Read(config.name);
  if (!stored.ok()) return RegistryError(stored.status());
  if (stored->has_value()) {
    const ModelRecord& record = (*stored)->record;
    if (record.state == ModelRecord::State::kActive) return Created{record, /*is_new=*/false};
    if (record.state == ModelRecord::State::kDeleting) {
      return ModelBusyError(config.name,
                            "is being deleted; if that was interrupted, delete it again");
    }
    const absl::Duration age = absl::Now() - absl::FromUnixMicros(record.incarnation);
    if (age < kMaxCreationTime) return ModelBusyError(config.name, "is being created");
    LogTo(log_, LogLevel::kWarning, "unfinished model removed",
          {{"model", config.name}, {"age", age}});
    const absl::Status erased = member->Erase(config.name, (*stored)->revision);
    if (!erased.ok() && !absl::IsAborted(erased)) return RegistryError(erased);
  }
  EMA_ASSIGN_OR_RETURN(ModelRecord created, CreateNew(*member, request, config));
  return Created{std::move(created), /*is_new=*/true};
}

absl::StatusOr<ModelRecord> ModelLifecycle::CreateNew(Member& member,
                                                      const v1::CreateModelRequest& request,
                                                      const ModelConfig& config) {
  const std::string& name = config.name;
  if (checkpoints_ != nullptr) EMA_RETURN_IF_ERROR(CheckHasNoCheckpoints(*checkpoints_, name));
  EMA_ASSIGN_OR_RETURN(const std::vector<int64_t> tensor_bytes, TensorBytes(config));
  ModelRecord record;
  EMA_ASSIGN_OR_RETURN(
      record.partitions,
      PlaceTensors(name, tensor_bytes, CandidatesFor(name, member.members(), member.models())));
  EMA_ASSIGN_OR_RETURN(const int64_t stored_incarnation,
                       NewestStoredIncarnation(checkpoints_, name));
  EMA_ASSIGN_OR_RETURN(record.incarnation,
                       NextIncarnation(/*record_incarnation=*/0, absl::ToUnixMicros(absl::Now()),
                                       stored_incarnation));
  absl::StatusOr<int64_t> revision = member.Write(name, record, /*revision=*/0);
  if (absl::IsAborted(revision.status())) {
    return ModelBusyError(name, "is being created by another call");
  }
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
    absl::MutexLock lock(&hosted_.change_mu());
    hosted_.Drop(name, record.incarnation, "was not created");
    return status;
  }
  LogTo(log_, LogLevel::kInfo, "model created",
        {{"model", name},
         {"tensors", config.manifest->tensor_count()},
         {"tracks", config.tracks.size()},
         {"partitions", record.partitions.size()},
         {"home", record.partitions[0].member},
         {"reserved_bytes", TotalMemoryBytes(record.partitions)}});
  return record;
}

absl::Status ModelLifecycle::ReserveAll(const Member& member, const v1::CreateModelRequest& request,
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

absl::StatusOr<v1::ReservePartitionResponse> ModelLifecycle::ReservePartition(
    const v1::ReservePartitionRequest& request) {
  EMA_ASSIGN_OR_RETURN(Member* const member, hosted_.GetMember());
  absl::MutexLock lock(&hosted_.change_mu());
  EMA_RETURN_IF_ERROR(Reserve(*member, request).status());
  return v1::ReservePartitionResponse();
}

absl::StatusOr<std::shared_ptr<HostedPartition>> ModelLifecycle::Reserve(
    Member& member, const v1::ReservePartitionRequest& request) {
  const std::string& name = request.model();
  const auto stored = member.Read(name);
  if (!stored.ok()) return RegistryError(stored.status());
  if (request.boot() != member.boot() || !stored->has_value() ||
      (*stored)->record.incarnation != request.incarnation() ||
      (*stored)->record.PartitionOf(member.name(), member.boot()) != request.partition()) {
    return FencedError(name,
                       absl::StrCat("the registry does not have partition ", request.partition(),
                                    " of incarnation ", request.incarnation(), " on this process"));
  }
  if (const auto before = hosted_.Find(name); before != nullptr) {
    const int64_t incarnation = before->partition->id().incarnation;
    if (incarnation == request.incarnation()) return before->partition;
    hosted_.Drop(name, incarnation, "has been deleted");
  }
  EMA_ASSIGN_OR_RETURN(ModelConfig config, ema::FromProto(request.config()));
  EMA_RETURN_IF_ERROR(config.Validate(GlobBudget()));
  return hosted_.Add(member, (*stored)->record, request.partition(), std::move(config));
}

absl::StatusOr<v1::RecoverModelResponse> ModelLifecycle::Recover(const std::string& model) {
  EMA_ASSIGN_OR_RETURN(Member* const member, hosted_.GetMember());
  if (checkpoints_ == nullptr) return NoDataDirError();
  EMA_ASSIGN_OR_RETURN(const ModelRecord record,
                       RecoverRecord(*member, *checkpoints_, model, log_));
  v1::RecoverModelResponse response;
  response.set_incarnation(record.incarnation);
  response.mutable_base()->set_version(record.base->version);
  response.mutable_base()->set_incarnation(record.base->incarnation);
  response.set_step(record.Find(*record.base)->step);
  response.set_checkpoint_count(static_cast<int64_t>(record.checkpoints.size()));
  for (const Partition& partition : record.partitions) response.add_members(partition.member);
  return response;
}

// --- Deletion ---

absl::Status ModelLifecycle::Delete(const std::string& model, bool purge) {
  constexpr int kAttempts = 4;  // Another call may change the record meanwhile.
  EMA_ASSIGN_OR_RETURN(Member* const member, hosted_.GetMember());
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const auto stored = member->Read(model);
    if (!stored.ok()) return RegistryError(stored.status());
    if (!stored->has_value()) {
      if (checkpoints_ == nullptr || CheckHasNoCheckpoints(*checkpoints_, model).ok()) {
        return FinishDeletion(*member, model, /*revision=*/0, purge);
      }
      const absl::Status reserved = ReserveName(*member, model);
      if (!reserved.ok() && !absl::IsAborted(reserved)) return RegistryError(reserved);
      continue;
    }
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
      absl::MutexLock lock(&hosted_.change_mu());
      hosted_.Drop(model, record.incarnation, "has been deleted");
    }
    EMA_RETURN_IF_ERROR(FinishDeletion(*member, model, revision, purge));
    LogTo(log_, LogLevel::kInfo, "model deleted",
          {{"model", model}, {"incarnation", record.incarnation}, {"purge", purge}});
    return absl::OkStatus();
  }
  return ModelBusyError(model, "is being changed by other calls");
}

absl::Status ModelLifecycle::ReserveName(Member& member, const std::string& model) {
  EMA_RETURN_IF_ERROR(ValidateName("model", model));
  ModelRecord record{.state = ModelRecord::State::kDeleting};
  EMA_ASSIGN_OR_RETURN(const int64_t stored, NewestStoredIncarnation(checkpoints_, model));
  EMA_ASSIGN_OR_RETURN(
      record.incarnation,
      NextIncarnation(/*record_incarnation=*/0, absl::ToUnixMicros(absl::Now()), stored));
  // A record names a process for some tensor.
  record.partitions = {{.member = member.name(), .boot = member.boot(), .tensor_count = 1}};
  return member.Write(model, record, /*revision=*/0).status();
}

absl::Status ModelLifecycle::FinishDeletion(Member& member, const std::string& model,
                                            int64_t revision, bool purge) {
  // While the record is DELETING, no model of that name is created, whose checkpoints these were.
  if (revision != 0 && checkpoints_ != nullptr) {
    EMA_RETURN_IF_ERROR(checkpoints_->DeleteModel(model));
  }
  if (revision != 0) {
    const absl::Status erased = member.Erase(model, revision);
    // ABORTED: another call has finished the deletion.
    if (!erased.ok() && !absl::IsAborted(erased)) return RegistryError(erased);
  }
  if (!purge || checkpoints_ == nullptr) return absl::OkStatus();
  return checkpoints_->data().PurgeDeleted(model);
}

}  // namespace ema::group
