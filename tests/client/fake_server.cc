// SPDX-License-Identifier: Apache-2.0
#include "tests/client/fake_server.h"

#include <algorithm>
#include <chrono>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/transport/convert_replies.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/v1/error.pb.h"
#include "server/base/crc32c.h"

namespace ema {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

std::span<const std::byte> AsBytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace

grpc::Status WithDetail(grpc::ServerContext* context, const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  // Without a reason: as if the transport had failed.
  if (GetErrorReason(status) != ErrorReason::kUnspecified) {
    v1::ErrorDetail detail;
    detail.set_reason(static_cast<v1::ErrorReason>(GetErrorReason(status)));
    detail.set_retry_delay_ms(absl::ToInt64Milliseconds(GetRetryDelay(status)));
    const GroupHint hint = GetGroupHint(status);
    detail.set_home(hint.home);
    detail.set_round(hint.round);
    detail.set_incarnation(hint.incarnation);
    context->AddTrailingMetadata("ema-error-detail-bin", detail.SerializeAsString());
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

FakeServer::FakeServer(Manifest manifest) : manifest_(std::move(manifest)) { Start(); }

FakeServer::~FakeServer() { Stop(); }

std::string FakeServer::address() const { return absl::StrCat("127.0.0.1:", port_); }

void FakeServer::Start() {
  {
    absl::MutexLock lock(&mu_);
    is_stopping_ = false;
  }
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("127.0.0.1:", port_), grpc::InsecureServerCredentials(),
                           &port_);
  builder.SetMaxReceiveMessageSize(8 << 20);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
}

void FakeServer::Stop() {
  {
    absl::MutexLock lock(&mu_);
    is_stopping_ = true;
  }
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  server_.reset();
}

void FakeServer::ForgetRuns() {
  absl::MutexLock lock(&mu_);
  launch_id_.clear();
  layouts_.clear();
  steps_.clear();
}

void FakeServer::Release() {
  absl::MutexLock lock(&mu_);
  released_ = true;
}

void FakeServer::SetLatest(const v1::VersionRecord& record) {
  absl::MutexLock lock(&mu_);
  latest_ = record;
}

void FakeServer::Publish(const v1::VersionRecord& record, int64_t next_round) {
  absl::MutexLock lock(&mu_);
  steps_[record.step()].record = latest_ = record;
  next_round_ = next_round;
}

void FakeServer::AbandonStep(int64_t step) {
  absl::MutexLock lock(&mu_);
  const auto found = steps_.find(step);
  if (found != steps_.end() && found->second.record.version() == 0) {
    found->second.abandoned = true;
  }
}

int64_t FakeServer::PushingRanksLocked() const {
  if (!on_complete) return world_size;
  const auto count = std::count_if(layouts_.begin(), layouts_.end(), [](const auto& layout) {
    return !layout.second.shards().empty();
  });
  return std::max<int64_t>(count, 1);
}

std::vector<FakeServer::SeenPush> FakeServer::pushes() const {
  absl::MutexLock lock(&mu_);
  return pushes_;
}

bool FakeServer::AwaitPushes(size_t count) const {
  absl::MutexLock lock(&mu_);
  const auto is_reached = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return pushes_.size() >= count; };
  return mu_.AwaitWithTimeout(absl::Condition(&is_reached), kPatience);
}

bool FakeServer::AwaitNoPush() const {
  absl::MutexLock lock(&mu_);
  const auto is_reached = [this]()
                              ABSL_SHARED_LOCKS_REQUIRED(mu_) { return open_push_count_ == 0; };
  return mu_.AwaitWithTimeout(absl::Condition(&is_reached), kPatience);
}

size_t FakeServer::unary_count() const {
  absl::MutexLock lock(&mu_);
  return unary_count_;
}

std::vector<v1::QueryPushRequest> FakeServer::queries() const {
  absl::MutexLock lock(&mu_);
  return queries_;
}

std::vector<v1::WatchRequest> FakeServer::watches() const {
  absl::MutexLock lock(&mu_);
  return watches_;
}

std::vector<v1::PullRequest> FakeServer::pulls() const {
  absl::MutexLock lock(&mu_);
  return pulls_;
}

std::vector<v1::OpenRunRequest> FakeServer::open_runs() const {
  absl::MutexLock lock(&mu_);
  return open_runs_;
}

int64_t FakeServer::open_run_count() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(open_runs_.size());
}

std::vector<std::string> FakeServer::checkpoint_calls() const {
  absl::MutexLock lock(&mu_);
  return checkpoint_calls_;
}

std::string FakeServer::StepBytes(int64_t step, int64_t rank) const {
  absl::MutexLock lock(&mu_);
  std::string bytes;
  const auto found = steps_.find(step);
  if (found == steps_.end()) return bytes;
  const auto found_rank = found->second.ranks.find(rank);
  if (found_rank == found->second.ranks.end()) return bytes;
  for (const auto& [offset, data] : found_rank->second.chunks) bytes += data;
  return bytes;
}

bool FakeServer::IsCommitted(int64_t step) const {
  absl::MutexLock lock(&mu_);
  const auto found = steps_.find(step);
  return found != steps_.end() && found->second.committed_count == world_size;
}

absl::Status FakeServer::TakeUnaryError() {
  absl::MutexLock lock(&mu_);
  const size_t index = unary_count_++;
  return index < unary_errors.size() ? unary_errors[index] : absl::OkStatus();
}

v1::PushPlan FakeServer::MakePlan(const v1::VersionRecord& latest) const {
  if (plan.has_value()) return *plan;
  v1::PushPlan result;
  result.set_revision(1);
  v1::PushPlan::Entry* const entry = result.add_tracks();
  v1::Track* const track = entry->mutable_track();
  track->set_name("ema");
  (*track->mutable_schedule())["half_life"] = "100ba";
  (*track->mutable_schedule())["update_interval"] = "10ba";
  if (latest.version() != 0) {
    v1::ScheduleState* const state = entry->add_states();
    state->set_update_count(latest.version());
    state->set_averaged_count(latest.version());
    *state->mutable_last_update() = latest.time();
    *state->mutable_started() = latest.time();
  }
  return result;
}

v1::Model FakeServer::MakeModel() {
  v1::Model model;
  model.set_name("m");
  ToProto(manifest_, model.mutable_manifest());
  model.set_manifest_digest(manifest_.digest());
  *model.add_tracks() = MakePlan(v1::VersionRecord()).tracks(0).track();
  model.set_max_pinned_versions(2);
  {
    absl::MutexLock lock(&mu_);
    if (latest_.version() != 0) *model.mutable_latest() = latest_;
  }
  if (edit_model) edit_model(model);
  return model;
}

grpc::Status FakeServer::CreateModel(grpc::ServerContext* context, const v1::CreateModelRequest*,
                                     v1::CreateModelResponse* response) {
  if (const absl::Status error = TakeUnaryError(); !error.ok()) return WithDetail(context, error);
  *response->mutable_model() = MakeModel();
  response->set_created(true);
  return grpc::Status::OK;
}

grpc::Status FakeServer::GetModel(grpc::ServerContext* context, const v1::GetModelRequest*,
                                  v1::Model* response) {
  if (const absl::Status error = TakeUnaryError(); !error.ok()) return WithDetail(context, error);
  *response = MakeModel();
  return grpc::Status::OK;
}

grpc::Status FakeServer::ListModels(grpc::ServerContext* context, const v1::ListModelsRequest*,
                                    v1::ListModelsResponse* response) {
  if (const absl::Status error = TakeUnaryError(); !error.ok()) return WithDetail(context, error);
  *response->add_models() = MakeModel();
  response->mutable_models(0)->clear_manifest();
  return grpc::Status::OK;
}

grpc::Status FakeServer::ListVersions(grpc::ServerContext*, const v1::ListVersionsRequest*,
                                      v1::ListVersionsResponse* response) {
  *response->add_versions()->mutable_version() = latest_;
  return grpc::Status::OK;
}

grpc::Status FakeServer::OpenRun(grpc::ServerContext* context, const v1::OpenRunRequest* request,
                                 v1::OpenRunResponse* response) {
  std::vector<Shard> shards;
  for (const v1::Shard& shard : request->layout().shards()) {
    shards.push_back({.tensor_index = shard.tensor_index(),
                      .offsets = {shard.offsets().begin(), shard.offsets().end()},
                      .extents = {shard.extents().begin(), shard.extents().end()}});
  }
  absl::StatusOr<RankLayout> layout =
      RankLayout::Create(manifest_, std::move(shards), request->layout().frozen_shard_count(),
                         static_cast<WireDtype>(request->layout().wire_dtype()));
  if (!layout.ok()) return WithDetail(context, layout.status());
  const absl::Status checked = check_open_run ? check_open_run(*request) : absl::OkStatus();
  {
    absl::MutexLock lock(&mu_);
    open_runs_.push_back(*request);
    if (!checked.ok()) return WithDetail(context, checked);
    if (fenced) {
      return WithDetail(context, MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced,
                                           "launch_id has been fenced"));
    }
    if (!open_run_error.ok()) return WithDetail(context, open_run_error);
    if (launch_id_ != request->launch_id()) {
      launch_id_ = request->launch_id();
      run_epoch_ = request->run_epoch() != 0 ? request->run_epoch() : run_epoch_ + 1;
      layouts_.clear();
    }
    response->set_layout_digest(layout->digest());
    layouts_.insert_or_assign(request->rank(), *std::move(layout));
    response->set_run_epoch(run_epoch_);
    response->set_ready(static_cast<int64_t>(open_runs_.size()) > not_ready_count);
    if (!response->ready()) response->add_missing_ranks(7);
    if (latest_.version() != 0) *response->mutable_latest() = latest_;
    *response->mutable_plan() = MakePlan(latest_);
  }
  if (edit_open_run) edit_open_run(*response);
  if (hold_join) Hold(context);
  return grpc::Status::OK;
}

void FakeServer::Hold(grpc::ServerContext* context) {
  absl::MutexLock lock(&mu_);
  const auto is_over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return released_ || is_stopping_; };
  while (!context->IsCancelled() &&
         !mu_.AwaitWithTimeout(absl::Condition(&is_over), absl::Milliseconds(2))) {
  }
}

absl::Status FakeServer::AddChunk(const v1::PushHeader& header, const v1::PushChunk& chunk) {
  absl::MutexLock lock(&mu_);
  if (Crc32c(0, AsBytes(chunk.data())) != chunk.crc32c()) {
    return MakeError(absl::StatusCode::kDataLoss, ErrorReason::kChunkCorrupt, "crc32c");
  }
  steps_[header.step()].ranks[header.rank()].chunks[chunk.offset()] = chunk.data();
  return absl::OkStatus();
}

absl::Status FakeServer::Commit(const v1::PushHeader& header, const v1::PushCommit& commit,
                                int64_t chunk_count) {
  bool is_complete = false;
  {
    absl::MutexLock lock(&mu_);
    EMA_RETURN_IF_ERROR(CommitLocked(header, commit, chunk_count, &is_complete));
  }
  if (is_complete && on_complete) on_complete(header.step());
  return absl::OkStatus();
}

absl::Status FakeServer::CommitLocked(const v1::PushHeader& header, const v1::PushCommit& commit,
                                      int64_t chunk_count, bool* is_complete) {
  Step& step = steps_[header.step()];
  RankBytes& rank = step.ranks[header.rank()];
  std::string bytes;
  for (const auto& [offset, data] : rank.chunks) {
    if (offset != static_cast<int64_t>(bytes.size())) break;
    bytes += data;
  }
  if (static_cast<int64_t>(bytes.size()) != layouts_.at(header.rank()).total_bytes()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kPushIncomplete,
                     "bytes are missing");
  }
  if (commit.chunk_count() != chunk_count) {
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kCountMismatch, "counts");
  }
  if (commit.digest() != Crc32c(0, AsBytes(bytes))) {
    return MakeError(absl::StatusCode::kDataLoss, ErrorReason::kDigestMismatch, "digest");
  }
  if (!std::exchange(rank.committed, true)) ++step.committed_count;
  *is_complete = step.committed_count == PushingRanksLocked();
  if (on_complete) return absl::OkStatus();
  if (*is_complete && step.record.version() == 0) {
    step.record.set_incarnation(1);
    step.record.set_version(latest_.version() + 1);
    step.record.set_step(header.step());
    *step.record.mutable_time() = header.time();
    v1::TrackRecord* const track = step.record.add_tracks();
    track->set_track("ema");
    track->set_updated(true);
    track->set_update_count(step.record.version());
    latest_ = step.record;
  }
  return absl::OkStatus();
}

absl::Status FakeServer::Answer(grpc::ServerContext* context, const v1::PushHeader& header,
                                v1::PushResponse* response) {
  absl::MutexLock lock(&mu_);
  const auto is_over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    const Step& step = steps_[header.step()];
    return is_stopping_ || step.abandoned || step.record.version() != 0;
  };
  while (!mu_.AwaitWithTimeout(absl::Condition(&is_over), absl::Milliseconds(2))) {
    if (context->IsCancelled()) return absl::CancelledError("cancelled");
  }
  if (is_stopping_) return absl::UnavailableError("stopping");
  if (steps_[header.step()].abandoned) {
    return MakeError(absl::StatusCode::kAborted, ErrorReason::kStepAbandoned, "abandoned");
  }
  *response->mutable_version() = steps_[header.step()].record;
  *response->mutable_plan() = MakePlan(latest_);
  response->set_round(next_round_);
  return absl::OkStatus();
}

grpc::Status FakeServer::Push(grpc::ServerContext* context,
                              grpc::ServerReader<v1::PushRequest>* reader,
                              v1::PushResponse* response) {
  v1::PushRequest message;
  if (!reader->Read(&message) || !message.has_header()) {
    return grpc::Status(grpc::StatusCode::CANCELLED, "no header");
  }
  const v1::PushHeader header = message.header();
  const absl::Cleanup note_end = [this] {
    absl::MutexLock lock(&mu_);
    --open_push_count_;
  };
  PushScript script;
  size_t index = 0;
  absl::Status error;
  const absl::Status checked = check_push ? check_push(header) : absl::OkStatus();
  {
    absl::MutexLock lock(&mu_);
    index = pushes_.size();
    pushes_.push_back({.header = header});
    ++open_push_count_;
    if (index < push_scripts.size()) script = push_scripts[index];
    if (header.run_epoch() != run_epoch_ || launch_id_.empty()) {
      error = MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced, "run_epoch");
    } else if (!checked.ok()) {
      error = checked;
    } else if (script.refuse.ok()) {
      Step& step = steps_[header.step()];
      if (on_complete && step.abandoned) step = Step();
    }
  }
  if (!error.ok()) return WithDetail(context, error);
  if (!script.refuse.ok()) return WithDetail(context, script.refuse);
  if (script.hold_chunks) Hold(context);

  int64_t chunk_count = 0;
  while (true) {
    if (chunk_count == script.break_after_chunks) return WithDetail(context, script.break_status);
    if (!reader->Read(&message)) {
      return WithDetail(context, MakeError(absl::StatusCode::kInvalidArgument,
                                           ErrorReason::kNoCommit, "no commit"));
    }
    if (message.has_commit()) break;
    const v1::PushChunk& chunk = message.chunk();
    {
      absl::MutexLock lock(&mu_);
      pushes_[index].chunks.emplace_back(chunk.offset(), chunk.data().size());
    }
    if (chunk_count == script.corrupt_chunk) {
      error = MakeError(absl::StatusCode::kDataLoss, ErrorReason::kChunkCorrupt, "crc32c");
    } else {
      error = AddChunk(header, chunk);
    }
    if (!error.ok()) return WithDetail(context, error);
    ++chunk_count;
  }
  {
    absl::MutexLock lock(&mu_);
    pushes_[index].has_commit = true;
    pushes_[index].commit = message.commit();
  }
  if (script.lose_commit) return WithDetail(context, script.break_status);
  if (error = Commit(header, message.commit(), chunk_count); !error.ok()) {
    return WithDetail(context, error);
  }
  if (script.lose_reply) return WithDetail(context, script.break_status);
  if (script.hold_reply) Hold(context);
  return WithDetail(context, Answer(context, header, response));
}

grpc::Status FakeServer::QueryPush(grpc::ServerContext* context,
                                   const v1::QueryPushRequest* request,
                                   v1::QueryPushResponse* response) {
  if (const absl::Status error = TakeUnaryError(); !error.ok()) return WithDetail(context, error);
  // Also where the step has not come to this server.
  if (on_abandon && request->abandon_if_unfinished()) {
    response->set_round(on_abandon(request->step()));
  }
  absl::MutexLock lock(&mu_);
  queries_.push_back(*request);
  if (request->run_epoch() != run_epoch_ || launch_id_.empty()) {
    return WithDetail(context,
                      MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced, "run_epoch"));
  }
  const auto found = steps_.find(request->step());
  if (found == steps_.end() || found->second.abandoned) {
    response->set_state(on_abandon && request->abandon_if_unfinished()
                            ? v1::QueryPushResponse::STATE_ABANDONED
                            : v1::QueryPushResponse::STATE_UNKNOWN);
    return grpc::Status::OK;
  }
  Step& step = found->second;
  if (step.record.version() != 0) {
    response->set_state(v1::QueryPushResponse::STATE_COMMITTED);
    *response->mutable_plan() = MakePlan(latest_);
    *response->mutable_version() = step.record;
    if (committed_digest.has_value()) response->set_digest(*committed_digest);
    return grpc::Status::OK;
  }
  if (request->abandon_if_unfinished()) {
    step.abandoned = true;
    response->set_state(v1::QueryPushResponse::STATE_ABANDONED);
    return grpc::Status::OK;
  }
  response->set_state(v1::QueryPushResponse::STATE_OPEN);
  const RankBytes& rank = step.ranks[request->rank()];
  response->set_rank_committed(rank.committed);
  response->add_missing_ranks(1);
  int64_t end = 0;
  const auto add_missing = [&](int64_t until) {
    if (until == end) return;
    auto* const range = response->add_missing();
    range->set_offset(end);
    range->set_length_bytes(until - end);
  };
  for (const auto& [offset, data] : rank.chunks) {
    add_missing(offset);
    end = offset + static_cast<int64_t>(data.size());
  }
  add_missing(layouts_.at(request->rank()).total_bytes());
  return grpc::Status::OK;
}

grpc::Status FakeServer::Pull(grpc::ServerContext* context, const v1::PullRequest* request,
                              grpc::ServerWriter<v1::PullResponse>* writer) {
  PullScript script;
  {
    absl::MutexLock lock(&mu_);
    const size_t index = pulls_.size();
    pulls_.push_back(*request);
    if (index < pull_scripts.size()) script = pull_scripts[index];
  }
  if (!script.refuse.ok()) return WithDetail(context, script.refuse);
  if (const absl::Status checked = check_pull ? check_pull(*request) : absl::OkStatus();
      !checked.ok()) {
    return WithDetail(context, checked);
  }
  v1::PullResponse message;
  v1::PullHeader* const header = message.mutable_header();
  header->mutable_version()->set_incarnation(3);
  header->mutable_version()->set_version(42);
  header->mutable_version()->set_commit_time_us(script.commit_time_us);
  header->set_total_bytes(static_cast<int64_t>(pulled_bytes.size()));
  auto* const tensor = header->add_tensors();
  tensor->mutable_spec()->set_name("bytes");
  tensor->mutable_spec()->set_dtype(v1::DTYPE_UINT8);
  tensor->mutable_spec()->add_shape(static_cast<int64_t>(pulled_bytes.size()));
  tensor->set_length_bytes(static_cast<int64_t>(pulled_bytes.size()));
  if (edit_pull_header) edit_pull_header(*header);
  writer->Write(message);

  int64_t chunk_count = 0;
  const auto start = static_cast<size_t>(request->offset());
  for (size_t offset = start; offset < pulled_bytes.size(); offset += pull_chunk_bytes) {
    if (chunk_count == script.break_after_chunks) {
      return WithDetail(context, absl::UnavailableError("the pull broke"));
    }
    v1::PullChunk* const chunk = message.mutable_chunk();
    chunk->set_offset(static_cast<int64_t>(offset));
    chunk->set_data(pulled_bytes.substr(offset, pull_chunk_bytes));
    chunk->set_crc32c(Crc32c(0, AsBytes(chunk->data())));
    if (chunk_count == script.corrupt_chunk) (*chunk->mutable_data())[5] ^= 1;
    ++chunk_count;
    if (script.skip_chunk && chunk_count == 2) continue;
    if (script.other_field_order) {
      v1::PullResponse extended = message;
      // An unknown field after the known ones.
      extended.GetReflection()->MutableUnknownFields(&extended)->AddVarint(99, 1);
      writer->Write(extended);
    } else {
      writer->Write(message);
    }
  }
  if (script.no_trailer) return grpc::Status::OK;
  v1::PullTrailer* const trailer = message.mutable_trailer();
  trailer->set_chunk_count(chunk_count + (script.wrong_count ? 1 : 0));
  const std::string sent = pulled_bytes.substr(start);
  trailer->set_total_bytes(static_cast<int64_t>(sent.size()));
  trailer->set_digest(Crc32c(0, AsBytes(sent)) ^ (script.wrong_digest ? 1 : 0));
  writer->Write(message);
  return grpc::Status::OK;
}

grpc::Status FakeServer::Watch(grpc::ServerContext* context, const v1::WatchRequest* request,
                               grpc::ServerWriter<v1::WatchResponse>* writer) {
  WatchScript script;
  {
    absl::MutexLock lock(&mu_);
    const size_t index = watches_.size();
    watches_.push_back(*request);
    if (index < watch_scripts.size()) script = watch_scripts[index];
  }
  for (const v1::VersionRecord& version : script.versions) {
    v1::WatchResponse message;
    *message.mutable_version() = version;
    writer->Write(message);
  }
  if (script.hold) Hold(context);
  return WithDetail(context, script.end);
}

absl::Status FakeServer::NoteCheckpointCall(std::string_view name,
                                            const google::protobuf::Message& request) {
  {
    absl::MutexLock lock(&mu_);
    checkpoint_calls_.push_back(absl::StrCat(std::string(name), " ", request.ShortDebugString()));
  }
  return TakeUnaryError();
}

grpc::Status FakeServer::CreateCheckpoint(grpc::ServerContext* context,
                                          const v1::CreateCheckpointRequest* request,
                                          v1::CreateCheckpointResponse* response) {
  if (const absl::Status error = NoteCheckpointCall("CreateCheckpoint", *request); !error.ok()) {
    return WithDetail(context, error);
  }
  response->mutable_version()->set_incarnation(checkpoint.incarnation());
  response->mutable_version()->set_version(checkpoint.version());
  response->mutable_version()->set_step(checkpoint.step());
  response->set_checkpoint(checkpoint.name());
  response->set_total_bytes(checkpoint.total_bytes());
  response->set_state(checkpoint.state());
  return grpc::Status::OK;
}

grpc::Status FakeServer::GetCheckpoint(grpc::ServerContext* context,
                                       const v1::GetCheckpointRequest* request,
                                       v1::Checkpoint* response) {
  if (const absl::Status error = NoteCheckpointCall("GetCheckpoint", *request); !error.ok()) {
    return WithDetail(context, error);
  }
  *response = checkpoint;
  return grpc::Status::OK;
}

grpc::Status FakeServer::ListCheckpoints(grpc::ServerContext* context,
                                         const v1::ListCheckpointsRequest* request,
                                         v1::ListCheckpointsResponse* response) {
  if (const absl::Status error = NoteCheckpointCall("ListCheckpoints", *request); !error.ok()) {
    return WithDetail(context, error);
  }
  *response->add_checkpoints() = checkpoint;
  *response->add_labels() = label;
  return grpc::Status::OK;
}

grpc::Status FakeServer::DeleteCheckpoint(grpc::ServerContext* context,
                                          const v1::DeleteCheckpointRequest* request, v1::Empty*) {
  if (const absl::Status error = NoteCheckpointCall("DeleteCheckpoint", *request); !error.ok()) {
    return WithDetail(context, error);
  }
  return grpc::Status::OK;
}

grpc::Status FakeServer::RestoreCheckpoint(grpc::ServerContext* context,
                                           const v1::RestoreCheckpointRequest* request,
                                           v1::VersionRecord* response) {
  if (const absl::Status error = NoteCheckpointCall("RestoreCheckpoint", *request); !error.ok()) {
    return WithDetail(context, error);
  }
  response->set_incarnation(checkpoint.incarnation());
  response->set_version(checkpoint.version() + 1);
  response->mutable_restored_from()->set_incarnation(checkpoint.incarnation());
  response->mutable_restored_from()->set_version(checkpoint.version());
  return grpc::Status::OK;
}

grpc::Status FakeServer::SetLabel(grpc::ServerContext* context, const v1::SetLabelRequest* request,
                                  v1::Label* response) {
  if (const absl::Status error = NoteCheckpointCall("SetLabel", *request); !error.ok()) {
    return WithDetail(context, error);
  }
  if (!request->remove()) *response = label;
  return grpc::Status::OK;
}

grpc::Status FakeServer::ReportMetric(grpc::ServerContext* context,
                                      const v1::ReportMetricRequest* request,
                                      v1::ReportMetricResponse* response) {
  if (const absl::Status error = NoteCheckpointCall("ReportMetric", *request); !error.ok()) {
    return WithDetail(context, error);
  }
  *response->mutable_label() = label;
  response->set_moved(true);
  return grpc::Status::OK;
}

}  // namespace ema
