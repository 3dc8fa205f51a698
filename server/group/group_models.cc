// SPDX-License-Identifier: Apache-2.0
#include "server/group/group_models.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/synthesis.h"
#include "server/group/convert_messages.h"
#include "server/group/group_errors.h"
#include "server/group/group_statistics.h"
#include "server/group/group_tracks.h"
#include "server/group/next_incarnation.h"
#include "server/group/part_files.h"
#include "server/group/partition_config.h"
#include "server/group/placement.h"
#include "server/group/rebalance.h"
#include "server/group/synthesis_order.h"
#include "server/rpc/convert_core.h"

namespace ema::group {
namespace {

// Making the tables of many tensors takes long.
constexpr absl::Duration kProposeTimeout = absl::Seconds(30);
// Tracks may have hundreds of gigabytes. A lost connection ends a call sooner.
constexpr absl::Duration kComputeTimeout = absl::Minutes(10);

}  // namespace

GroupModels::GroupModels(ModelStore* store, Peers* peers, Options options)
    : options_(std::move(options)),
      store_(*store),
      peers_(*peers),
      hosted_(store, peers,
              {.session_timeout = options_.session_timeout,
               .max_registry_outage = options_.max_registry_outage,
               .checkpoints = options_.checkpoints,
               .log = options_.log}),
      lifecycle_(&hosted_, peers, options_.checkpoints, options_.log),
      copies_(&hosted_, options_.copies, options_.log),
      follower_(&hosted_, store, options_.checkpoints, &copies_, options_.log),
      overview_(&hosted_, store, &follower_, peers) {
  if (options_.copies != nullptr) {
    copy_maker_.emplace(
        this, &hosted_, store, options_.checkpoints, &copies_,
        CopyMaker::Options{.interval = options_.copy_interval, .log = options_.log});
  }
  if (options_.replace_after <= absl::ZeroDuration()) return;
  replacer_.emplace(this, &hosted_,
                    Replacer::Options{.replace_after = options_.replace_after,
                                      .checkpoints = options_.checkpoints,
                                      .log = options_.log});
}

void GroupModels::Start(Member* member) {
  hosted_.Start(member);
  follower_.Start(member, [this] {
    if (replacer_.has_value()) replacer_->Wake();
  });
  if (copy_maker_.has_value()) copy_maker_->Start();
}

void GroupModels::Stop() {
  copies_.Stop();
  if (copy_maker_.has_value()) copy_maker_->Stop();
  if (replacer_.has_value()) replacer_->Stop();
  follower_.Stop();
  hosted_.Stop();
}

// --- Routing ---

absl::Status GroupModels::CheckHome(std::string_view model) const {
  EMA_ASSIGN_OR_RETURN(const Member* const member, hosted_.GetMember());
  // The cache of the registry may not have the record yet.
  if (const auto hosted = hosted_.Find(model); hosted != nullptr) {
    const HostedPartition& partition = *hosted->partition;
    if (!partition.is_home()) return RedirectError(model, partition.partitions());
    EMA_RETURN_IF_ERROR(partition.CheckLoaded());
    return partition.is_active() ? absl::OkStatus() : ModelBusyError(model, "is being created");
  }
  const std::optional<ModelRecord> record = member->model(model);
  if (!record.has_value() || record->state == ModelRecord::State::kDeleting) {
    return ModelNotFoundError(model);
  }
  if (record->state == ModelRecord::State::kCreating) {
    return ModelBusyError(model, "is being created");
  }
  EMA_RETURN_IF_ERROR(CheckNothingToLoad(model, *member));
  return RedirectError(model, record->partitions);
}

absl::Status GroupModels::RedirectError(std::string_view model,
                                        const std::vector<Partition>& partitions) const {
  EMA_RETURN_IF_ERROR(CheckRuns(model, partitions, 0));
  absl::Status error =
      MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotHome,
                absl::StrCat("model \"", std::string(model), "\": its home is member \"",
                             partitions[0].member, "\""));
  SetGroupHint(error, {.home = hosted_.AddressOf(partitions[0])});
  return error;
}

absl::Status GroupModels::CheckRuns(std::string_view model,
                                    const std::vector<Partition>& partitions,
                                    size_t partition) const {
  const Partition& of = partitions[partition];
  if (!hosted_.AddressOf(of).empty()) return absl::OkStatus();
  const std::optional<absl::Time> since = follower_.history().MissingSince(of);
  return MakeError(
      absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
      absl::StrCat(
          "model \"", std::string(model), "\": the process of partition ", partition, ", member \"",
          of.member, "\", is not in the registry",
          since.has_value() ? absl::StrCat(" since ", absl::FormatTime(*since)) : "",
          "; when that member is back, the model continues from its newest checkpoint or copy"),
      absl::Seconds(1));
}

absl::Status GroupModels::CheckLoaded(std::string_view model) const {
  if (const auto hosted = hosted_.Find(model); hosted != nullptr) {
    return hosted->partition->CheckHasBase();
  }
  EMA_ASSIGN_OR_RETURN(const Member* const member, hosted_.GetMember());
  EMA_RETURN_IF_ERROR(CheckNothingToLoad(model, *member));
  const std::optional<ModelRecord> record = member->model(model);
  if (!record.has_value() || record->state != ModelRecord::State::kActive) return absl::OkStatus();
  for (const Partition& partition : record->partitions) {
    // A new incarnation begins soon, or the model ends.
    if (partition.member == member->name()) return ModelBusyError(model, "has lost a part here");
  }
  absl::Status error = FencedError(
      model, absl::StrCat("this server has no partition of incarnation ", record->incarnation));
  SetGroupHint(error, {.incarnation = record->incarnation});
  return error;
}

absl::Status GroupModels::CheckNothingToLoad(std::string_view model, const Member& member) const {
  const std::optional<ModelRecord> record = member.model(model);
  if (!record.has_value() || record->state != ModelRecord::State::kActive ||
      !record->SurvivesCrash()) {
    return absl::OkStatus();
  }
  // Also one of an earlier process of this member: a new incarnation begins soon.
  const auto partition =
      std::find_if(record->partitions.begin(), record->partitions.end(),
                   [&](const Partition& one) { return one.member == member.name(); });
  if (partition == record->partitions.end()) return absl::OkStatus();
  const absl::Status error = follower_.LoadError(model);
  return MakeError(
      absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
      absl::StrCat("model \"", std::string(model), "\": partition ",
                   partition - record->partitions.begin(), " on member \"", member.name(),
                   "\" is loading",
                   error.ok() ? "" : absl::StrCat("; the last attempt failed: ", error.message())),
      absl::Seconds(1));
}

absl::Status GroupModels::CheckAllServersRun(std::string_view model) const {
  const auto hosted = hosted_.Find(model);
  if (hosted == nullptr) return ModelNotFoundError(model);
  const std::vector<Partition>& partitions = hosted->partition->partitions();
  for (size_t i = 0; i < partitions.size(); ++i) {
    EMA_RETURN_IF_ERROR(CheckRuns(model, partitions, i));
  }
  return absl::OkStatus();
}

std::vector<std::string> GroupModels::ModelNames() const {
  std::vector<std::string> names;
  const absl::StatusOr<Member*> member = hosted_.GetMember();
  if (!member.ok()) return names;
  for (const auto& [name, record] : (*member)->models()) {
    if (record.state == ModelRecord::State::kActive) names.push_back(name);
  }
  return names;
}

void GroupModels::DescribeWhole(bool in_a_list, v1::Model& model) const {
  const absl::StatusOr<Member*> member = hosted_.GetMember();
  if (!member.ok()) return;
  const std::optional<ModelRecord> record = (*member)->model(model.name());
  const auto hosted = hosted_.Find(model.name());
  if (hosted == nullptr) {
    if (record.has_value()) Describe(record->partitions, record->incarnation, model);
    return;
  }
  Describe(hosted->partition->partitions(), hosted->partition->id().incarnation, model);
  // The record also counts the tracks that were changed after loading.
  const bool is_same = record.has_value() && record->incarnation == model.incarnation();
  model.set_reserved_bytes(
      TotalMemoryBytes(is_same ? record->partitions : hosted->partition->partitions()));
  model.set_manifest_digest(hosted->config.manifest->digest());
  model.clear_manifest();
  if (!in_a_list) ToProto(*hosted->config.manifest, model.mutable_manifest());
}

void GroupModels::Describe(const std::vector<Partition>& partitions, int64_t incarnation,
                           v1::Model& model) const {
  model.set_incarnation(incarnation);
  model.clear_partitions();
  for (const Partition& partition : partitions) {
    v1::Partition& proto = *model.add_partitions();
    proto.set_member(partition.member);
    proto.set_address(hosted_.AddressOf(partition));
    proto.set_first_tensor(partition.first_tensor);
    proto.set_tensor_count(partition.tensor_count);
  }
}

// --- Creation and deletion ---

absl::StatusOr<v1::CreateModelResponse> GroupModels::CreateModel(
    const v1::CreateModelRequest& request) {
  EMA_ASSIGN_OR_RETURN(const ModelConfig config, ema::FromProto(request));
  EMA_RETURN_IF_ERROR(config.Validate(GlobBudget()));
  EMA_ASSIGN_OR_RETURN(const ModelLifecycle::Created created, lifecycle_.Create(request, config));
  if (!created.is_new) {
    EMA_RETURN_IF_ERROR(CheckIsSame(config, created.record));
    return DescribeCreated(config.name);
  }
  const auto own = hosted_.Find(config.name);
  // There are fewer tensors than members.
  if (own == nullptr) return RedirectError(config.name, created.record.partitions);
  own->partition->Activate();
  EMA_ASSIGN_OR_RETURN(v1::CreateModelResponse response, DescribeCreated(config.name));
  response.set_created(true);
  return response;
}

absl::Status GroupModels::CheckIsSame(const ModelConfig& config, const ModelRecord& record) const {
  EMA_RETURN_IF_ERROR(CheckHome(config.name));
  const auto hosted = hosted_.Find(config.name);
  if (hosted == nullptr || hosted->partition->id().incarnation != record.incarnation) {
    return ModelBusyError(config.name, "is being created again");
  }
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> here, store_.Get(config.name));
  return CheckSameModel(config, hosted->config, *here);
}

absl::StatusOr<v1::CreateModelResponse> GroupModels::DescribeCreated(
    const std::string& model) const {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> here, store_.Get(model));
  v1::CreateModelResponse response;
  *response.mutable_model() = ema::ToProto(*here, /*in_a_list=*/false);
  DescribeWhole(/*in_a_list=*/false, *response.mutable_model());
  return response;
}

absl::Status GroupModels::DeleteModel(const std::string& model, bool purge) {
  return lifecycle_.Delete(model, purge);
}

absl::StatusOr<v1::RecoverModelResponse> GroupModels::RecoverModel(const std::string& model) {
  return lifecycle_.Recover(model);
}

absl::StatusOr<v1::RebalanceModelResponse> GroupModels::RebalanceModel(
    const v1::RebalanceModelRequest& request, absl::FunctionRef<absl::Status()> save) {
  absl::MutexLock lock(&update_mu_);  // A change during the save would be lost.
  return group::RebalanceModel(*this, hosted_, options_.checkpoints, request, save, options_.log);
}

absl::StatusOr<v1::ReservePartitionResponse> GroupModels::ReservePartition(
    const v1::ReservePartitionRequest& request) {
  return lifecycle_.ReservePartition(request);
}

// --- For saves ---

absl::StatusOr<GroupModels::Placement> GroupModels::PlacementOf(const std::string& model,
                                                                int64_t incarnation) const {
  const auto hosted = hosted_.Find(model);
  if (hosted == nullptr || hosted->partition->id().incarnation != incarnation) {
    return FencedError(model, absl::StrCat("incarnation ", incarnation, " is not on this server"));
  }
  Placement placement{
      .partitions = hosted->partition->partitions(), .addresses = {}, .config = hosted->config};
  for (const Partition& partition : placement.partitions) {
    placement.addresses.push_back(hosted_.AddressOf(partition));
  }
  return placement;
}

absl::StatusOr<ModelConfig> GroupModels::CurrentConfig(const std::string& model) const {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> home, store_.Get(model));
  EMA_ASSIGN_OR_RETURN(Placement placement, PlacementOf(model, home->incarnation()));
  placement.config.tracks.clear();
  for (const TrackRef& track : home->tracks().after_next_commit()) {
    placement.config.tracks.push_back(track->config());
  }
  return std::move(placement.config);
}

absl::StatusOr<ModelRecord> GroupModels::RecordOf(const std::string& model) const {
  EMA_ASSIGN_OR_RETURN(Member* const member, hosted_.GetMember());
  if (const auto cached = member->model(model)) return *cached;
  const auto stored = member->Read(model);
  if (!stored.ok()) return RegistryError(stored.status());
  if (!stored->has_value()) return ModelNotFoundError(model);
  return (*stored)->record;
}

absl::Status GroupModels::ChangeRecord(
    const std::string& model, int64_t incarnation,
    absl::FunctionRef<absl::StatusOr<ModelRecord>(const ModelRecord&)> change) {
  constexpr int kAttempts = 10;  // Another call may change the record meanwhile.
  EMA_ASSIGN_OR_RETURN(Member* const member, hosted_.GetMember());
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const auto stored = member->Read(model);
    if (!stored.ok()) return RegistryError(stored.status());
    if (!stored->has_value() || (*stored)->record.state == ModelRecord::State::kDeleting) {
      return ModelNotFoundError(model);
    }
    const ModelRecord& record = (*stored)->record;
    if (record.incarnation != incarnation) {
      return FencedError(model, absl::StrCat("incarnation ", incarnation, " has ended; ",
                                             record.incarnation, " has begun"));
    }
    EMA_ASSIGN_OR_RETURN(const ModelRecord next, change(record));
    if (next == record) return absl::OkStatus();
    absl::Status written = member->Write(model, next, (*stored)->revision).status();
    if (written.ok()) return written;
    if (!absl::IsAborted(written)) {
      const auto found = member->Read(model);  // The record may have been written all the same.
      if (found.ok() && found->has_value() && (*found)->record == next) return absl::OkStatus();
      return RegistryError(written);
    }
  }
  return ModelBusyError(model, "is being changed by other calls");
}

absl::Status GroupModels::RollBack(const std::string& model, int64_t incarnation,
                                   const VersionId& id, int64_t fenced_run_epoch) {
  EMA_RETURN_IF_ERROR(CheckAllServersRun(model));
  EMA_ASSIGN_OR_RETURN(const int64_t stored, NewestStoredIncarnation(options_.checkpoints, model));
  EMA_RETURN_IF_ERROR(ChangeRecord(model, incarnation, [&](const ModelRecord& record) {
    return BeginIncarnation(record, {.now_micros = absl::ToUnixMicros(absl::Now()),
                                     .newest_stored_incarnation = stored,
                                     .partitions = record.partitions,
                                     .base = id,
                                     .fenced_run_epoch = fenced_run_epoch});
  }));
  absl::MutexLock lock(&hosted_.change_mu());
  hosted_.Drop(model, incarnation, /*why_deleted=*/"");
  return absl::OkStatus();
}

void GroupModels::SaveAtHomes(absl::Duration timeout) {
  struct Call {
    std::string home;  // The address.
    v1::SaveNowRequest request;
  };
  std::vector<Call> calls;
  for (const auto& [name, hosted] : hosted_.All()) {
    const HostedPartition& partition = *hosted->partition;
    // A home that is not there has saved the model before it left.
    const std::string home = hosted_.AddressOf(partition.partitions()[0]);
    if (partition.is_home() || home.empty() || !MayLose(name)) continue;
    Call& call = calls.emplace_back();
    call.home = home;
    *call.request.mutable_from() = ToProto(name, partition.id());
  }
  absl::BlockingCounter running(static_cast<int>(calls.size()));
  for (const Call& call : calls) {
    peers_.SaveNow(call.home, call.request, timeout, [&](const auto& response) {
      if (!response.ok()) {
        LogTo(options_.log, LogLevel::kWarning, "model not saved before this server leaves",
              {{"model", call.request.from().model()}, {"error", response.status()}});
      }
      running.DecrementCount();
    });
  }
  running.Wait();
}

bool GroupModels::MayLose(const std::string& model) const {
  const absl::StatusOr<std::shared_ptr<Model>> here = store_.Get(model);
  if (!here.ok()) return false;
  // An open step may be prepared here, and the home may commit it at any moment.
  if ((*here)->Describe().session != nullptr) return true;
  const std::optional<Version> latest = (*here)->history().latest();
  return latest.has_value() && latest->id() != (*here)->durable().version();
}

absl::StatusOr<v1::SavePartResponse> GroupModels::SavePart(const v1::SavePartRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model,
                       FindForCall(request.model(), request.boot(), request.incarnation()));
  if (options_.checkpoints == nullptr) return NoDataDirError();
  return group::SavePart(*options_.checkpoints, *model, request);
}

absl::StatusOr<v1::WriteCopyResponse> GroupModels::WriteCopy(const v1::WriteCopyRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model,
                       FindForCall(request.model(), request.boot(), request.incarnation()));
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<HostedPartition> partition,
                       FindForMessage(request.model()));
  return copies_.Write(*model, partition->id().partition, request);
}

absl::StatusOr<v1::FetchCopyResponse> GroupModels::FetchCopy(const v1::FetchCopyRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model,
                       FindForCall(request.model(), request.boot(), request.incarnation()));
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<HostedPartition> partition,
                       FindForMessage(request.model()));
  EMA_RETURN_IF_ERROR(copies_.Fetch(*model, *partition, request));
  return v1::FetchCopyResponse();
}

absl::StatusOr<v1::ReadCopyResponse> GroupModels::ReadCopy(const v1::ReadCopyRequest& request) {
  return copies_.Read(request);
}

// --- Calls that all partitions take part in ---

absl::Status GroupModels::StartAtOthers(
    const Placement& placement,
    absl::FunctionRef<void(Peers& peers, size_t partition, const std::string& address)> call)
    const {
  const std::vector<std::string>& addresses = placement.addresses;
  for (size_t i = 1; i < addresses.size(); ++i) {
    if (!addresses[i].empty()) continue;
    EMA_RETURN_IF_ERROR(CheckRuns(placement.config.name, placement.partitions, i));
    return NotMemberError();  // Its address has come back, or this server leaves.
  }
  return hosted_.StartCalls([&](Peers& peers) {
    for (size_t i = 1; i < addresses.size(); ++i) call(peers, i, addresses[i]);
  });
}

absl::StatusOr<std::shared_ptr<Model>> GroupModels::FindForCall(const std::string& model,
                                                                const std::string& boot,
                                                                int64_t incarnation) const {
  const auto hosted = hosted_.Find(model);
  // A process that has just started has no partition yet, and the caller's incarnation has ended.
  if (hosted == nullptr || boot != hosted->partition->id().boot ||
      incarnation != hosted->partition->id().incarnation) {
    return FencedError(
        model, absl::StrCat("this process does not have a partition of incarnation ", incarnation));
  }
  return store_.Get(model);
}

absl::StatusOr<Version> GroupModels::ComputeStatistics(Model& home, const VersionId& id,
                                                       absl::Span<const std::string> tracks) {
  EMA_ASSIGN_OR_RETURN(const Placement placement,
                       PlacementOf(home.config().name, home.incarnation()));
  const auto start = [&](v1::GetPartStatisticsRequest request, StatisticsCalls& calls) {
    return StartAtOthers(placement, [&](Peers& peers, size_t other, const std::string& address) {
      request.set_boot(placement.partitions[other].boot);
      peers.GetPartStatistics(address, request, kComputeTimeout, calls.EndOf(other));
    });
  };
  return ComputeGroupStatistics(home, id, tracks, placement.partitions, start);
}

absl::StatusOr<v1::GetPartStatisticsResponse> GroupModels::GetPartStatistics(
    const v1::GetPartStatisticsRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model,
                       FindForCall(request.model(), request.boot(), request.incarnation()));
  return group::GetPartStatistics(*model, request);
}

absl::Status GroupModels::UpdateTracks(const v1::UpdateModelRequest& request) {
  absl::MutexLock lock(&update_mu_);
  const std::string& name = request.model();
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<HostedPartition> partition, FindForMessage(name));
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> home, store_.Get(name));
  EMA_ASSIGN_OR_RETURN(const Placement placement, PlacementOf(name, home->incarnation()));
  const auto start = [&](v1::ProposeTracksRequest proposal, TracksCalls& calls) {
    return StartAtOthers(placement, [&](Peers& peers, size_t other, const std::string& address) {
      proposal.set_boot(placement.partitions[other].boot);
      peers.ProposeTracks(address, proposal, kProposeTimeout, calls.EndOf(other));
    });
  };
  const auto withdraw = [&](v1::ProposeTracksRequest withdrawal) {
    for (size_t i = 1; i < placement.partitions.size(); ++i) {
      if (placement.addresses[i].empty()) continue;  // Its memory has ended with it.
      withdrawal.set_boot(placement.partitions[i].boot);
      SendWithdrawal(placement.addresses[i], withdrawal);
    }
  };
  EMA_RETURN_IF_ERROR(
      UpdateGroupTracks(*home, *partition, *placement.config.manifest, request, start, withdraw));
  EMA_ASSIGN_OR_RETURN(const ModelConfig config, CurrentConfig(name));
  EMA_ASSIGN_OR_RETURN(const std::vector<int64_t> tensor_bytes, TensorBytes(config));
  const absl::StatusOr<ModelRecord> record = RecordOf(name);
  const int64_t needed = std::accumulate(tensor_bytes.begin(), tensor_bytes.end(), int64_t{0});
  if (!record.ok() || TotalMemoryBytes(record->partitions) == needed) return absl::OkStatus();
  // For the placement of other models. If it fails, the next change of tracks corrects it.
  const auto set_memory = [&](ModelRecord changed) -> absl::StatusOr<ModelRecord> {
    SetMemoryBytes(tensor_bytes, changed.partitions);
    return changed;
  };
  ChangeRecord(name, home->incarnation(), set_memory).IgnoreError();
  return absl::OkStatus();
}

void GroupModels::SendWithdrawal(const std::string& address,
                                 const v1::ProposeTracksRequest& withdrawal) {
  const auto on_result = [this, address, withdrawal](const auto& response) {
    const absl::Status& status = response.status();
    // FENCED: the process has ended the incarnation. CANCELLED: this server stops.
    if (status.ok() || absl::IsCancelled(status)) return;
    if (GetErrorReason(status) == ErrorReason::kFenced) return;
    peers_.PostAfter(kSyncInterval, [this, address, withdrawal] {
      const auto hosted = hosted_.Find(withdrawal.model());
      if (hosted == nullptr) return;
      if (hosted->partition->id().incarnation != withdrawal.incarnation()) return;
      SendWithdrawal(address, withdrawal);
    });
  };
  peers_.ProposeTracks(address, withdrawal, kProposeTimeout, on_result);
}

absl::StatusOr<v1::ProposeTracksResponse> GroupModels::ProposeTracks(
    const v1::ProposeTracksRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model,
                       FindForCall(request.model(), request.boot(), request.incarnation()));
  EMA_RETURN_IF_ERROR(group::ProposeTracks(*model, request));
  return v1::ProposeTracksResponse();
}

absl::StatusOr<v1::SynthesizePartResponse> GroupModels::SynthesizePart(
    const v1::SynthesizePartRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model,
                       FindForCall(request.model(), request.boot(), request.incarnation()));
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<HostedPartition> partition,
                       FindForMessage(request.model()));
  if (options_.checkpoints == nullptr) return NoDataDirError();
  EMA_ASSIGN_OR_RETURN(const SynthesisOrder order, FromProto(request));
  const Partition& place = partition->partitions()[static_cast<size_t>(partition->id().partition)];
  EMA_RETURN_IF_ERROR(ema::SynthesizePart(options_.checkpoints->FolderOf(request.model()), *model,
                                          place.first_tensor, order));
  return v1::SynthesizePartResponse();
}

// --- Descriptions ---

void GroupModels::DescribeGroup(GroupReply reply) { overview_.Describe(std::move(reply)); }

absl::StatusOr<v1::DescribeMemberResponse> GroupModels::DescribeMember(
    const v1::DescribeMemberRequest& request) {
  return overview_.DescribeMember(request);
}

// --- Messages ---

absl::StatusOr<std::shared_ptr<HostedPartition>> GroupModels::FindForMessage(
    const std::string& model) const {
  if (const auto hosted = hosted_.Find(model)) return hosted->partition;
  return ModelNotFoundError(model);
}

void GroupModels::Vote(const v1::VoteRequest& request, StateReply reply) {
  const auto partition = FindForMessage(request.from().model());
  if (!partition.ok()) return reply(partition.status());
  (*partition)
      ->OnVote(FromProto(request),
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

absl::Status GroupModels::RejectPushesForStop(const v1::SaveNowRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<HostedPartition> partition,
                       FindForMessage(request.from().model()));
  return partition->RejectPushesForStop(FromProto(request.from()));
}

void GroupModels::ReleaseHeldCalls() {
  follower_.StopLoading();
  copies_.Stop();
  for (const auto& [name, hosted] : hosted_.All()) hosted->partition->ReleaseHeldCalls();
  peers_.AwaitPosted();
}

}  // namespace ema::group
