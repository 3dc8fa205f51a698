// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/model_service.h"

#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/base/quoted.h"
#include "server/core/attached_files.h"
#include "server/core/trainer_run.h"
#include "server/core/version_statistics.h"
#include "server/rpc/convert_core.h"
#include "server/rpc/unary_call.h"
#include "server/wire/lane_pipe.h"

namespace ema {
namespace {

// With its fields below the 4 MiB that gRPC's clients accept by default.
constexpr size_t kFilePartBytes = size_t{1} << 20;

// Pins the version that `request` names, so that it is not evicted before the call's turn comes.
// Null: it names none, or the pin failed, for which the call itself will give the reason.
template <typename Request>
SnapshotRef PinNamed(const ModelStore& store, const Request& request,
                     absl::StatusOr<SnapshotRef> (VersionHistory::*pin)(int64_t version,
                                                                        int64_t incarnation)) {
  const absl::StatusOr<std::shared_ptr<Model>> model = store.Get(request.model());
  if (!model.ok() || request.version() == 0) return nullptr;
  absl::StatusOr<SnapshotRef> pinned =
      ((*model)->history().*pin)(request.version(), request.incarnation());
  return pinned.ok() ? *std::move(pinned) : nullptr;
}

// True: the tables of the model's tracks take more than a few milliseconds to make. False if there
// are so many tensors or tracks that the call is rejected at once.
bool HasLargeTables(const v1::CreateModelRequest& request) {
  constexpr int64_t kMaxQuickEntries = 20'000;
  const int64_t tensor_count = request.manifest().tensors_size();
  const int64_t track_count = request.tracks_size();
  return Manifest::CheckCount(tensor_count).ok() && track_count <= kMaxTracks &&
         tensor_count * track_count > kMaxQuickEntries;
}

constexpr char kDefaultMetricLabel[] = "best";

absl::Status NotInGroupError() {
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kBadRequest,
                   "this server does not belong to a group");
}

absl::StatusOr<VersionId> ReadVersion(int64_t version, int64_t incarnation) {
  if (version >= 0 && incarnation >= 0) return VersionId{version, incarnation};
  return BadRequest(absl::StrCat("version: ", version, " of incarnation ", incarnation,
                                 " given, expected 0 or more of both"));
}

}  // namespace

void ModelService::Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue,
                          const Workers& workers) {
// The last argument, if any, chooses where the call runs; without one, on the queue's thread.
#define EMA_LISTEN(method, ...)                                           \
  ListenUnary(rpc, queue, &rpc->service, "/ema.v1.EmaService/" #method,   \
              &RpcContext::EmaService::Request##method,                   \
              [this](const v1::method##Request& request, const Access&) { \
                return method(request);                                   \
              } __VA_OPT__(, ) __VA_ARGS__)
  const auto pinned_on = [this](Worker* worker) {
    return [this, worker](const auto& request) {
      return WorkerChoice{worker, PinNamed(*store_, request, &VersionHistory::PinLeavingOneFree)};
    };
  };
  EMA_LISTEN(CreateModel, [this, workers](const v1::CreateModelRequest& request) {
    // In a group it waits for other servers, whose calls wait for the worker that creates.
    if (group_ != nullptr) return WorkerChoice{.worker = workers.changing};
    return WorkerChoice{.worker = HasLargeTables(request) ? workers.creating : nullptr};
  });
  EMA_LISTEN(GetModel);
  ListenUnary(rpc, queue, &rpc->service, "/ema.v1.EmaService/ListModels",
              &RpcContext::EmaService::RequestListModels,
              [this](const v1::ListModelsRequest&, const Access& access)
                  -> absl::StatusOr<v1::ListModelsResponse> { return ListModels(access); });
  EMA_LISTEN(UpdateModel, [this, workers](const v1::UpdateModelRequest& request) {
    if (group_ != nullptr) return WorkerChoice{.worker = workers.changing};
    return WorkerChoice{.worker = request.put_tracks_size() > 0 ? workers.creating : nullptr};
  });
  EMA_LISTEN(DeleteModel, On(workers.saving));
  EMA_LISTEN(RecoverModel, On(workers.restoring));
  EMA_LISTEN(RebalanceModel, On(group_ != nullptr ? workers.moving : nullptr));
  EMA_LISTEN(AttachFile);
  EMA_LISTEN(GetAttachedFile, On(workers.disk));
  EMA_LISTEN(OpenRun, [workers](const v1::OpenRunRequest& request) {
    return WorkerChoice{.worker = request.has_resume() ? workers.restoring : nullptr};
  });
  EMA_LISTEN(QueryPush);
  EMA_LISTEN(GetLane);
  EMA_LISTEN(ListVersions, On(workers.disk));
  EMA_LISTEN(GetStatistics, pinned_on(workers.computing));
  EMA_LISTEN(CreateCheckpoint, [this, workers](const v1::CreateCheckpointRequest& request) {
    // A call that does not wait for the save may take the last pin.
    SnapshotRef version =
        PinNamed(*store_, request,
                 request.async() ? &VersionHistory::Pin : &VersionHistory::PinLeavingOneFree);
    // A version that is only on the disk is labelled after the save that is running.
    const bool is_quick = request.async() &&
                          (request.label().empty() || request.version() == 0 || version != nullptr);
    return WorkerChoice{is_quick ? workers.disk : workers.saving, std::move(version)};
  });
  EMA_LISTEN(GetCheckpoint, On(workers.disk));
  EMA_LISTEN(ListCheckpoints, On(workers.disk));
  EMA_LISTEN(DeleteCheckpoint, On(workers.saving));
  EMA_LISTEN(RestoreCheckpoint, On(workers.restoring));
  EMA_LISTEN(SetLabel, pinned_on(workers.saving));
  EMA_LISTEN(ReportMetric, pinned_on(workers.saving));
  EMA_LISTEN(Synthesize, On(workers.computing));
#undef EMA_LISTEN
}

void ModelService::OfferLane(const std::string& socket_name) {
  lane_.set_host_id(HostId());
  lane_.set_socket_name(socket_name);
  lane_.set_protocol(3);
}

absl::StatusOr<std::shared_ptr<Model>> ModelService::FindModel(const std::string& name) const {
  if (group_ != nullptr) EMA_RETURN_IF_ERROR(group_->CheckHome(name));
  return store_->Get(name);
}

absl::StatusOr<std::shared_ptr<Model>> ModelService::FindPartition(const std::string& name) const {
  if (group_ != nullptr) EMA_RETURN_IF_ERROR(group_->CheckLoaded(name));
  return store_->Get(name);
}

v1::Model ModelService::Describe(const Model& model, bool in_a_list) const {
  v1::Model proto = ToProto(model, in_a_list);
  if (group_ != nullptr) group_->DescribeWhole(in_a_list, proto);
  return proto;
}

absl::StatusOr<v1::CreateModelResponse> ModelService::CreateModel(
    const v1::CreateModelRequest& request) {
  if (group_ != nullptr) return group_->CreateModel(request);
  EMA_ASSIGN_OR_RETURN(ModelConfig config, FromProto(request));
  EMA_RETURN_IF_ERROR(checkpoints_.CheckMayCreate(config.name));
  EMA_ASSIGN_OR_RETURN(const ModelStore::CreateResult created, store_->Create(std::move(config)));
  if (created.created) {
    const ModelConfig& made = created.model->config();
    LogTo(log_, LogLevel::kInfo, "model created",
          {{"model", made.name},
           {"tensors", made.manifest->tensors().size()},
           {"tracks", made.tracks.size()},
           {"reserved_bytes", created.model->tracks().reserved_bytes()}});
  }
  v1::CreateModelResponse response;
  *response.mutable_model() = Describe(*created.model, /*in_a_list=*/false);
  response.set_created(created.created);
  return response;
}

absl::StatusOr<v1::Model> ModelService::GetModel(const v1::GetModelRequest& request) {
  // The error says why the model was not loaded.
  if (const absl::Status refused = checkpoints_.CheckMayCreate(request.model()); !refused.ok()) {
    return MakeError(absl::StatusCode::kNotFound, GetErrorReason(refused),
                     std::string(refused.message()));
  }
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  return Describe(*model, /*in_a_list=*/false);
}

v1::ListModelsResponse ModelService::ListModels(const Access& access) {
  v1::ListModelsResponse response;
  if (group_ == nullptr) {
    for (const std::shared_ptr<Model>& model : store_->List()) {
      if (!access.Covers(model->config().name)) continue;
      *response.add_models() = ToProto(*model, /*in_a_list=*/true);
    }
    return response;
  }
  for (const std::string& name : group_->ModelNames()) {
    if (!access.Covers(name)) continue;
    const absl::StatusOr<std::shared_ptr<Model>> model = FindModel(name);
    v1::Model& proto = *response.add_models();
    if (model.ok()) proto = ToProto(**model, /*in_a_list=*/true);
    proto.set_name(name);
    group_->DescribeWhole(/*in_a_list=*/true, proto);
  }
  return response;
}

absl::StatusOr<v1::Model> ModelService::UpdateModel(const v1::UpdateModelRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  EMA_ASSIGN_OR_RETURN(const TrackChanges changes, FromProto(request));
  EMA_RETURN_IF_ERROR(group_ != nullptr ? group_->UpdateTracks(request)
                                        : model->UpdateTracks(changes));
  LogTo(log_, LogLevel::kInfo, "model updated", {{"model", request.model()}});
  return Describe(*model, /*in_a_list=*/false);
}

absl::StatusOr<v1::RecoverModelResponse> ModelService::RecoverModel(
    const v1::RecoverModelRequest& request) {
  if (group_ == nullptr) return NotInGroupError();
  return group_->RecoverModel(request.model());
}

absl::StatusOr<v1::RebalanceModelResponse> ModelService::RebalanceModel(
    const v1::RebalanceModelRequest& request) {
  if (group_ == nullptr) return NotInGroupError();
  EMA_RETURN_IF_ERROR(ValidateName("model", request.model()));
  return group_->RebalanceModel(request, [&]() -> absl::Status {
    EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> home, store_->Get(request.model()));
    if (!home->history().latest().has_value()) {
      return MakeError(
          absl::StatusCode::kFailedPrecondition, ErrorReason::kNoVersion,
          absl::StrCat("model \"", request.model(),
                       "\" has no version yet; rebalance it after its first commit, or "
                       "delete it and create it again"));
    }
    EMA_RETURN_IF_ERROR(checkpoints_.Save(*home, {}).status());
    if (home->durable().HasOtherSettings(home->durable().version(),
                                         home->Describe().settings_revision)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "model \"", request.model(),
          "\": its tracks or attached files have changed since its newest version, and "
          "would be lost; rebalance it after the next commit"));
    }
    return absl::OkStatus();
  });
}

absl::StatusOr<v1::Empty> ModelService::DeleteModel(const v1::DeleteModelRequest& request) {
  EMA_RETURN_IF_ERROR(ValidateName("model", request.model()));
  if (request.confirm_model() != request.model()) {
    return BadRequest(absl::StrCat("confirm_model: ", Quoted(request.confirm_model()),
                                   " given, expected \"", request.model(),
                                   "\", the model that is to be deleted"));
  }
  if (group_ != nullptr) {
    EMA_RETURN_IF_ERROR(group_->DeleteModel(request.model(), request.purge()));
    return v1::Empty();
  }
  // Before anything is changed.
  EMA_RETURN_IF_ERROR(checkpoints_.CheckMaySetAside());
  // The model is in memory, or was not loaded because all its checkpoints are corrupt.
  const bool is_there =
      store_->Get(request.model()).ok() || !checkpoints_.CheckMayCreate(request.model()).ok();
  // Even if it is not: an earlier call may have failed at its checkpoints.
  bool is_forgotten = false;
  const absl::Status status = store_->DeleteAndForget(request.model(), [&]() -> absl::Status {
    EMA_RETURN_IF_ERROR(checkpoints_.SetAsideAll(request.model()));
    is_forgotten = true;
    return request.purge() ? checkpoints_.Purge(request.model()) : absl::OkStatus();
  });
  if (is_there) {
    std::vector<LogField> fields = {{"model", request.model()}, {"purge", request.purge()}};
    if (!status.ok()) fields.emplace_back("error", status);
    LogTo(log_, status.ok() ? LogLevel::kInfo : LogLevel::kError,
          status.ok()    ? "model deleted"
          : is_forgotten ? "model deleted, but not purged"
                         : "model deleted in memory only",
          std::move(fields));
  }
  if (status.ok()) return v1::Empty();
  return WithPrefix(
      status,
      absl::StrCat("model \"", request.model(),
                   is_forgotten
                       ? "\" is deleted and its checkpoints are set aside, but not all of them "
                         "could be removed: "
                       : "\" is deleted in memory, but its checkpoints are still on the disk: "));
}

absl::StatusOr<v1::Empty> ModelService::AttachFile(const v1::AttachFileRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  if (request.remove()) {
    model->attached_files().Remove(request.name());
  } else {
    EMA_RETURN_IF_ERROR(model->attached_files().AddPart(request.name(), request.total_bytes(),
                                                        request.offset(), request.data()));
  }
  return v1::Empty();
}

absl::StatusOr<v1::GetAttachedFileResponse> ModelService::GetAttachedFile(
    const v1::GetAttachedFileRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  EMA_ASSIGN_OR_RETURN(const AttachedFiles::Found found,
                       model->attached_files().Find(request.name()));
  const std::string& bytes = found.file->bytes;
  const int64_t total_bytes = static_cast<int64_t>(bytes.size());
  const int64_t offset = request.offset();
  if (offset < 0 || offset > total_bytes) {
    return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kBadRequest,
                     absl::StrCat("offset: ", offset, " given, file \"", request.name(), "\" has ",
                                  total_bytes, " bytes"));
  }
  v1::GetAttachedFileResponse response;
  response.set_total_bytes(total_bytes);
  response.set_crc32c(found.crc32c);
  response.set_data(bytes.substr(static_cast<size_t>(offset), kFilePartBytes));
  return response;
}

absl::StatusOr<v1::OpenRunResponse> ModelService::OpenRun(const v1::OpenRunRequest& request) {
  if (group_ != nullptr && request.run_epoch() == 0) {
    EMA_RETURN_IF_ERROR(group_->CheckHome(request.model()));
    EMA_RETURN_IF_ERROR(group_->CheckAllServersRun(request.model()));
  }
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindPartition(request.model()));
  if (request.manifest_digest() != model->manifest().digest()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kLayoutMismatch,
        absl::StrCat("manifest_digest: ", request.manifest_digest(), " given, model \"",
                     request.model(), "\" has ", model->manifest().digest()));
  }
  const v1::WireDtype wire_dtype = request.layout().wire_dtype();
  if (!v1::WireDtype_IsValid(wire_dtype)) {
    return BadRequest(absl::StrCat("layout.wire_dtype: ", static_cast<int>(wire_dtype),
                                   " given, expected UNSPECIFIED (0) or BFLOAT16 (1)"));
  }
  // RankLayout::Create() checks this, too, but converting the shards takes ten times their bytes.
  EMA_RETURN_IF_ERROR(RankLayout::CheckCount(request.layout().shards_size()));
  EMA_ASSIGN_OR_RETURN(RankLayout layout,
                       RankLayout::Create(model->manifest(), FromProto(request.layout()),
                                          request.layout().frozen_shard_count(),
                                          static_cast<WireDtype>(wire_dtype)));
  Launch launch{.id = request.launch_id(), .last_run_epoch = request.last_run_epoch()};
  if (model->is_partition()) {
    launch.run_epoch = request.run_epoch();
    launch.incarnation = request.incarnation();
  }
  std::optional<VersionId> newest;
  if (request.has_resume()) {
    // Check the call itself first: a rollback ends the run that is open.
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<TrainerRun> tried,
                         TrainerRun::Create(&model->manifest(), request.launch_id(), /*epoch=*/0,
                                            request.world_size()));
    EMA_RETURN_IF_ERROR(tried->Join(request.rank(), request.world_size(), layout));
    EMA_ASSIGN_OR_RETURN(newest, checkpoints_.Resume(*model, launch, FromProto(request.resume())));
    // The rollback is newer than its last run.
    if (newest.has_value()) launch.last_run_epoch = 0;
  }
  EMA_ASSIGN_OR_RETURN(
      const Model::JoinResult joined,
      model->JoinRun(launch, request.rank(), request.world_size(), std::move(layout), newest));
  v1::OpenRunResponse response;
  response.set_run_epoch(joined.run_epoch);
  response.set_layout_digest(joined.layout_digest);
  response.set_ready(joined.ready);
  response.mutable_missing_ranks()->Assign(joined.missing_ranks.begin(),
                                           joined.missing_ranks.end());
  if (joined.latest.has_value()) *response.mutable_latest() = ToProto(*joined.latest);
  *response.mutable_plan() = ToProto(joined.plan);
  response.set_round(model->round());
  return response;
}

absl::StatusOr<v1::QueryPushResponse> ModelService::QueryPush(const v1::QueryPushRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindPartition(request.model()));
  const int64_t round_before = model->round();
  EMA_ASSIGN_OR_RETURN(
      const Model::PushState state,
      model->QueryPush(request.run_epoch(), request.step(), request.rank(),
                       request.abandon_if_unfinished(), request.skip_reason(), request.round()));
  v1::QueryPushResponse response;
  switch (state.state) {
    case Model::PushState::State::kUnknown:
      response.set_state(v1::QueryPushResponse::STATE_UNKNOWN);
      break;
    case Model::PushState::State::kOpen:
      response.set_state(v1::QueryPushResponse::STATE_OPEN);
      break;
    case Model::PushState::State::kCommitted:
      response.set_state(v1::QueryPushResponse::STATE_COMMITTED);
      *response.mutable_version() = ToProto(*state.record);
      *response.mutable_plan() = ToProto(state.plan);
      if (state.digest.has_value()) response.set_digest(*state.digest);
      break;
    case Model::PushState::State::kAbandoned:
      response.set_state(v1::QueryPushResponse::STATE_ABANDONED);
      break;
  }
  response.set_rank_committed(state.rank_committed);
  // A caller that abandons an open step names its round: never a later one than the step's.
  const bool is_open = state.state == Model::PushState::State::kOpen;
  response.set_round(is_open ? round_before : model->round());
  for (const auto& [range, tensor] : state.missing) {
    v1::QueryPushResponse::Range* const out = response.add_missing();
    out->set_offset(range.offset);
    out->set_length_bytes(range.length_bytes);
    out->set_tensor(tensor);
  }
  response.mutable_missing_ranks()->Assign(state.missing_ranks.begin(), state.missing_ranks.end());
  return response;
}

absl::StatusOr<v1::ListVersionsResponse> ModelService::ListVersions(
    const v1::ListVersionsRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  std::set<VersionId> on_disk;
  // If the disk fails, no version is reported as stored.
  if (const auto stored = checkpoints_.OnDisk(*model, /*with_partial=*/false); stored.ok()) {
    for (const KnownVersion& version : *stored) on_disk.insert(version.id);
  }
  v1::ListVersionsResponse response;
  // They must fit into one message.
  constexpr size_t kMaxBytes = 4 << 20;
  // A commit waits while records are copied.
  constexpr int64_t kRecordsAtOnce = 256;
  size_t bytes = 0;
  int64_t version = request.after_version();
  while (bytes <= kMaxBytes) {
    const std::vector<VersionHistory::RecordEntry> entries =
        model->history().RecordsAfter(version, /*incarnation=*/0, kRecordsAtOnce);
    if (entries.empty()) break;
    version = entries.back().record.number;
    for (const VersionHistory::RecordEntry& entry : entries) {
      v1::ListVersionsResponse::Entry* const out = response.add_versions();
      *out->mutable_version() = ToProto(entry.record);
      out->set_available(entry.available || on_disk.contains(entry.record.id()));
      bytes += out->ByteSizeLong();
      if (bytes > kMaxBytes) break;
    }
  }
  return response;
}

absl::StatusOr<v1::VersionRecord> ModelService::GetStatistics(
    const v1::GetStatisticsRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  const VersionId id{request.version(), request.incarnation()};
  const std::vector<std::string> tracks(request.tracks().begin(), request.tracks().end());
  EMA_ASSIGN_OR_RETURN(const Version record, group_ != nullptr
                                                 ? group_->ComputeStatistics(*model, id, tracks)
                                                 : ComputeStatistics(*model, id, tracks));
  return ToProto(record);
}

absl::StatusOr<v1::SynthesizeResponse> ModelService::Synthesize(
    const v1::SynthesizeRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  EMA_ASSIGN_OR_RETURN(const SynthesisRequest parsed, FromProto(request));
  EMA_ASSIGN_OR_RETURN(const Synthesis synthesis, checkpoints_.Synthesize(*model, parsed));
  v1::SynthesizeResponse response;
  *response.mutable_version() = ToProto(synthesis.version);
  response.set_residual(synthesis.residual);
  for (const Synthesis::Source& source : synthesis.sources) {
    v1::SynthesizeResponse::Source* const out = response.add_sources();
    out->set_track(source.track);
    out->set_step(source.step);
    out->set_weight(source.weight);
  }
  return response;
}

absl::StatusOr<v1::CreateCheckpointResponse> ModelService::CreateCheckpoint(
    const v1::CreateCheckpointRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  Checkpoints::SaveRequest wanted{.async = request.async(), .label = request.label()};
  EMA_ASSIGN_OR_RETURN(wanted.id, ReadVersion(request.version(), request.incarnation()));
  wanted.tracks.assign(request.tracks().begin(), request.tracks().end());
  EMA_ASSIGN_OR_RETURN(const Checkpoints::Saved saved, checkpoints_.Save(*model, wanted));
  v1::CreateCheckpointResponse response;
  *response.mutable_version() = ToProto(saved.record);
  response.set_checkpoint(saved.name);
  response.set_total_bytes(saved.total_bytes);
  response.set_state(static_cast<v1::Checkpoint::State>(saved.state));
  return response;
}

absl::StatusOr<v1::Checkpoint> ModelService::GetCheckpoint(
    const v1::GetCheckpointRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  EMA_ASSIGN_OR_RETURN(const CheckpointInfo checkpoint,
                       checkpoints_.Get(*model, request.checkpoint()));
  return ToProto(checkpoint);
}

absl::StatusOr<v1::ListCheckpointsResponse> ModelService::ListCheckpoints(
    const v1::ListCheckpointsRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  EMA_ASSIGN_OR_RETURN(const CheckpointList listing, checkpoints_.List(*model));
  v1::ListCheckpointsResponse response;
  for (const CheckpointInfo& checkpoint : listing.checkpoints) {
    *response.add_checkpoints() = ToProto(checkpoint);
  }
  for (const CheckpointLabel& label : listing.labels) *response.add_labels() = ToProto(label);
  return response;
}

absl::StatusOr<v1::Empty> ModelService::DeleteCheckpoint(
    const v1::DeleteCheckpointRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  EMA_RETURN_IF_ERROR(checkpoints_.Delete(*model, request.checkpoint()));
  return v1::Empty();
}

absl::StatusOr<v1::VersionRecord> ModelService::RestoreCheckpoint(
    const v1::RestoreCheckpointRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  EMA_ASSIGN_OR_RETURN(const VersionId id, ReadVersion(request.version(), request.incarnation()));
  EMA_ASSIGN_OR_RETURN(const Version record, checkpoints_.Restore(*model, id, request.label()));
  return ToProto(record);
}

absl::StatusOr<v1::Label> ModelService::SetLabel(const v1::SetLabelRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  if (request.remove()) {
    EMA_RETURN_IF_ERROR(checkpoints_.RemoveLabel(*model, request.label()));
    return v1::Label();
  }
  EMA_ASSIGN_OR_RETURN(const VersionId id, ReadVersion(request.version(), request.incarnation()));
  EMA_ASSIGN_OR_RETURN(const CheckpointLabel label,
                       checkpoints_.SetLabel(*model, request.label(), id));
  return ToProto(label);
}

absl::StatusOr<v1::ReportMetricResponse> ModelService::ReportMetric(
    const v1::ReportMetricRequest& request) {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model, FindModel(request.model()));
  CheckpointLabel score{.name = request.label().empty() ? kDefaultMetricLabel : request.label(),
                        .metric = request.value(),
                        .lower_is_better = request.lower_is_better()};
  EMA_ASSIGN_OR_RETURN(score.id, ReadVersion(request.version(), request.incarnation()));
  if (score.id.version == 0) {
    return BadRequest("version: 0 given, expected the version that was evaluated, 1 or more");
  }
  EMA_ASSIGN_OR_RETURN(const MetricResult result, checkpoints_.ReportMetric(*model, score));
  v1::ReportMetricResponse response;
  *response.mutable_label() = ToProto(result.label);
  response.set_moved(result.moved);
  return response;
}

}  // namespace ema
