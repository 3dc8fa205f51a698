// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/group/rejoining_run.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/group/group_push.h"
#include "client/cpp/transport/convert_replies.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

bool IsFenced(const absl::Status& status) { return GetErrorReason(status) == ErrorReason::kFenced; }

}  // namespace

RejoiningRun::RejoiningRun(std::shared_ptr<GroupRun> run, Client::RunOptions options)
    : client_(run->client()),
      model_(run->model()),
      manifest_(run->manifest()),
      layout_(run->layout()),
      options_(std::move(options)),
      newest_(std::move(run)) {}

std::shared_ptr<GroupRun> RejoiningRun::newest() const {
  absl::MutexLock lock(&mu_);
  return newest_;
}

absl::StatusOr<std::shared_ptr<GroupRun>> RejoiningRun::OpenAgain(const GroupRun& fenced,
                                                                  SteadyTime deadline,
                                                                  Interrupt* interrupt) const {
  Client::RunOptions options = options_;
  options.resume.reset();  // The average continues from the server's state.
  options.last_run_epoch = fenced.run_epoch();
  EMA_ASSIGN_OR_RETURN(
      v1::Model model,
      client_.UnaryWithRetries(&Stub::PrepareAsyncGetModel,
                               MakeRequest<v1::GetModelRequest>(model_), deadline, interrupt));
  return GroupRun::OpenNewest(client_.shared_from_this(), std::move(model), options, deadline,
                              interrupt);
}

absl::StatusOr<std::shared_ptr<GroupRun>> RejoiningRun::Rejoin(const GroupRun& fenced,
                                                               SteadyTime deadline,
                                                               Interrupt* interrupt) {
  const auto can_rejoin = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !is_rejoining_; };
  {
    absl::MutexLock lock(&mu_);
    while (!wait_.AwaitUntil(mu_, After(SteadyNow(), Interrupt::kPollInterval), can_rejoin)) {
      // Not under the lock: asking may run the user's code.
      mu_.Unlock();
      const bool is_interrupted = interrupt->fired();
      mu_.Lock();
      if (is_interrupted) return absl::CancelledError("interrupted");
      if (SteadyNow() >= deadline) {
        return absl::DeadlineExceededError(absl::StrCat(
            "model \"", model_, "\": timed out while another call was opening the run again"));
      }
    }
    EMA_RETURN_IF_ERROR(fenced_);
    if (newest_.get() != &fenced) return newest_;
    is_rejoining_ = true;
  }
  const absl::Cleanup end = [this] {
    absl::MutexLock lock(&mu_);
    is_rejoining_ = false;
    wait_.WakeAll();
  };
  absl::StatusOr<std::shared_ptr<GroupRun>> run = OpenAgain(fenced, deadline, interrupt);
  absl::MutexLock lock(&mu_);
  if (IsFenced(run.status())) fenced_ = run.status();
  EMA_RETURN_IF_ERROR(run.status());
  if ((*run)->manifest() != manifest_) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, ErrorReason::kBadLayout,
        absl::StrCat("model \"", model_, "\": its tensors differ (here: this run, ",
                     "there: the servers): ", manifest_.DifferenceFrom((*run)->manifest())));
  }
  newest_ = *run;
  return run;
}

absl::Status RejoiningRun::WaitReady(SteadyTime deadline, Interrupt* interrupt) {
  std::shared_ptr<GroupRun> run = newest();
  absl::Status ready = run->WaitReady(deadline, interrupt);
  while (IsFenced(ready)) {
    EMA_ASSIGN_OR_RETURN(run, Rejoin(*run, deadline, interrupt));
    ready = run->WaitReady(deadline, interrupt);
  }
  return ready;
}

absl::Status RejoiningRun::RefreshPlan(SteadyTime deadline, Interrupt* interrupt) {
  const std::shared_ptr<GroupRun> run = newest();
  const absl::Status status = run->RefreshPlan(deadline, interrupt);
  return IsFenced(status) ? Rejoin(*run, deadline, interrupt).status() : status;
}

absl::StatusOr<std::shared_ptr<RunningPush>> RejoiningRun::MakePush(PushArguments arguments) {
  std::shared_ptr<GroupRun> run = newest();
  const auto rejoin = [self = shared_from_this(), run](SteadyTime deadline, Interrupt* interrupt) {
    return self->Rejoin(*run, deadline, interrupt);
  };
  return GroupPush::Create(run, std::move(arguments), rejoin);
}

}  // namespace ema::client_internal
