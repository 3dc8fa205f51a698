// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/rejoiner.h"

#include <system_error>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"

namespace ema::client_internal {
namespace {

// How long each call of a try may take, and what lies between two tries.
constexpr absl::Duration kRejoinTimeout = absl::Seconds(2);
constexpr absl::Duration kRejoinInterval = absl::Milliseconds(250);

}  // namespace

Rejoiner::Rejoiner(const Joining* joining, std::unique_ptr<PendingPush> push,
                   std::unique_ptr<Run> run)
    : joining_(*joining), lost_push_(std::move(push)), lost_run_(std::move(run)) {}

Rejoiner::~Rejoiner() {
  stop_.Notify();
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

void Rejoiner::Await(absl::Time until) const {
  absl::MutexLock lock(&mu_);
  mu_.AwaitWithDeadline(absl::Condition(this, &Rejoiner::IsSettled), until);
}

bool Rejoiner::IsSettled() const {
  return run_ != nullptr || absl::IsCancelled(problem_) ||
         GetErrorReason(problem_) == ErrorReason::kFenced;
}

std::unique_ptr<Run> Rejoiner::Take() {
  absl::MutexLock lock(&mu_);
  return std::move(run_);
}

absl::Status Rejoiner::problem() const {
  absl::MutexLock lock(&mu_);
  return problem_;
}

void Rejoiner::Work() {
  lost_push_.reset();
  lost_run_.reset();
  do {
    absl::StatusOr<std::unique_ptr<Run>> run = joining_.JoinAgain(kRejoinTimeout);
    absl::MutexLock lock(&mu_);
    problem_ = run.status();
    if (run.ok()) run_ = *std::move(run);
    // FENCED: the server knows this launch, and a newer one has taken over.
    if (run_ != nullptr || GetErrorReason(problem_) == ErrorReason::kFenced) return;
  } while (!stop_.WaitForNotificationWithTimeout(kRejoinInterval));
}

}  // namespace ema::client_internal
