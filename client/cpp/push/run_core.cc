// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/run_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/push/due_tracks.h"
#include "client/cpp/push/server_push.h"
#include "client/cpp/push/staged_chunks.h"
#include "client/cpp/transport/convert_replies.h"
#include "client/cpp/transport/fork_guard.h"
#include "client/cpp/transport/retry.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

// After the server had no memory for the window.
constexpr absl::Duration kWindowRetryInterval = absl::Minutes(1);
// Less is not worth a connection.
constexpr int64_t kMinBytesOfConnection = int64_t{16} << 20;

void FillResume(const ResumePoint& point, v1::Resume* proto) {
  proto->set_step(point.step);
  if (point.version.has_value()) {
    proto->mutable_version()->set_version(point.version->version);
    proto->mutable_version()->set_incarnation(point.version->incarnation);
  }
  if (point.time.has_value()) ema::ToProto(*point.time, proto->mutable_time());
}

}  // namespace

absl::StatusOr<std::shared_ptr<RunCore>> RunCore::Create(std::shared_ptr<Client::Impl> client,
                                                         ModelInfo info, Client::RunOptions options,
                                                         const Group* group, SteadyTime deadline,
                                                         Interrupt* interrupt) {
  if (!options.shards.has_value()) {
    options.shards.emplace();
    for (int64_t i = 0; i < info.manifest.tensor_count(); ++i) {
      options.shards->push_back(WholeTensor(info.manifest, i));
    }
  }
  EMA_ASSIGN_OR_RETURN(RankLayout layout,
                       RankLayout::Create(info.manifest, *options.shards,
                                          options.frozen_shard_count, options.wire_dtype));
  options.shards.reset();
  int64_t chunk_bytes = client->options().chunk_bytes;
  // Chunks have the same bounds over a lane and over gRPC. An offered lane may be out of reach, in
  // another container of this host.
  absl::StatusOr<std::unique_ptr<LanePipe>> lane = client->TakeLane(deadline, interrupt);
  const absl::Status lane_status = lane.status();
  if (lane.ok()) {
    chunk_bytes = std::min(chunk_bytes, LanePipe::kMaxChunkBytes);
    client->ReturnLane(*std::move(lane));
  }
  return std::shared_ptr<RunCore>(new RunCore(
      std::move(client), std::move(info), std::move(options), group != nullptr ? *group : Group(),
      std::move(layout), chunk_bytes, lane_status));
}

RunCore::RunCore(std::shared_ptr<Client::Impl> client, ModelInfo info, Client::RunOptions options,
                 Group group, RankLayout layout, int64_t chunk_bytes, absl::Status lane_status)
    : client_(std::move(client)),
      info_(std::move(info)),
      options_(std::move(options)),
      group_(std::move(group)),
      layout_(std::move(layout)),
      chunks_(layout_, chunk_bytes),
      ring_(options_.max_staging_bytes),
      lane_status_(std::move(lane_status)),
      connection_count_(
          std::min(client_->max_connections(), layout_.total_bytes() / kMinBytesOfConnection)) {}

int64_t RunCore::run_epoch() const {
  absl::MutexLock lock(&mu_);
  return run_epoch_;
}

std::optional<Version> RunCore::latest() const {
  absl::MutexLock lock(&mu_);
  return latest_;
}

absl::StatusOr<std::vector<int64_t>> RunCore::Join(SteadyTime deadline, Interrupt* interrupt) {
  auto request = MakeRequest<v1::OpenRunRequest>(model());
  request.set_launch_id(options_.launch_id);
  request.set_rank(options_.rank);
  request.set_world_size(options_.world_size);
  request.set_manifest_digest(manifest().digest());
  request.set_last_run_epoch(std::max(run_epoch(), options_.last_run_epoch));
  ToProto(layout_, request.mutable_layout());
  if (options_.resume.has_value() && !HasBeenReady()) {
    FillResume(*options_.resume, request.mutable_resume());
  }
  if (group_.home != nullptr) {
    request.clear_resume();
    request.set_run_epoch(group_.home->run_epoch());
    request.set_incarnation(group_.round->incarnation());
  }
  EMA_ASSIGN_OR_RETURN(
      const v1::OpenRunResponse response,
      client_->UnaryWithRetries(&Stub::PrepareAsyncOpenRun, request, deadline, interrupt));
  if (response.layout_digest() != layout_.digest()) {
    return MalformedReply(absl::StrCat("the layout's digest is ", response.layout_digest(),
                                       ", expected ", layout_.digest()));
  }
  EMA_ASSIGN_OR_RETURN(RunPlan plan, FromProto(response.plan()));
  std::optional<Version> latest;
  if (response.has_latest()) latest = FromProto(response.latest());
  NoteRound(response.round());
  // Of a home that says so, the other partitions are not there yet.
  const bool is_home_ready = group_.round == nullptr || response.round() > 0;
  const bool is_ready = response.ready() && (group_.home != nullptr || is_home_ready);
  absl::MutexLock lock(&mu_);
  if (run_epoch_ != response.run_epoch()) {
    // A server that was restarted may have an older version.
    run_epoch_ = response.run_epoch();
    is_ready_ = false;
    latest_.reset();
    plan_ = RunPlan();
  }
  is_ready_ |= is_ready;
  has_been_ready_ |= is_ready_;
  TakeLocked(std::move(latest), std::move(plan));
  if (is_ready) return std::vector<int64_t>();
  // So that "not ready" is never an empty list.
  if (response.missing_ranks().empty()) return std::vector<int64_t>{-1};
  return std::vector<int64_t>(response.missing_ranks().begin(), response.missing_ranks().end());
}

absl::Status RunCore::WaitReady(SteadyTime deadline, Interrupt* interrupt) {
  Backoff backoff;
  if (group_.home != nullptr) EMA_RETURN_IF_ERROR(group_.home->WaitReady(deadline, interrupt));
  const int64_t home_epoch = group_.home != nullptr ? group_.home->run_epoch() : 0;
  std::vector<int64_t> missing_ranks;  // From the answer to the newest call that was answered.
  SteadyTime last_answered;            // When that call began.
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      if (home_epoch != 0 && run_epoch_ != home_epoch) is_ready_ = false;
      if (is_ready_ || !fenced_.ok()) return fenced_;
    }
    const SteadyTime now = SteadyNow();
    absl::StatusOr<std::vector<int64_t>> answer = Join(deadline, interrupt);
    if (GetErrorReason(answer.status()) == ErrorReason::kFenced) {
      absl::MutexLock lock(&mu_);
      fenced_ = answer.status();
    }
    // The deadline ended this call. One that began less than 5 s ago was answered, so the server
    // does not hang.
    const bool is_late = absl::IsDeadlineExceeded(answer.status()) && !missing_ranks.empty() &&
                         Since(last_answered) < absl::Seconds(5);
    if (!answer.ok() && !is_late) return answer.status();
    if (answer.ok()) {
      missing_ranks = *std::move(answer);
      last_answered = now;
    }
    if (missing_ranks.empty()) return absl::OkStatus();
    const absl::Duration delay = backoff.Next(absl::OkStatus());
    if (is_late || After(SteadyNow(), delay) >= deadline) {
      return MakeError(absl::StatusCode::kDeadlineExceeded, ErrorReason::kRunIncomplete,
                       absl::StrCat("model \"", model(),
                                    "\": timed out waiting for ranks to join the run; missing: ",
                                    absl::StrJoin(missing_ranks, ", ")));
    }
    if (!interrupt->Sleep(delay)) return absl::CancelledError("interrupted");
  }
}

bool RunCore::IsReady(int64_t run_epoch) const {
  absl::MutexLock lock(&mu_);
  return is_ready_ && run_epoch_ == run_epoch;
}

bool RunCore::HasBeenReady() const {
  absl::MutexLock lock(&mu_);
  return has_been_ready_;
}

void RunCore::MarkNotReady() {
  if (group_.home != nullptr) group_.home->MarkNotReady();
  absl::MutexLock lock(&mu_);
  is_ready_ = false;
}

v1::QueryPushRequest RunCore::MakeQuery(int64_t step, bool abandon_if_unfinished) const {
  auto request = MakeRequest<v1::QueryPushRequest>(model());
  request.set_run_epoch(run_epoch());
  request.set_step(step);
  request.set_rank(rank());
  request.set_abandon_if_unfinished(abandon_if_unfinished);
  return request;
}

absl::StatusOr<PushProgress> RunCore::FromResponse(const v1::QueryPushResponse& response) {
  NoteRound(response.round());
  return FromProto(response);
}

absl::StatusOr<PushProgress> RunCore::QueryPush(int64_t step, bool abandon_if_unfinished,
                                                SteadyTime deadline, Interrupt* interrupt,
                                                bool retry, std::string_view skip_reason) {
  v1::QueryPushRequest request = MakeQuery(step, abandon_if_unfinished);
  request.set_skip_reason(std::string(skip_reason));
  constexpr auto kMethod = &Stub::PrepareAsyncQueryPush;
  EMA_ASSIGN_OR_RETURN(const v1::QueryPushResponse response,
                       retry ? client_->UnaryWithRetries(kMethod, request, deadline, interrupt)
                             : client_->UnaryOnce(kMethod, request, deadline, interrupt));
  return FromResponse(response);
}

absl::StatusOr<int64_t> RunCore::FindRound(int64_t step, SteadyTime deadline,
                                           Interrupt* interrupt) {
  EMA_ASSIGN_OR_RETURN(
      const v1::QueryPushResponse response,
      client_->UnaryOnce(&Stub::PrepareAsyncQueryPush,
                         MakeQuery(step, /*abandon_if_unfinished=*/false), deadline, interrupt));
  return response.state() == v1::QueryPushResponse::STATE_OPEN ? response.round() : 0;
}

absl::StatusOr<PushProgress> RunCore::DropStep(int64_t step, int64_t round, SteadyTime deadline,
                                               Interrupt* interrupt, bool retry,
                                               std::string_view skip_reason) {
  v1::QueryPushRequest request = MakeQuery(step, /*abandon_if_unfinished=*/true);
  request.set_round(round);
  request.set_skip_reason(std::string(skip_reason));
  constexpr auto kMethod = &Stub::PrepareAsyncQueryPush;
  Backoff backoff;
  while (true) {
    const absl::StatusOr<v1::QueryPushResponse> response =
        retry ? client_->UnaryWithRetries(kMethod, request, deadline, interrupt)
              : client_->UnaryOnce(kMethod, request, deadline, interrupt);
    if (response.ok()) return FromResponse(*response);
    // The home has committed the step, and is publishing it.
    const bool is_ending = GetErrorReason(response.status()) == ErrorReason::kModelBusy;
    const absl::Duration delay = backoff.Next(response.status());
    if (!is_ending || After(SteadyNow(), delay) >= deadline) return response.status();
    if (!interrupt->Sleep(delay)) return absl::CancelledError("interrupted");
  }
}

absl::StatusOr<std::shared_ptr<RunningPush>> RunCore::MakePush(PushArguments arguments) {
  return MakePush(std::move(arguments), /*part=*/nullptr);
}

absl::StatusOr<std::shared_ptr<ServerPush>> RunCore::MakePush(PushArguments arguments,
                                                              const GroupPart* part) {
  const bool check = arguments.options.check;
  const std::vector<int>& devices = arguments.options.gpu_weights.devices;
  std::vector<Gpu*> gpus;
  if (std::any_of(devices.begin(), devices.end(), [](int device) { return device >= 0; })) {
    EMA_ASSIGN_OR_RETURN(gpus, ring_.WaitForTrainerStreams(arguments.options.gpu_weights));
  }
  auto push =
      std::make_shared<ServerPush>(shared_from_this(), std::move(arguments), std::move(gpus), part);
  if (check) push->CheckContent();
  return push;
}

absl::Status RunCore::AllocateRing(Gpu& gpu) {
  if (ring_.is_discarded()) {
    // Through the idle lanes the server would read the old window.
    std::vector<std::unique_ptr<LanePipe>> closed;  // Destroyed without the lock.
    absl::MutexLock lock(&mu_);
    closed.swap(window_lanes_);
  }
  const int64_t slot_bytes = StagedChunks::SlotBytes(layout_, chunks_);
  // Frozen tensors are seldom pushed: more than the minimum is allocated for the others only.
  const int64_t max_slots =
      std::max(chunks_.ChunksBefore(layout_.trained_bytes()),
               std::min(chunks_.chunk_count(), PinnedRing::kMinRingBytes / slot_bytes));
  // The server reads the window as it is, so the GPU must have written the bytes that are sent.
  const bool is_shared = lane_status_.ok() && layout_.wire_dtype() == WireDtype::kAsPushed;
  return ring_.Allocate(gpu, slot_bytes, max_slots, is_shared);
}

absl::Status RunCore::FindLane(SteadyTime deadline, Interrupt* interrupt) {
  // The chunks were made for gRPC, and are too large for a lane.
  if (chunks_.max_chunk_bytes() > LanePipe::kMaxChunkBytes) return lane_status_;
  return client_->FindLane(deadline, interrupt);
}

RunCore::PushLanes RunCore::TakeLanes(int64_t count, bool is_staged, SteadyTime deadline,
                                      Interrupt* interrupt) {
  PushLanes taken;
  const auto take = [&](int64_t most, bool has_window) {
    while (std::ssize(taken.lanes) < most) {
      absl::StatusOr<std::unique_ptr<LanePipe>> pipe =
          has_window ? TakeWindowLane(deadline, interrupt) : client_->TakeLane(deadline, interrupt);
      if (!pipe.ok()) {
        if (taken.lanes.empty()) taken.problem = pipe.status();
        return;
      }
      taken.lanes.push_back({.pipe = *std::move(pipe), .has_window = has_window});
    }
  };
  if (is_staged && ring_.window() != nullptr) {
    take(std::min(count, ring_.slot_count() / PinnedRing::kMinWindowSlots), /*has_window=*/true);
  } else if (is_staged) {
    taken.problem = layout_.wire_dtype() == WireDtype::kAsPushed
                        ? ring_.window_status()
                        : absl::UnavailableError("the weights are rounded for the wire");
  }
  if (taken.lanes.empty()) take(count, /*has_window=*/false);
  return taken;
}

void RunCore::ReturnLane(PushLane lane) {
  if (!lane.has_window) return client_->ReturnLane(std::move(lane.pipe), connection_count());
  absl::MutexLock lock(&mu_);
  if (std::ssize(window_lanes_) < connection_count_.get()) {
    window_lanes_.push_back(std::move(lane.pipe));
  }
}

absl::StatusOr<std::unique_ptr<LanePipe>> RunCore::TakeWindowLane(SteadyTime deadline,
                                                                  Interrupt* interrupt) {
  std::unique_ptr<LanePipe> idle;
  {
    absl::MutexLock lock(&mu_);
    if (!window_lanes_.empty()) {
      idle = std::move(window_lanes_.back());
      window_lanes_.pop_back();
    } else if (SteadyNow() < next_window_try_) {
      return window_refusal_;
    }
  }
  // The server may have ended it meanwhile.
  if (idle != nullptr && !idle->HasIncoming()) return idle;
  absl::StatusOr<std::unique_ptr<LanePipe>> lane =
      client_->OpenWindowLane(*ring_.window(), deadline, interrupt);
  if (!absl::IsResourceExhausted(lane.status())) return lane;
  absl::MutexLock lock(&mu_);
  window_refusal_ = lane.status();
  next_window_try_ = After(SteadyNow(), kWindowRetryInterval);
  return lane;
}

int64_t RunCore::connection_count() const {
  absl::MutexLock lock(&mu_);
  return connection_count_.get();
}

void RunCore::NoteSpeed(double bytes_per_second) {
  int64_t before = 0;
  int64_t after = 0;
  {
    absl::MutexLock lock(&mu_);
    before = connection_count_.get();
    connection_count_.Note(bytes_per_second);
    after = connection_count_.get();
  }
  if (after < before) client_->DropMoreConnections();
}

void RunCore::NoteFewerConnections() {
  {
    absl::MutexLock lock(&mu_);
    connection_count_.NoteFailure();
  }
  client_->DropMoreConnections();
}

void RunCore::OnCommit(int64_t run_epoch, const Version& version, RunPlan plan) {
  absl::MutexLock lock(&mu_);
  if (run_epoch == run_epoch_) TakeLocked(version, std::move(plan));
}

void RunCore::TakeLocked(std::optional<Version> latest, RunPlan plan) {
  const auto age = [](const std::optional<Version>& version, const RunPlan& of) {
    return std::pair(version.has_value() ? version->id() : VersionId(), of.revision);
  };
  if (age(latest, plan) < age(latest_, plan_)) return;
  latest_ = std::move(latest);
  plan_ = std::move(plan);
}

int64_t RunCore::plan_revision() const {
  absl::MutexLock lock(&mu_);
  return plan_.revision;
}

bool RunCore::may_omit_frozen() const {
  absl::MutexLock lock(&mu_);
  return plan_.may_omit_frozen;
}

RunPlan RunCore::plan() const {
  absl::MutexLock lock(&mu_);
  return plan_;
}

absl::StatusOr<bool> RunCore::IsDue(const TrainingTime& now) const {
  EMA_RETURN_IF_ERROR(now.Validate());
  DueTracks tracks;
  tracks.Adopt(plan());
  EMA_ASSIGN_OR_RETURN(const std::vector<DueTracks::Due> due, tracks.At(now));
  return !tracks.ArePaused(due);
}

}  // namespace ema::client_internal
