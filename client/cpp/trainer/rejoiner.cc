// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/rejoiner.h"

#include <algorithm>
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
// What lies between two tries, at first and in the end: a thousand ranks may come to a server that
// has just been started.
constexpr absl::Duration kFirstInterval = absl::Milliseconds(250);
constexpr absl::Duration kLongestInterval = absl::Seconds(4);

}  // namespace

Rejoiner::Rejoiner(const Joining* joining, int64_t lost_step, std::unique_ptr<PendingPush> push,
                   std::unique_ptr<Run> run)
    : joining_(*joining),
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
    absl::SleepFor(std::min(left, kFirstInterval));
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
  Backoff backoff(kFirstInterval, kLongestInterval);
  absl::Duration pause;  // None before the first try.
  while (!AwaitStop(pause)) {
    absl::StatusOr<Joined> joined = Join();
    const absl::Status problem = joined.status();
    pause = backoff.Next(problem);
    absl::MutexLock lock(&mu_);
    problem_ = problem;
    if (joined.ok()) joined_ = *std::move(joined);
    wait_.WakeAll();
    // FENCED: the server knows this launch, and a newer one has taken over.
    if (joined_.has_value() || GetErrorReason(problem) == ErrorReason::kFenced) return;
  }
}

absl::StatusOr<Rejoiner::Joined> Rejoiner::Join() const {
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<Run> run,
                       joining_.JoinAgain(lost_run_epoch_, kRejoinTimeout));
  absl::StatusOr<PushProgress> progress =
      run->QueryPush(lost_step_, /*abandon_if_unfinished=*/false, kRejoinTimeout);
  // FENCED, too: by a newer run, which the next try meets, or by another restart.
  if (!progress.ok()) return absl::UnavailableError(progress.status().message());
  return Joined{std::move(run), std::move(progress->version)};
}

}  // namespace ema::client_internal
