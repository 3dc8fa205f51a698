// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/run_core.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/convert.h"
#include "client/cpp/retry.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

using TrackStates = std::vector<std::optional<Schedule::State>>;

std::string RandomLaunchId() {
  std::random_device random;
  std::string id;
  for (int i = 0; i < 4; ++i) absl::StrAppend(&id, absl::Hex(random(), absl::kZeroPad8));
  return id;
}

// The unit that TrackVersion::elapsed is counted in.
TimeUnit ElapsedUnit(const Schedule& schedule) {
  const auto* half_life = std::get_if<HalfLifeRule>(&schedule.rule());
  return half_life != nullptr ? half_life->half_life.unit : schedule.update_interval().unit;
}

// Works out the last update of a track that `version` did not update. Absent if the interval's unit
// is another than the one that `elapsed` is in.
std::optional<Schedule::State> StateFromElapsed(const Schedule& schedule, const Version& version,
                                                const TrackVersion& track) {
  const TimeUnit unit = ElapsedUnit(schedule);
  const std::optional<double> now = version.time.Get(unit);
  if (track.update_count == 0 || unit != schedule.update_interval().unit || !now.has_value()) {
    return std::nullopt;
  }
  TrainingTime last;
  last.Set(unit, *now - track.elapsed);
  return Schedule::State{track.update_count, last};
}

bool IsSameVersion(const std::optional<Version>& a, const Version& b) {
  return a.has_value() && a->incarnation == b.incarnation && a->number == b.number;
}

}  // namespace

absl::StatusOr<std::shared_ptr<RunCore>> RunCore::Open(std::shared_ptr<Client::Impl> client,
                                                       std::string_view model,
                                                       Client::RunOptions options,
                                                       absl::Time deadline, Interrupt* interrupt) {
  if (options.launch_id.empty()) {
    if (options.world_size > 1) {
      return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadRequest,
                       absl::StrCat("launch_id is empty: with ", options.world_size,
                                    " ranks it must be given, the same to all of them"));
    }
    options.launch_id = RandomLaunchId();
  }
  v1::GetModelRequest request;
  request.set_model(std::string(model));
  v1::GetModelResponse response;
  EMA_RETURN_IF_ERROR(client->Unary(&v1::EmaService::Stub::PrepareAsyncGetModel, request, &response,
                                    deadline, interrupt));
  EMA_RETURN_IF_ERROR(CheckPartitions(response.model()));
  EMA_ASSIGN_OR_RETURN(ModelInfo info, FromProto(response.model()));

  if (!options.shards.has_value()) {
    options.shards.emplace();
    for (int64_t i = 0; i < info.manifest.tensor_count(); ++i) {
      options.shards->push_back(WholeTensor(info.manifest, i));
    }
  }
  EMA_ASSIGN_OR_RETURN(RankLayout layout, RankLayout::Create(info.manifest, *options.shards));
  options.shards.reset();
  std::shared_ptr<RunCore> core(
      new RunCore(std::move(client), std::move(info), std::move(options), std::move(layout)));
  EMA_RETURN_IF_ERROR(core->Join(deadline, interrupt).status());
  return core;
}

RunCore::RunCore(std::shared_ptr<Client::Impl> client, ModelInfo info, Client::RunOptions options,
                 RankLayout layout)
    : client_(std::move(client)),
      info_(std::move(info)),
      options_(std::move(options)),
      layout_(std::move(layout)),
      chunks_(layout_, client_->options().chunk_bytes),
      states_(info_.tracks.size(), Schedule::State()) {}

int64_t RunCore::run_epoch() const {
  absl::MutexLock lock(&mu_);
  return run_epoch_;
}

std::optional<Version> RunCore::latest() const {
  absl::MutexLock lock(&mu_);
  return latest_;
}

absl::StatusOr<std::vector<int64_t>> RunCore::Join(absl::Time deadline, Interrupt* interrupt) {
  v1::OpenRunRequest request;
  request.set_model(model());
  request.set_launch_id(options_.launch_id);
  request.set_rank(options_.rank);
  request.set_world_size(options_.world_size);
  request.set_manifest_digest(manifest().digest());
  ToProto(layout_.shards(), request.mutable_layout());
  v1::OpenRunResponse response;
  EMA_RETURN_IF_ERROR(client_->Unary(&v1::EmaService::Stub::PrepareAsyncOpenRun, request, &response,
                                     deadline, interrupt));
  if (response.layout_digest() != layout_.digest()) {
    return MalformedReply(absl::StrCat("the layout's digest is ", layout_.digest(), " here, ",
                                       response.layout_digest(), " there"));
  }
  std::optional<TrackStates> states;
  std::optional<Version> newer;
  if (response.has_latest()) {
    Version version = FromProto(response.latest());
    if (!IsSameVersion(latest(), version)) {
      EMA_ASSIGN_OR_RETURN(states, LoadTrackStates(version, deadline, interrupt));
      newer = std::move(version);
    }
  }
  absl::MutexLock lock(&mu_);
  run_epoch_ = response.run_epoch();
  ready_ = response.ready();
  if (states.has_value()) {
    states_ = *std::move(states);
    latest_ = std::move(newer);
  }
  if (response.ready()) return std::vector<int64_t>();
  // So that "not ready" is never an empty list.
  if (response.missing_ranks().empty()) return std::vector<int64_t>{-1};
  return std::vector<int64_t>(response.missing_ranks().begin(), response.missing_ranks().end());
}

absl::Status RunCore::WaitReady(absl::Time deadline, Interrupt* interrupt) {
  Backoff backoff;
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      if (ready_ || !fenced_.ok()) return fenced_;
    }
    absl::StatusOr<std::vector<int64_t>> missing = Join(deadline, interrupt);
    if (GetErrorReason(missing.status()) == ErrorReason::kFenced) {
      absl::MutexLock lock(&mu_);
      fenced_ = missing.status();
    }
    if (!missing.ok() || missing->empty()) return missing.status();
    const absl::Duration delay = backoff.Next(absl::OkStatus());
    if (absl::Now() + delay >= deadline) {
      return MakeError(
          absl::StatusCode::kDeadlineExceeded, ErrorReason::kRunIncomplete,
          absl::StrCat("model \"", model(), "\": these ranks of the run have not joined in time: ",
                       absl::StrJoin(*missing, ", ")));
    }
    if (!interrupt->Sleep(delay)) return absl::CancelledError("interrupted");
  }
}

void RunCore::Rejoin() {
  absl::MutexLock lock(&mu_);
  ready_ = false;
}

absl::StatusOr<PushProgress> RunCore::QueryPush(int64_t step, bool abandon_if_unfinished,
                                                absl::Time deadline, Interrupt* interrupt,
                                                bool retry) {
  v1::QueryPushRequest request;
  request.set_model(model());
  request.set_run_epoch(run_epoch());
  request.set_step(step);
  request.set_rank(rank());
  request.set_abandon_if_unfinished(abandon_if_unfinished);
  v1::QueryPushResponse response;
  const auto query = [&](Call& call) {
    return Client::Impl::UnaryOnce(&v1::EmaService::Stub::PrepareAsyncQueryPush, request, &response,
                                   call);
  };
  EMA_RETURN_IF_ERROR(retry ? client_->Retry(deadline, interrupt, query)
                            : client_->Try(deadline, interrupt, query));
  return FromProto(response);
}

absl::StatusOr<TrackStates> RunCore::LoadTrackStates(const Version& latest, absl::Time deadline,
                                                     Interrupt* interrupt) const {
  TrackStates states(info_.tracks.size());
  ApplyRecord(latest, states);
  const auto is_known = [](const auto& state) { return state.has_value(); };
  if (std::all_of(states.begin(), states.end(), is_known)) return states;

  // Some tracks were updated by an earlier version only. The records of this run's past do not
  // change, so all ranks find the same.
  v1::ListVersionsRequest request;
  request.set_model(model());
  v1::ListVersionsResponse response;
  EMA_RETURN_IF_ERROR(client_->Unary(&v1::EmaService::Stub::PrepareAsyncListVersions, request,
                                     &response, deadline, interrupt));
  std::sort(
      response.mutable_versions()->begin(), response.mutable_versions()->end(),
      [](const auto& a, const auto& b) { return a.version().version() < b.version().version(); });
  TrackStates older(info_.tracks.size());
  for (const auto& entry : response.versions()) {
    if (entry.version().version() < latest.number) ApplyRecord(FromProto(entry.version()), older);
  }
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i].has_value()) continue;
    states[i] = older[i];
    for (const TrackVersion& track : latest.tracks) {
      if (!states[i].has_value() && track.track == info_.tracks[i].name) {
        states[i] = StateFromElapsed(info_.tracks[i].schedule, latest, track);
      }
    }
  }
  return states;
}

void RunCore::ApplyRecord(const Version& version, TrackStates& states) const {
  for (const TrackVersion& track : version.tracks) {
    if (!track.updated) continue;
    for (size_t i = 0; i < states.size(); ++i) {
      if (info_.tracks[i].name == track.track) {
        states[i] = Schedule::State{track.update_count, version.time};
      }
    }
  }
}

void RunCore::OnCommit(const Version& version) {
  absl::MutexLock lock(&mu_);
  latest_ = version;
  ApplyRecord(version, states_);
}

absl::StatusOr<bool> RunCore::IsDue(const TrainingTime& now) const {
  EMA_RETURN_IF_ERROR(now.Validate());
  absl::MutexLock lock(&mu_);
  bool is_due = false;
  for (size_t i = 0; i < states_.size(); ++i) {
    EMA_ASSIGN_OR_RETURN(
        const Schedule::Update update,
        info_.tracks[i].schedule.Plan(states_[i].value_or(Schedule::State()), now));
    is_due |= update.due;
  }
  return is_due;
}

}  // namespace ema::client_internal
