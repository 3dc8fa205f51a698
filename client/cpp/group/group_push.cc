// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/group/group_push.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/group/check_incarnation.h"
#include "client/cpp/group/same_commit.h"
#include "client/cpp/push/await_push.h"
#include "client/cpp/push/drop_step.h"
#include "client/cpp/transport/convert_replies.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

constexpr int64_t kMaxSenders = 8;
// How long the message that this rank will never push a step may take.
constexpr absl::Duration kAbandonTimeout = absl::Seconds(1);

bool HasGpuWeights(const PushOptions& options) {
  const std::vector<int>& devices = options.gpu_weights.devices;
  return std::any_of(devices.begin(), devices.end(), [](int device) { return device >= 0; });
}

// The elements of `all` at `places`; none, if `all` is empty.
template <typename T>
std::vector<T> Pick(const std::vector<T>& all, const std::vector<size_t>& places) {
  std::vector<T> picked;
  if (all.empty()) return picked;
  picked.reserve(places.size());
  for (const size_t place : places) picked.push_back(all[place]);
  return picked;
}

}  // namespace

GroupPush::GroupPush(std::shared_ptr<GroupRun> run, PushArguments arguments, RejoinRun rejoin)
    : run_(std::move(run)),
      arguments_(std::move(arguments)),
      rejoin_(std::move(rejoin)),
      has_gpu_weights_(HasGpuWeights(arguments_.options)),
      slots_(kMaxSenders),
      round_(run_->round().incarnation()) {}

absl::StatusOr<std::shared_ptr<GroupPush>> GroupPush::Create(std::shared_ptr<GroupRun> run,
                                                             PushArguments arguments,
                                                             RejoinRun rejoin) {
  std::shared_ptr<GroupPush> push(
      new GroupPush(std::move(run), std::move(arguments), std::move(rejoin)));
  for (const GroupRun::PushingPart& part : push->run_->pushing_parts()) {
    EMA_RETURN_IF_ERROR(push->AddPart(part));
  }
  return push;
}

absl::Status GroupPush::AddPart(const GroupRun::PushingPart& part) {
  const size_t index = parts_.size();
  PushArguments of_part = {.step = arguments_.step,
                           .time = arguments_.time,
                           .shards = Pick(arguments_.shards, part.places),
                           .deadline = arguments_.deadline,
                           .options = arguments_.options};
  of_part.options.gpu_weights.devices = Pick(arguments_.options.gpu_weights.devices, part.places);
  of_part.options.strides = Pick(arguments_.options.strides, part.places);
  const GroupPart place = {.slots = &slots_,
                           .position = static_cast<int64_t>(index),
                           .round = &round_,
                           .on_end = [this, index] { OnEnd(index); }};
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<ServerPush> push,
                       part.run->MakePush(std::move(of_part), &place));
  parts_.push_back(std::move(push));
  return absl::OkStatus();
}

GroupPush::~GroupPush() {
  if (thread_.joinable()) thread_.join();
}

void GroupPush::Start() {
  thread_ = std::thread([this] { RunThread(); });
}

void GroupPush::RunThread() {
  const absl::Status pushed = Push();
  if (!pushed.ok()) {
    // Before the round is ended: a part that learns of the next round would send the step in it.
    ReleaseAndAbandon();
    AwaitParts();
  }
  absl::StatusOr<Version> result = pushed.ok() ? Committed() : DropStep(pushed);
  if (rejoin_ != nullptr && GetErrorReason(result.status()) == ErrorReason::kFenced) {
    result = PushAgain();
  }
  absl::MutexLock lock(&mu_);
  result_ = std::move(result);
  wait_.WakeAll();
}

void GroupPush::AwaitParts() {
  absl::MutexLock lock(&mu_);
  const auto have_ended = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return ended_count_ == started_count_;
  };
  wait_.AwaitUntil(mu_, SteadyTime::max(), have_ended);
}

absl::Status GroupPush::Push() {
  // While this rank joins, the step may fail in the other ranks, and a later round begin. In that
  // one the step would wait for them in vain, so it begins in the round that was known before.
  const int64_t run_epoch = run_->run_epoch();
  round_.Note(run_->round().get());
  EMA_RETURN_IF_ERROR(run_->WaitReady(arguments_.deadline, &interrupt_));
  if (run_->run_epoch() != run_epoch || round_.get() == 0) round_.Note(run_->round().get());
  try {
    for (const std::shared_ptr<ServerPush>& part : parts_) {
      {
        absl::MutexLock lock(&mu_);
        ++started_count_;
      }
      part->Start();
    }
  } catch (const std::system_error& error) {
    absl::MutexLock lock(&mu_);
    --started_count_;
    return absl::UnavailableError(
        absl::StrCat("cannot start a thread for the push: ", error.what()));
  }
  while (!AwaitDecided(kIncarnationCheckInterval)) {
    if (!IsCutOff()) continue;
    absl::Status current =
        CheckIncarnation(run_->client(), run_->model(), run_->round().incarnation(), &interrupt_);
    // A reply may have come meanwhile.
    if (!current.ok() && !AwaitDecided(absl::ZeroDuration())) return current;
  }
  return FirstError();
}

bool GroupPush::AwaitDecided(absl::Duration max_wait) const {
  absl::MutexLock lock(&mu_);
  const auto is_decided = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return failed_part_.has_value() || ended_count_ == started_count_;
  };
  return wait_.AwaitUntil(mu_, After(SteadyNow(), max_wait), is_decided);
}

absl::Status GroupPush::FirstError() const {
  std::optional<size_t> failed;
  {
    absl::MutexLock lock(&mu_);
    failed = failed_part_;
  }
  return failed.has_value() ? parts_[*failed]->Wait().status() : absl::OkStatus();
}

void GroupPush::OnEnd(size_t part) {
  const bool has_failed = !parts_[part]->Wait().ok();
  absl::MutexLock lock(&mu_);
  if (has_failed && !failed_part_.has_value()) failed_part_ = part;
  ++ended_count_;
  wait_.WakeAll();
}

absl::StatusOr<Version> GroupPush::Committed() {
  RunCore& home = run_->home();
  const std::vector<GroupRun::PushingPart>& pushing = run_->pushing_parts();
  EMA_ASSIGN_OR_RETURN(Version version, parts_.front()->Wait());
  const RunCore* answering = pushing.front().run;
  for (size_t i = 1; i < parts_.size(); ++i) {
    EMA_ASSIGN_OR_RETURN(Version other, parts_[i]->Wait());
    if (!IsSameCommit(version, other)) {
      return MalformedReply(absl::StrCat("servers of one group have committed step ",
                                         arguments_.step, " as version ", version.number,
                                         " of step ", version.step, " and as version ",
                                         other.number, " of step ", other.step));
    }
    if (pushing[i].run == &home) {
      version = std::move(other);
      answering = &home;
    }
  }
  // A rank without bytes at the home has no reply from it.
  if (answering != &home) home.OnCommit(home.run_epoch(), version, answering->plan());
  return version;
}

absl::StatusOr<Version> GroupPush::DropStep(const absl::Status& error) {
  const ErrorReason reason = GetErrorReason(error);
  if (reason == ErrorReason::kPlanChanged || reason == ErrorReason::kPlanMismatch) {
    // The other parts have the old plan, too, and each would lose a step to learn that.
    for (const GroupRun::PushingPart& part : run_->pushing_parts()) part.run->MarkNotReady();
  }
  // Not round_, which may be a later one, in which other ranks push the next step.
  int64_t begun_round = 0;
  for (const auto& part : parts_) begun_round = std::max(begun_round, part->begun_round());
  absl::StatusOr<PushProgress> progress = client_internal::DropStep(
      run_->home(), {.step = arguments_.step,
                     .round = begun_round != 0 ? begun_round : round_.get(),
                     .error = error,
                     .has_begun = begun_round != 0,
                     .is_abandoned = interrupt_.fired(),
                     .name = Name()});
  EMA_RETURN_IF_ERROR(progress.status());
  // The parts without a reply have the plan of the step before.
  for (const GroupRun::PushingPart& part : run_->pushing_parts()) part.run->MarkNotReady();
  run_->home().OnCommit(run_->run_epoch(), *progress->version, std::move(progress->plan));
  return *std::move(progress->version);
}

absl::StatusOr<Version> GroupPush::PushAgain() {
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<GroupRun> run,
                       rejoin_(arguments_.deadline, &interrupt_));
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<GroupPush> again, Create(run, arguments_));
  bool may_be_released = false;
  try {
    absl::MutexLock lock(&mu_);
    may_be_released = may_be_released_;
    if (!may_be_released) {
      again->Start();
      repeated_ = again;
    }
  } catch (const std::system_error& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot start a thread for the push: ", error.what()));
  }
  if (may_be_released) return AbandonLostStep(*run);
  again->AwaitDone(absl::InfiniteDuration());
  return again->Wait();
}

absl::Status GroupPush::AbandonLostStep(GroupRun& run) const {
  Interrupt never;
  run.QueryPush(arguments_.step, /*abandon_if_unfinished=*/true,
                After(SteadyNow(), kAbandonTimeout), &never, /*retry=*/false,
                "a server has restarted, and the weights of the step had been released")
      .status()
      .IgnoreError();
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kStepAbandoned,
                   absl::StrCat(Name(),
                                ": a server of the group has restarted, and the weights had been "
                                "released; this rank has joined the run again"));
}

std::shared_ptr<GroupPush> GroupPush::repeated() const {
  absl::MutexLock lock(&mu_);
  return repeated_;
}

std::string GroupPush::Name() const {
  return absl::StrCat("model \"", run_->model(), "\": push of step ", arguments_.step, " by rank ",
                      run_->rank());
}

void GroupPush::ReleaseAndAbandon() {
  for (const std::shared_ptr<ServerPush>& part : parts_) part->ReleaseAndAbandon();
}

void GroupPush::MakeStreamsWait(absl::Span<const GpuStream> streams) {
  streams_wait_ = true;
  for (const std::shared_ptr<ServerPush>& part : parts_) part->MakeStreamsWait(streams);
}

bool GroupPush::AwaitDone(absl::Duration max_wait) const {
  absl::MutexLock lock(&mu_);
  const auto has_result = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return result_.has_value(); };
  return wait_.AwaitUntil(mu_, After(SteadyNow(), max_wait), has_result);
}

bool GroupPush::AwaitWhileReachable(absl::Duration max_wait,
                                    absl::FunctionRef<bool(absl::Duration)> await) {
  Interrupt interrupt(&run_->client().options().is_interrupted);
  const PushHealth health = {
      .progress_count = [this] { return ProgressCount(); },
      .is_cut_off = [this] { return IsCutOff(); },
      .server_responds = [this](SteadyTime deadline,
                                Interrupt* asker) { return ServersRespond(deadline, asker); }};
  return client_internal::AwaitWhileReachable(max_wait, health, &interrupt, await);
}

int64_t GroupPush::ProgressCount() const {
  if (const std::shared_ptr<GroupPush> again = repeated()) return again->ProgressCount();
  int64_t total = 0;
  for (const auto& part : parts_) total += part->progress_count();
  return total;
}

bool GroupPush::IsCutOff() const {
  if (const std::shared_ptr<GroupPush> again = repeated()) return again->IsCutOff();
  return std::any_of(parts_.begin(), parts_.end(),
                     [](const auto& part) { return !part->done() && part->IsDisconnected(); });
}

bool GroupPush::ServersRespond(SteadyTime deadline, Interrupt* interrupt) const {
  if (const std::shared_ptr<GroupPush> again = repeated()) {
    return again->ServersRespond(deadline, interrupt);
  }
  return std::all_of(parts_.begin(), parts_.end(), [&](const auto& part) {
    return part->done() || part->ServerResponds(deadline, interrupt);
  });
}

bool GroupPush::WaitReleased(absl::Duration max_wait, absl::Span<const GpuStream> streams) {
  std::shared_ptr<GroupPush> again;
  {
    absl::MutexLock lock(&mu_);
    may_be_released_ = true;
    again = repeated_;
  }
  if (again != nullptr) return again->WaitReleased(max_wait, streams);
  const auto release = [this](absl::Duration most) {
    const SteadyTime until = After(SteadyNow(), most);
    return std::all_of(parts_.begin(), parts_.end(),
                       [until](const auto& part) {
                         return part->TryRelease(std::max(Until(until), absl::ZeroDuration()));
                       }) ||
           done();
  };
  if (AwaitWhileReachable(max_wait, release)) {
    MakeStreamsWait(streams);
    return true;
  }
  interrupt_.Fire();
  ReleaseAndAbandon();
  for (const std::shared_ptr<ServerPush>& part : parts_) part->AwaitNoReader();
  MakeStreamsWait(streams);
  AwaitDone(kAbandonGrace);
  return false;
}

absl::StatusOr<Version> GroupPush::Wait() {
  Interrupt interrupt(&run_->client().options().is_interrupted);
  while (!AwaitDone(Interrupt::kPollInterval)) {
    if (interrupt.fired()) return absl::CancelledError("interrupted");
  }
  absl::MutexLock lock(&mu_);
  return *result_;
}

bool GroupPush::WaitDone(absl::Duration max_wait) {
  return AwaitWhileReachable(max_wait, [this](absl::Duration most) { return AwaitDone(most); });
}

bool GroupPush::done() const { return AwaitDone(absl::ZeroDuration()); }

bool GroupPush::Abandon() {
  std::shared_ptr<GroupPush> again;
  {
    absl::MutexLock lock(&mu_);
    may_be_released_ = true;
    again = repeated_;
  }
  if (again != nullptr && !again->Abandon()) return false;
  if (!done()) interrupt_.Fire();
  ReleaseAndAbandon();
  if (!AwaitDone(has_gpu_weights_ ? kHangLimit : absl::InfiniteDuration())) return false;
  if (!streams_wait_) MakeStreamsWait({});
  return true;
}

PendingPush::Stats GroupPush::stats() const {
  if (const std::shared_ptr<GroupPush> again = repeated()) return again->stats();
  PendingPush::Stats total;
  total.lane = Lane::kSharedWindow;
  for (const std::shared_ptr<ServerPush>& part : parts_) {
    const PendingPush::Stats stats = part->stats();
    total.total_bytes += stats.total_bytes;
    total.sent_bytes += stats.sent_bytes;
    total.stream_count = std::max(total.stream_count, stats.stream_count);
    total.connection_count += stats.connection_count;
    total.send_time = std::max(total.send_time, stats.send_time);
    // The slowest transport that a part has used.
    if (stats.stream_count > 0 && stats.lane <= total.lane) {
      total.lane = stats.lane;
      total.lane_reason = stats.lane_reason;
    }
    if (!stats.server_time.has_value()) continue;
    if (!total.server_time.has_value()) total.server_time.emplace();
    total.server_time->receive = std::max(total.server_time->receive, stats.server_time->receive);
    total.server_time->fold = std::max(total.server_time->fold, stats.server_time->fold);
    total.server_time->wait = std::max(total.server_time->wait, stats.server_time->wait);
    total.server_time->commit = std::max(total.server_time->commit, stats.server_time->commit);
  }
  if (total.stream_count == 0) total.lane = Lane::kGrpc;
  return total;
}

}  // namespace ema::client_internal
