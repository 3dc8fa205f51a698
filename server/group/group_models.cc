// SPDX-License-Identifier: Apache-2.0
#include "server/group/group_models.h"

#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/track_table.h"
#include "server/core/version_history.h"
#include "server/group/convert.h"
#include "server/group/placement.h"
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

// The memory of each tensor in all tracks and versions.
absl::StatusOr<std::vector<int64_t>> TensorBytes(const ModelConfig& config) {
  MemoryBudget unlimited(std::numeric_limits<int64_t>::max());
  EMA_ASSIGN_OR_RETURN(const std::vector<std::shared_ptr<Track>> tracks,
                       MakeTracks(config.tracks, *config.manifest, unlimited));
  const int64_t versions = VersionHistory::VersionCount(config.max_pinned_versions);
  std::vector<int64_t> bytes(static_cast<size_t>(config.manifest->tensor_count()));
  int64_t total = 0;
  for (const std::shared_ptr<Track>& track : tracks) {
    const int64_t copies = versions * (1 + track->config().schedule.kept_weights_count());
    for (size_t i = 0; i < bytes.size(); ++i) {
      int64_t of_track = 0;
      if (__builtin_mul_overflow(track->layout().entry(static_cast<int64_t>(i)).length_bytes,
                                 copies, &of_track) ||
          __builtin_add_overflow(total, of_track, &total)) {
        return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kMemoryBudget,
                         absl::StrCat("model \"", config.name, "\" needs more than 2^63 bytes"));
      }
      bytes[i] += of_track;
    }
  }
  return bytes;
}

absl::StatusOr<std::shared_ptr<const Manifest>> Slice(const Manifest& manifest, int64_t first,
                                                      int64_t count) {
  if (first < 0 || count < 1 || first > manifest.tensor_count() - count) {
    return BadRequest(absl::StrCat("tensors: ", count, " from ", first, " on given, the model has ",
                                   manifest.tensor_count()));
  }
  const auto tensors =
      manifest.tensors().subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  EMA_ASSIGN_OR_RETURN(Manifest part, Manifest::Create({tensors.begin(), tensors.end()}));
  return std::make_shared<const Manifest>(std::move(part));
}

int64_t Sum(const std::vector<int64_t>& values) {
  int64_t sum = 0;
  for (const int64_t value : values) sum += value;
  return sum;
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
  member->SetOnChange([this] { Reconcile(); });
  Reconcile();
}

void GroupModels::Stop() {
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
    return partition.is_active() ? absl::OkStatus() : Busy(model, "is being created");
  }
  const std::optional<ModelRecord> record = member->model(model);
  if (!record.has_value() || record->state == ModelRecord::State::kDeleting) {
    return NotFound(model);
  }
  if (record->state == ModelRecord::State::kCreating) return Busy(model, "is being created");
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
                                "; if it has crashed, delete the model and create it again"),
                   absl::Seconds(1));
}

absl::Status GroupModels::CheckComplete(std::string_view model) const {
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

void GroupModels::Complete(bool in_a_list, v1::Model& model) const {
  const absl::StatusOr<Member*> member = GetMember();
  if (!member.ok()) return;
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
  model.set_manifest_digest(hosted.config.manifest->digest());
  model.clear_manifest();
  if (!in_a_list) ToProto(*hosted.config.manifest, model.mutable_manifest());
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
    const absl::Duration age = absl::Now() - absl::FromUnixMicros(record.incarnation);
    if (record.state == ModelRecord::State::kCreating && age < kMaxCreationTime) {
      return Busy(config.name, "is being created");
    }
    LogTo(options_.log, LogLevel::kWarning, "unfinished model removed",
          {{"model", config.name}, {"state", StateName(record.state)}, {"age", age}});
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
  Complete(/*in_a_list=*/false, *response.mutable_model());
  return response;
}

absl::StatusOr<v1::CreateModelResponse> GroupModels::CreateNew(
    Member& member, const v1::CreateModelRequest& request, const ModelConfig& config) {
  const std::string& name = config.name;
  EMA_ASSIGN_OR_RETURN(const std::vector<int64_t> tensor_bytes, TensorBytes(config));
  ModelRecord record;
  EMA_ASSIGN_OR_RETURN(record.partitions, PlaceTensors(name, tensor_bytes, member.members()));
  EMA_ASSIGN_OR_RETURN(record.incarnation,
                       NextIncarnation(/*record_incarnation=*/0, absl::ToUnixMicros(absl::Now()),
                                       /*newest_stored_incarnation=*/0));
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
  Complete(/*in_a_list=*/false, *response.mutable_model());
  response.set_created(true);
  return response;
}

absl::Status GroupModels::ReserveAll(const Member& member, const v1::CreateModelRequest& request,
                                     const ModelRecord& record) {
  struct Results {
    explicit Results(size_t count) : statuses(count), missing(static_cast<int>(count)) {}
    std::vector<absl::Status> statuses;  // By partition. Each is written once, by one thread.
    absl::BlockingCounter missing;
  };
  const auto results = std::make_shared<Results>(record.partitions.size());
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
    const auto end = [results, i](const absl::Status& status) {
      results->statuses[i] = status;
      results->missing.DecrementCount();
    };
    if (partition.boot == member.boot()) {
      own = std::move(to_reserve);
      own_partition = i;
      continue;
    }
    const std::optional<std::string> address = member.AddressOf(partition.member, partition.boot);
    if (!address.has_value()) {
      end(absl::UnavailableError("it has left the group"));
      continue;
    }
    peers_.ReservePartition(*address, to_reserve, kReserveTimeout,
                            [end](const absl::StatusOr<v1::ReservePartitionResponse>& response) {
                              end(response.status());
                            });
  }
  if (own.has_value()) {
    results->statuses[own_partition] = ReservePartition(*own).status();
    results->missing.DecrementCount();
  }
  results->missing.Wait();
  for (size_t i = 0; i < record.partitions.size(); ++i) {
    if (results->statuses[i].ok()) continue;
    return WithPlace(results->statuses[i],
                     absl::StrCat("member \"", record.partitions[i].member, "\": "));
  }
  return absl::OkStatus();
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
  EMA_ASSIGN_OR_RETURN(const std::vector<int64_t> tensor_bytes, TensorBytes(config));
  ModelConfig part = config;
  EMA_ASSIGN_OR_RETURN(part.manifest,
                       Slice(*config.manifest, request.first_tensor(), request.tensor_count()));
  auto partition = std::make_shared<HostedPartition>(
      HostedPartition::Options{.model = name,
                               .id = {.incarnation = request.incarnation(),
                                      .partition = request.partition(),
                                      .boot = request.boot()},
                               .partitions = (*stored)->record.partitions,
                               .peers = &peers_,
                               .member = &member,
                               .session_timeout = options_.session_timeout,
                               .registry_patience = options_.registry_patience,
                               .log = options_.log});
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model,
                       store_.CreatePartition(std::move(part), request.incarnation(), partition));
  {
    absl::MutexLock lock(&mu_);
    hosted_[name] = {partition, std::move(config), Sum(tensor_bytes)};
  }
  partition->Start(model);
  LogTo(options_.log, LogLevel::kInfo, "partition reserved",
        {{"model", name},
         {"incarnation", request.incarnation()},
         {"partition", request.partition()},
         {"tensors", request.tensor_count()},
         {"reserved_bytes", model->tracks().reserved_bytes()}});
  return partition;
}

void GroupModels::Drop(const std::string& model, int64_t incarnation, const std::string& why) {
  std::shared_ptr<HostedPartition> partition;
  {
    absl::MutexLock lock(&mu_);
    const auto found = hosted_.find(model);
    if (found == hosted_.end() || found->second.partition->id().incarnation != incarnation) return;
    partition = found->second.partition;
    hosted_.erase(found);
  }
  partition->Stop();
  store_.Delete(model);
  LogTo(options_.log, LogLevel::kInfo, "partition dropped",
        {{"model", model},
         {"incarnation", incarnation},
         {"partition", partition->id().partition},
         {"reason", absl::StrCat("the model ", why)}});
}

absl::Status GroupModels::DeleteModel(const std::string& model) {
  constexpr int kAttempts = 3;  // Another call may change the record meanwhile.
  EMA_ASSIGN_OR_RETURN(Member* const member, GetMember());
  absl::Status status;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const auto stored = member->Read(model);
    if (!stored.ok()) return RegistryError(stored.status());
    if (!stored->has_value()) return absl::OkStatus();
    ModelRecord record = (*stored)->record;
    status = member->Erase(model, (*stored)->revision);
    if (absl::IsAborted(status)) continue;
    if (!status.ok()) return RegistryError(status);
    LogTo(options_.log, LogLevel::kInfo, "model deleted",
          {{"model", model}, {"incarnation", record.incarnation}});
    absl::MutexLock lock(&change_mu_);
    Drop(model, record.incarnation, "has been deleted");
    return absl::OkStatus();
  }
  return Busy(model, "is being changed by other calls");
}

// --- The registry's changes ---

void GroupModels::Reconcile() {
  const absl::StatusOr<Member*> found = GetMember();
  if (!found.ok()) return;
  Member& member = **found;
  NoteMissingMembers(member);
  absl::MutexLock change_lock(&change_mu_);
  std::vector<std::pair<std::string, std::shared_ptr<HostedPartition>>> hosted;
  {
    absl::MutexLock lock(&mu_);
    if (member_ == nullptr) return;
    for (const auto& [name, of] : hosted_) hosted.emplace_back(name, of.partition);
  }
  for (const auto& [name, partition] : hosted) {
    std::optional<ModelRecord> record = member.model(name);
    if (!record.has_value() || !IsNamed(*partition, member, *record)) {
      // The cache may be older than the reservation.
      const auto stored = member.Read(name);
      if (!stored.ok()) continue;
      record.reset();
      if (stored->has_value()) record = (*stored)->record;
    }
    if (!record.has_value()) {
      Drop(name, partition->id().incarnation, "has been deleted");
    } else if (!IsNamed(*partition, member, *record)) {
      Drop(name, partition->id().incarnation, "has a newer incarnation");
    } else if (record->state == ModelRecord::State::kActive) {
      partition->Activate();
    }
  }
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
    for (const auto& [name, hosted] : hosted_) partitions.push_back(hosted.partition);
  }
  for (const std::shared_ptr<HostedPartition>& partition : partitions) partition->StopHolding();
}

}  // namespace ema::group
