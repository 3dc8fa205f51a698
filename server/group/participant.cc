// SPDX-License-Identifier: Apache-2.0
#include "server/group/participant.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"

namespace ema::group {

Participant::HeaderAnswer Participant::OnHeader(const Header& header) {
  if (header.incarnation > id_.incarnation) return HeaderAnswer::kReadRegistry;
  if (header.incarnation < id_.incarnation || header.run_epoch < run_epoch_) {
    return HeaderAnswer::kFenced;
  }
  if (round_ == 0 || header.round > round_ || header.run_epoch > run_epoch_) {
    return HeaderAnswer::kSync;
  }
  if (header.round < round_) return HeaderAnswer::kStaleRound;
  if (rejects_pushes_) return HeaderAnswer::kPushesRejected;
  if (phase_ == Phase::kRefused) return HeaderAnswer::kSync;
  if (phase_ == Phase::kPrepared && header.step != vote_.step->step) return HeaderAnswer::kSync;
  if (phase_ == Phase::kNone) {
    phase_ = Phase::kReceiving;
    step_ = header.step;
  }
  return HeaderAnswer::kAccept;
}

bool Participant::EndReceiving(int64_t round, absl::StatusOr<PreparedStep> step) {
  if (phase_ != Phase::kReceiving || round != round_) return false;
  phase_ = step.ok() ? Phase::kPrepared : Phase::kRefused;
  vote_ = {id_, round_, std::move(step), step_};
  return true;
}

const Vote* Participant::to_send() const {
  return phase_ == Phase::kPrepared || phase_ == Phase::kRefused ? &vote_ : nullptr;
}

Participant::Action Participant::OnState(const GroupState& state) {
  if (state.incarnation > id_.incarnation) return {Action::Kind::kReadRegistry};
  if (state.incarnation < id_.incarnation || state.round <= round_) return {};
  const std::optional<GroupCommit>& commit = state.last_commit;
  const bool is_newer = commit.has_value() && commit->version > version_;
  if (is_newer &&
      (phase_ != Phase::kPrepared || commit->round != round_ || commit->version != version_ + 1)) {
    return {Action::Kind::kDiverged};
  }

  const int64_t ended_round = std::exchange(round_, state.round);
  const Phase ended_phase = std::exchange(phase_, Phase::kNone);
  run_epoch_ = state.run_epoch;
  rejects_pushes_ = state.rejects_pushes;
  if (is_newer) {
    version_ = commit->version;
    return {Action::Kind::kPublish};
  }
  if (ended_phase != Phase::kReceiving && ended_phase != Phase::kPrepared) return {};
  if (const absl::Status* loss = state.FindLoss(step_, ended_round)) {
    return {Action::Kind::kDrop, *loss};
  }
  // If that abort is not known here, the step may be lost.
  const bool is_abort_known =
      state.last_abort.has_value() && state.last_abort->round == ended_round;
  return {Action::Kind::kDrop,
          MakeError(absl::StatusCode::kAborted,
                    is_abort_known ? ErrorReason::kStaleRound : ErrorReason::kStepAbandoned,
                    absl::StrCat("round ", ended_round, ": aborted; round ", round_, " is open"))};
}

}  // namespace ema::group
