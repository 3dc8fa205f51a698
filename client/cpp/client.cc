// SPDX-License-Identifier: Apache-2.0
//
// The unary calls.
#include "ema/client.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/transport/convert_replies.h"
#include "client/cpp/transport/fork_guard.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {

using client_internal::FromProto;
using client_internal::MakeRequest;
using client_internal::Stub;

namespace {

constexpr int64_t kMaxChunkBytes = int64_t{4} << 20;
// An element has at most 8, and a chunk ends between elements.
constexpr int64_t kMinChunkBytes = 8;
constexpr int64_t kMaxConnections = 16;  // Streams of one rank that a server takes.

}  // namespace

std::string_view LaneName(Lane lane) {
  switch (lane) {
    case Lane::kGrpc:
      break;
    case Lane::kSharedMemory:
      return "shared memory";
    case Lane::kSharedWindow:
      return "shared window";
  }
  return "grpc";
}

absl::StatusOr<std::unique_ptr<Client>> Client::Create(std::string_view address) {
  return Create(address, Options());
}

absl::StatusOr<std::unique_ptr<Client>> Client::Create(std::string_view address,
                                                       const Options& options) {
  EMA_ASSIGN_OR_RETURN(std::vector<client_internal::Address> addresses,
                       client_internal::Address::ParseList(address));
  if (options.chunk_bytes < kMinChunkBytes || options.chunk_bytes > kMaxChunkBytes) {
    return BadRequest(absl::StrCat("chunk_bytes ", options.chunk_bytes, ": must be from ",
                                   kMinChunkBytes, " to ", kMaxChunkBytes));
  }
  if (options.max_connections < 0 || options.max_connections > kMaxConnections) {
    return BadRequest(absl::StrCat("max_connections ", options.max_connections,
                                   ": must be from 0 to ", kMaxConnections));
  }
  if (addresses.front().is_tls &&
      options.tls.certificate_file.empty() != options.tls.key_file.empty()) {
    return BadRequest(absl::StrCat("tls.certificate_file \"", options.tls.certificate_file,
                                   "\", tls.key_file \"", options.tls.key_file,
                                   "\": expected both or none"));
  }
  EMA_RETURN_IF_ERROR(client_internal::Token(options.token, options.token_file).Check());
  EMA_RETURN_IF_ERROR(client_internal::CheckGrpcUsable());
  auto impl = std::make_shared<Impl>(std::move(addresses), options);
  return std::unique_ptr<Client>(new Client(std::move(impl)));
}

Client::Client(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Client::~Client() {
  if (impl_->fork_guard().forked()) client_internal::LeakForever(std::move(impl_));
}

absl::StatusOr<Client::CreateModelResult> Client::CreateModel(std::string_view model,
                                                              const Manifest& manifest,
                                                              absl::Span<const TrackConfig> tracks,
                                                              const ModelOptions& options,
                                                              absl::Duration timeout) {
  auto request = MakeRequest<v1::CreateModelRequest>(model);
  ToProto(manifest, request.mutable_manifest());
  for (const TrackConfig& track : tracks) ToProto(track, request.add_tracks());
  request.set_max_pinned_versions(options.max_pinned_versions);
  request.set_non_finite(static_cast<v1::NonFinitePolicy>(options.non_finite));
  EMA_ASSIGN_OR_RETURN(const v1::CreateModelResponse response,
                       impl_->UnaryWithRetries(&Stub::PrepareAsyncCreateModel, request, timeout));
  EMA_ASSIGN_OR_RETURN(ModelInfo info, FromProto(response.model()));
  return CreateModelResult{std::move(info), response.created()};
}

absl::StatusOr<ModelInfo> Client::UpdateModel(std::string_view model, const ModelChanges& changes,
                                              absl::Duration timeout) {
  auto request = MakeRequest<v1::UpdateModelRequest>(model);
  for (const TrackConfig& track : changes.put) ToProto(track, request.add_put_tracks());
  for (const std::string& name : changes.remove) request.add_remove_tracks(name);
  for (const std::string& name : changes.pause) request.add_pause_tracks(name);
  for (const std::string& name : changes.resume) request.add_resume_tracks(name);
  EMA_ASSIGN_OR_RETURN(const v1::Model reply,
                       impl_->UnaryWithRetries(&Stub::PrepareAsyncUpdateModel, request, timeout));
  return FromProto(reply);
}

absl::StatusOr<bool> Client::IsServing(std::string_view service, absl::Duration timeout) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(std::string(service));
  client_internal::Interrupt interrupt(&impl_->options().is_interrupted);
  // Once: an answer that comes late is none.
  EMA_ASSIGN_OR_RETURN(const grpc::health::v1::HealthCheckResponse response,
                       impl_->Try(impl_->Deadline(timeout), &interrupt, [&](Impl::Call& call) {
                         grpc::CompletionQueue queue;
                         return Impl::AwaitUnary(call.connection().health_stub().PrepareAsyncCheck(
                                                     call.context(), request, &queue),
                                                 &queue, call);
                       }));
  return response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

absl::StatusOr<ModelInfo> Client::GetModel(std::string_view model, absl::Duration timeout) {
  EMA_ASSIGN_OR_RETURN(const v1::Model reply,
                       impl_->UnaryWithRetries(&Stub::PrepareAsyncGetModel,
                                               MakeRequest<v1::GetModelRequest>(model), timeout));
  return FromProto(reply);
}

absl::StatusOr<std::vector<ModelInfo>> Client::ListModels(absl::Duration timeout) {
  EMA_ASSIGN_OR_RETURN(
      const v1::ListModelsResponse response,
      impl_->UnaryWithRetries(&Stub::PrepareAsyncListModels, v1::ListModelsRequest(), timeout));
  std::vector<ModelInfo> models;
  models.reserve(response.models_size());
  for (const v1::Model& model : response.models()) {
    EMA_ASSIGN_OR_RETURN(ModelInfo info, FromProto(model));
    models.push_back(std::move(info));
  }
  return models;
}

absl::Status Client::DeleteModel(std::string_view model, bool purge, absl::Duration timeout) {
  auto request = MakeRequest<v1::DeleteModelRequest>(model);
  request.set_confirm_model(std::string(model));
  request.set_purge(purge);
  return impl_->UnaryWithRetries(&Stub::PrepareAsyncDeleteModel, request, timeout).status();
}

absl::StatusOr<Client::RecoveredModel> Client::RecoverModel(std::string_view model,
                                                            absl::Duration timeout) {
  EMA_ASSIGN_OR_RETURN(
      const v1::RecoverModelResponse response,
      impl_->UnaryWithRetries(&Stub::PrepareAsyncRecoverModel,
                              MakeRequest<v1::RecoverModelRequest>(model), timeout));
  return RecoveredModel{.base = {response.base().version(), response.base().incarnation()},
                        .step = response.step(),
                        .incarnation = response.incarnation(),
                        .checkpoint_count = response.checkpoint_count(),
                        .members = {response.members().begin(), response.members().end()}};
}

absl::StatusOr<Client::RebalancedModel> Client::RebalanceModel(
    std::string_view model, const std::vector<std::string>& without, absl::Duration timeout) {
  auto request = MakeRequest<v1::RebalanceModelRequest>(model);
  request.mutable_without()->Assign(without.begin(), without.end());
  EMA_ASSIGN_OR_RETURN(const v1::RebalanceModelResponse response,
                       impl_->UnaryOnce(&Stub::PrepareAsyncRebalanceModel, request, timeout));
  return RebalancedModel{.has_changed = response.has_changed(),
                         .incarnation = response.incarnation(),
                         .base = {response.base().version(), response.base().incarnation()},
                         .step = response.step(),
                         .members = {response.members().begin(), response.members().end()}};
}

absl::StatusOr<std::vector<Client::ListedVersion>> Client::ListVersions(std::string_view model,
                                                                        int64_t after_version,
                                                                        absl::Duration timeout) {
  auto request = MakeRequest<v1::ListVersionsRequest>(model);
  client_internal::Interrupt interrupt(&impl_->options().is_interrupted);
  const SteadyTime deadline = impl_->Deadline(timeout);
  std::vector<ListedVersion> versions;
  while (true) {
    request.set_after_version(after_version);
    EMA_ASSIGN_OR_RETURN(
        const v1::ListVersionsResponse response,
        impl_->UnaryWithRetries(&Stub::PrepareAsyncListVersions, request, deadline, &interrupt));
    if (response.versions().empty() ||
        response.versions().rbegin()->version().version() <= after_version) {
      return versions;
    }
    for (const v1::ListVersionsResponse::Entry& entry : response.versions()) {
      versions.push_back({FromProto(entry.version()), entry.available()});
    }
    after_version = versions.back().version.number;
  }
}

absl::StatusOr<Version> Client::GetStatistics(std::string_view model,
                                              const StatisticsOptions& options,
                                              absl::Duration timeout) {
  auto request = MakeRequest<v1::GetStatisticsRequest>(model, options.id);
  for (const std::string& track : options.tracks) request.add_tracks(track);
  EMA_ASSIGN_OR_RETURN(const v1::VersionRecord record,
                       impl_->UnaryWithRetries(&Stub::PrepareAsyncGetStatistics, request, timeout));
  return FromProto(record);
}

absl::StatusOr<Synthesis> Client::Synthesize(std::string_view model,
                                             const SynthesizeOptions& options,
                                             absl::Duration timeout) {
  if (options.sigma_rel.has_value() && !options.half_life.empty()) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
        absl::StrCat("sigma_rel ", *options.sigma_rel, " and half_life \"", options.half_life,
                     "\" are both given: give one, such as "
                     "sigma_rel=0.07"));
  }
  auto request = MakeRequest<v1::SynthesizeRequest>(model);
  request.set_name(options.name);
  if (options.sigma_rel.has_value()) request.set_sigma_rel(*options.sigma_rel);
  if (!options.half_life.empty()) request.set_half_life(options.half_life);
  request.set_step(options.step);
  for (const std::string& track : options.tracks) request.add_tracks(track);
  EMA_ASSIGN_OR_RETURN(const v1::SynthesizeResponse response,
                       impl_->UnaryWithRetries(&Stub::PrepareAsyncSynthesize, request, timeout));
  Synthesis result{FromProto(response.version()), response.residual(), {}};
  for (const v1::SynthesizeResponse::Source& source : response.sources()) {
    result.sources.push_back({source.track(), source.step(), source.weight()});
  }
  return result;
}

}  // namespace ema
