// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/rejoiner.h"

#include <algorithm>
#include <exception>
#include <new>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/transport/client_certificate.h"
#include "client/cpp/transport/retry.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

// How long each call of a try may take.
constexpr absl::Duration kRejoinTimeout = absl::Seconds(2);
// The pause between two tries grows from the first to the longest: a thousand ranks may ask a
// server that has just been started.
constexpr absl::Duration kFirstRejoinPause = absl::Milliseconds(250);
constexpr absl::Duration kLongestRejoinPause = absl::Seconds(4);

// Whether the next try ends the same way unless a person does something.
bool NeedsAPerson(const absl::Status& error) {
  if (IsCertificateError(error)) return true;
  switch (GetErrorReason(error)) {
    case ErrorReason::kAllCheckpointsCorrupt:
    case ErrorReason::kResumeMismatch:
    case ErrorReason::kVersionNotKept:
      return true;
    default:
      break;
  }
  switch (error.code()) {
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kUnimplemented:
      return true;
    default:
      return false;
  }
}

}  // namespace

Rejoiner::Rejoiner(std::shared_ptr<const RunJoiner> joiner, std::shared_ptr<const TrainerLog> log,
                   int64_t lost_step, std::shared_ptr<PendingPush> push, std::shared_ptr<Run> run)
    : joiner_(std::move(joiner)),
      log_(std::move(log)),
      lost_step_(lost_step),
      lost_run_epoch_(run->run_epoch()),
      lost_push_(std::move(push)),
      lost_run_(std::move(run)) {}

Rejoiner::Rejoiner(std::shared_ptr<const RunJoiner> joiner, std::shared_ptr<const TrainerLog> log)
    : joiner_(std::move(joiner)), log_(std::move(log)) {
  absl::MutexLock lock(&mu_);
  problem_ = absl::UnavailableError("the server could not be reached when the training started");
}

Rejoiner::~Rejoiner() {
  // The thread itself may let the last reference go.
  if (thread_.joinable()) thread_.detach();
}

bool Rejoiner::Start() {
  if (thread_.joinable()) return true;
  absl::Status problem;
  try {
    {
      absl::MutexLock lock(&mu_);
      is_done_ = false;
    }
    thread_ = std::thread([self = shared_from_this()] { self->Work(); });
    return true;
  } catch (const std::system_error& error) {
    problem = absl::UnavailableError(
        absl::StrCat("cannot start a thread to rejoin the run: ", error.what()));
  } catch (const std::bad_alloc&) {
    problem = absl::UnavailableError("cannot start a thread to rejoin the run: out of memory");
  }
  absl::MutexLock lock(&mu_);
  is_done_ = true;
  problem_ = problem;
  return false;
}

void Rejoiner::Stop(SteadyTime until) {
  bool is_done = false;
  {
    const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return is_done_; };
    absl::MutexLock lock(&mu_);
    is_stopped_ = true;
    wait_.WakeAll();
    is_done = wait_.AwaitUntil(mu_, until, done);
  }
  if (!thread_.joinable()) return;
  if (is_done) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void Rejoiner::Await(SteadyTime until) {
  while (!Start()) {
    const absl::Duration left = Until(until);
    if (left <= absl::ZeroDuration()) return;
    absl::SleepFor(std::min(left, kFirstRejoinPause));
  }
  const auto is_settled = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return IsSettledLocked(); };
  absl::MutexLock lock(&mu_);
  wait_.AwaitUntil(mu_, until, is_settled);
}

bool Rejoiner::IsSettledLocked() const {
  return joined_.has_value() || absl::IsCancelled(problem_) ||
         GetErrorReason(problem_) == ErrorReason::kFenced;
}

std::optional<Rejoiner::RejoinedRun> Rejoiner::Take() {
  absl::MutexLock lock(&mu_);
  return std::exchange(joined_, std::nullopt);
}

absl::Status Rejoiner::problem() const {
  absl::MutexLock lock(&mu_);
  return problem_;
}

bool Rejoiner::AwaitStop(absl::Duration max_wait) {
  const auto is_stopped = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return is_stopped_; };
  absl::MutexLock lock(&mu_);
  return wait_.AwaitUntil(mu_, After(SteadyNow(), max_wait), is_stopped);
}

void Rejoiner::Work() {
  // Also where the training thread still waits for the push.
  if (lost_push_ != nullptr) lost_push_->Abandon();
  lost_push_.reset();
  lost_run_.reset();
  std::optional<absl::Duration> pause = absl::ZeroDuration();  // None before the first try.
  std::optional<Backoff> backoff;
  while (pause.has_value() && !AwaitStop(*pause)) {
    try {
      if (!backoff.has_value()) backoff.emplace(kFirstRejoinPause, kLongestRejoinPause);
      pause = Try(*backoff);
    } catch (const std::exception&) {
      pause = kFirstRejoinPause;  // Memory that is short now may be there later.
      absl::MutexLock lock(&mu_);
      problem_ = absl::ResourceExhaustedError("this rank has no memory to rejoin the run");
    }
  }
  std::optional<RejoinedRun> late;  // Destroyed without the lock.
  absl::MutexLock lock(&mu_);
  // A run that was joined too late is left at once.
  if (is_stopped_) late = std::exchange(joined_, std::nullopt);
  is_done_ = true;
  wait_.WakeAll();
}

std::optional<absl::Duration> Rejoiner::Try(Backoff& backoff) {
  bool is_reachable = false;
  absl::StatusOr<RejoinedRun> joined = Join(is_reachable);
  const absl::Status problem = joined.status();
  // From here on the other ranks are waited for, and they may come soon.
  if (is_reachable) backoff.Reset();
  LogProblem(problem, this->problem());
  // FENCED: the server knows this launch, and a newer one has taken over.
  const bool is_last = problem.ok() || GetErrorReason(problem) == ErrorReason::kFenced;
  absl::MutexLock lock(&mu_);
  problem_ = problem;
  if (joined.ok()) joined_ = *std::move(joined);
  wait_.WakeAll();
  if (is_last) return std::nullopt;
  return backoff.Next(problem);
}

absl::StatusOr<Rejoiner::RejoinedRun> Rejoiner::Join(bool& is_reachable) {
  const bool was_open = lost_step_.has_value();
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<Run> run,
                       was_open ? joiner_->Reopen(lost_run_epoch_, kRejoinTimeout)
                                : joiner_->Open(lost_run_epoch_, kRejoinTimeout, started_));
  is_reachable = true;
  // Another launch that comes before the other ranks must fence this one.
  if (!was_open) lost_run_epoch_ = run->run_epoch();
  if (AwaitStop(absl::ZeroDuration())) return absl::CancelledError("closed");
  const absl::Status ready = run->WaitReady(kRejoinTimeout);
  // The group has begun another incarnation meanwhile, which the next try finds.
  if (GetErrorReason(ready) == ErrorReason::kFenced && GetGroupHint(ready).incarnation > 0) {
    return absl::UnavailableError(ready.message());
  }
  EMA_RETURN_IF_ERROR(ready);
  if (AwaitStop(absl::ZeroDuration())) return absl::CancelledError("closed");
  if (!was_open) return RejoinedRun{std::move(run), std::nullopt};
  absl::StatusOr<PushProgress> progress =
      run->QueryPush(*lost_step_, /*abandon_if_unfinished=*/false, kRejoinTimeout);
  // FENCED, too: by a newer run, which the next try meets, or by another restart.
  if (!progress.ok()) return absl::UnavailableError(progress.status().message());
  return RejoinedRun{std::move(run), std::move(progress->version)};
}

void Rejoiner::LogProblem(const absl::Status& problem, const absl::Status& previous) {
  if (problem.ok()) {
    log_->Write(LogLevel::kInfo, lost_step_.has_value() ? "rejoined the run" : "joined the run");
  } else if (GetErrorReason(problem) == ErrorReason::kFenced) {
    log_->WriteWithoutPrefix(LogLevel::kWarning, std::string(problem.message()));
  } else if (const bool lost_its_average = joiner_->options().run.resume.has_value() &&
                                           !lost_step_.has_value() && absl::IsNotFound(problem);
             (NeedsAPerson(problem) || lost_its_average) && !has_warned_) {
    has_warned_ = true;
    log_->Write(LogLevel::kWarning,
                absl::StrCat("pushes will not resume until this is fixed: ", ErrorText(problem)));
  } else if (problem.message() != previous.message() && !absl::IsCancelled(problem)) {
    log_->Write(LogLevel::kInfo, absl::StrCat("not pushing yet: ", ErrorText(problem)));
  }
}

}  // namespace ema::client_internal
