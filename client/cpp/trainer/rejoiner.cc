// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/rejoiner.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/transport/retry.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

// How long each call of a try may take.
constexpr absl::Duration kRejoinTimeout = absl::Seconds(2);
// The pause between two tries grows from the first to the longest: a thousand ranks may ask a
// server that has just been started.
constexpr absl::Duration kFirstPause = absl::Milliseconds(250);
constexpr absl::Duration kLongestPause = absl::Seconds(4);

// Whether the next try ends the same way unless a person does something.
bool NeedsAPerson(const absl::Status& error) {
  switch (error.code()) {
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kUnimplemented:
      return true;
    default:
      return GetErrorReason(error) == ErrorReason::kAllCheckpointsCorrupt;
  }
}

}  // namespace

Rejoiner::Rejoiner(std::shared_ptr<const RunJoiner> joiner, const TrainerLog* log,
                   int64_t lost_step, std::unique_ptr<PendingPush> push, std::unique_ptr<Run> run)
    : joiner_(std::move(joiner)),
      log_(*log),
      lost_step_(lost_step),
      lost_run_epoch_(run->run_epoch()),
      lost_push_(std::move(push)),
      lost_run_(std::move(run)) {}

Rejoiner::~Rejoiner() {
  {
    absl::MutexLock lock(&mu_);
    is_stopped_ = true;
    wait_.WakeAll();
  }
  if (thread_.joinable()) thread_.join();
}

bool Rejoiner::Start() {
  if (thread_.joinable()) return true;
  try {
    thread_ = std::thread([this] { Work(); });
  } catch (const std::system_error& error) {
    absl::MutexLock lock(&mu_);
    problem_ =
        absl::UnavailableError(absl::StrCat("no thread to join the run again: ", error.what()));
    return false;
  }
  return true;
}

void Rejoiner::Await(SteadyTime until) {
  while (!Start()) {
    const absl::Duration left = Until(until);
    if (left <= absl::ZeroDuration()) return;
    absl::SleepFor(std::min(left, kFirstPause));
  }
  const auto is_settled = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return IsSettledLocked(); };
  absl::MutexLock lock(&mu_);
  wait_.AwaitUntil(mu_, until, is_settled);
}

bool Rejoiner::IsSettledLocked() const {
  return joined_.has_value() || absl::IsCancelled(problem_) ||
         GetErrorReason(problem_) == ErrorReason::kFenced;
}

std::optional<Rejoiner::Joined> Rejoiner::Take() {
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
  lost_push_.reset();
  lost_run_.reset();
  Backoff backoff(kFirstPause, kLongestPause);
  absl::Duration pause;  // None before the first try.
  while (!AwaitStop(pause)) {
    bool is_reachable = false;
    absl::StatusOr<Joined> joined;
    try {
      joined = Join(is_reachable);
    } catch (const std::bad_alloc&) {
      joined = absl::ResourceExhaustedError("no memory to join the run again");
    }
    const absl::Status problem = joined.status();
    // From here on the other ranks are waited for, and they may come soon.
    if (is_reachable) backoff.Reset();
    pause = backoff.Next(problem);
    LogProblem(problem, this->problem());
    absl::MutexLock lock(&mu_);
    problem_ = problem;
    if (joined.ok()) joined_ = *std::move(joined);
    wait_.WakeAll();
    // FENCED: the server knows this launch, and a newer one has taken over.
    if (joined_.has_value() || GetErrorReason(problem) == ErrorReason::kFenced) return;
  }
}

absl::StatusOr<Rejoiner::Joined> Rejoiner::Join(bool& is_reachable) {
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<Run> run, joiner_->Reopen(lost_run_epoch_, kRejoinTimeout));
  is_reachable = true;
  if (AwaitStop(absl::ZeroDuration())) return absl::CancelledError("closed");
  EMA_RETURN_IF_ERROR(run->WaitReady(kRejoinTimeout));
  if (AwaitStop(absl::ZeroDuration())) return absl::CancelledError("closed");
  absl::StatusOr<PushProgress> progress =
      run->QueryPush(lost_step_, /*abandon_if_unfinished=*/false, kRejoinTimeout);
  // FENCED, too: by a newer run, which the next try meets, or by another restart.
  if (!progress.ok()) return absl::UnavailableError(progress.status().message());
  return Joined{std::move(run), std::move(progress->version)};
}

void Rejoiner::LogProblem(const absl::Status& problem, const absl::Status& previous) {
  if (problem.ok()) {
    log_.Write(LogLevel::kInfo, "joined again");
  } else if (GetErrorReason(problem) == ErrorReason::kFenced) {
    log_.Write(LogLevel::kWarning,
               absl::StrCat("this run does not push any more: ", problem.message()));
  } else if (NeedsAPerson(problem) && !has_warned_) {
    has_warned_ = true;
    log_.Write(LogLevel::kWarning, absl::StrCat("pushes do not start again before this is mended: ",
                                                ErrorText(problem)));
  } else if (problem.message() != previous.message() && !absl::IsCancelled(problem)) {
    log_.Write(LogLevel::kInfo, absl::StrCat("not pushing yet: ", ErrorText(problem)));
  }
}

}  // namespace ema::client_internal
