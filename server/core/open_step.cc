// SPDX-License-Identifier: Apache-2.0
#include "server/core/open_step.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr size_t kMaxSkippedSteps = 16;

absl::Status StaleStep(std::string message) {
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kStaleStep, message);
}

absl::Status PlanMismatch(std::string message) {
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kPlanMismatch, message);
}

}  // namespace

absl::Status SkippedStep::status(int64_t step) const {
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kStepSkipped,
                   absl::StrCat("step ", step, ": rank ", rank, " has abandoned it: ", why));
}

absl::StatusOr<std::optional<uint32_t>> OpenStep::CheckStep(const PushStart& start,
                                                            const Snapshot* newest) const {
  EMA_RETURN_IF_ERROR(CheckNotSkipped(start.step));
  if (newest == nullptr || start.step > newest->record.step) return std::nullopt;
  const Version& last = newest->record;
  if (start.step < last.step) {
    return StaleStep(absl::StrCat("model \"", model_name_, "\": step ", start.step,
                                  " is not after ", last.step));
  }
  const std::optional<uint32_t> digest = CommittedDigest(start.run_epoch, start.step, start.rank);
  if (!digest.has_value()) {
    return StaleStep(absl::StrCat("model \"", model_name_, "\": step ", start.step,
                                  " is committed already, as version ", last.number,
                                  " of an earlier run"));
  }
  if (start.omits_frozen == last_commit_.omits_frozen) return digest;
  return PlanMismatch(absl::StrCat(
      "frozen: step ", start.step, " is committed already, ",
      last_commit_.omits_frozen ? "without the frozen tensors" : "with the frozen tensors",
      "; QueryPush returns its version"));
}

absl::Status OpenStep::CheckNotSkipped(int64_t step) const {
  const auto found = skipped_.find(step);
  return found == skipped_.end() ? absl::OkStatus() : found->second.status(step);
}

absl::Status OpenStep::CheckNotPrepared() const {
  if (!prepared_.has_value()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                   absl::StrCat("model \"", model_name_, "\": step ", session_->plan().step,
                                " is complete here and waits for the model's other partitions"),
                   absl::Milliseconds(20));
}

absl::StatusOr<std::shared_ptr<PushSession>> OpenStep::JoinSession(const PushStart& start,
                                                                   RunTable& runs) const {
  if (session_ == nullptr) return nullptr;
  const StepPlan& plan = session_->plan();
  if (start.round != plan.round) {
    EMA_RETURN_IF_ERROR(CheckNotPrepared());
    return nullptr;
  }
  if (start.step < plan.step) {
    return StaleStep(absl::StrCat("model \"", model_name_, "\": step ", start.step,
                                  " is before the open step ", plan.step));
  }
  if (start.step > plan.step) {
    EMA_RETURN_IF_ERROR(CheckNotPrepared());
    if (!session_->HasRankCommitted(start.rank)) return nullptr;
    return MakeError(
        absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
        absl::StrCat("step ", start.step, ": step ", plan.step, " still waits for ranks ",
                     absl::StrJoin(session_->MissingRanks(kNamedRanks), ", ")),
        absl::Milliseconds(20));
  }
  if (start.time != plan.time) {
    return PlanMismatch(absl::StrCat("step ", plan.step, ": rank ", start.rank, " reports ",
                                     start.time.ToString(), ", but the step was opened with ",
                                     plan.time.ToString()));
  }
  if (start.imported_updates != plan.imported_updates) {
    return PlanMismatch(
        absl::StrCat("step ", plan.step, ": rank ", start.rank, " reports ", start.imported_updates,
                     " imported_updates, but the step was opened with ", plan.imported_updates));
  }
  if (start.omits_frozen != plan.omits_frozen) {
    runs.RequireFrozen();
    return PlanMismatch(absl::StrCat(
        "frozen: step ", plan.step, ": rank ", start.rank,
        start.omits_frozen ? " omits the frozen tensors, but the step was opened with them"
                           : " has the frozen tensors, but the step was opened without them",
        "; frozen tensors must change on all ranks at the same step"));
  }
  return session_;
}

std::optional<uint32_t> OpenStep::CommittedDigest(int64_t run_epoch, int64_t step,
                                                  int64_t rank) const {
  if (run_epoch != last_commit_.run_epoch || step != last_commit_.step) return std::nullopt;
  return last_commit_.digests[rank];
}

void OpenStep::Begin(std::shared_ptr<PushSession> session) {
  session_ = std::move(session);
  begun_step_ = session_->plan().step;
  changed_.WakeAll();
}

std::shared_ptr<PushSession> OpenStep::Take() {
  if (prepared_.has_value()) return nullptr;
  if (session_ != nullptr) {
    last_end_ = SteadyNow();
    previous_session_ = session_;
  }
  changed_.WakeAll();
  return std::exchange(session_, nullptr);
}

bool OpenStep::Detach(const PushSession* session) {
  return session_.get() == session && Take() != nullptr;
}

bool OpenStep::Prepare(Prepared& step) {
  if (session_ != step.session) return false;
  prepared_ = std::move(step);
  return true;
}

std::optional<OpenStep::Prepared> OpenStep::TakePrepared() {
  std::optional<Prepared> prepared = std::exchange(prepared_, std::nullopt);
  if (prepared.has_value()) Take();
  return prepared;
}

void OpenStep::NoteCommit(const PushSession& session) {
  const StepPlan& plan = session.plan();
  last_commit_ = {.run_epoch = session.run().epoch(),
                  .step = plan.step,
                  .omits_frozen = plan.omits_frozen,
                  .digests = session.Digests()};
  skipped_.erase(skipped_.begin(), skipped_.upper_bound(plan.step));
}

void OpenStep::NoteSkipped(int64_t step, SkippedStep skipped, const Snapshot* newest) {
  if (newest != nullptr && step <= newest->record.step) return;
  if (prepared_.has_value() && step == session_->plan().step) return;
  skipped_.try_emplace(step, std::move(skipped));
  if (skipped_.size() > kMaxSkippedSteps) skipped_.erase(skipped_.begin());
}

std::shared_ptr<PushSession> OpenStep::EndRun() {
  begun_step_ = 0;
  skipped_.clear();
  last_commit_ = {};
  return Take();
}

}  // namespace ema
