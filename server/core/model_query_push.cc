// SPDX-License-Identifier: Apache-2.0
//
// The part of a Model that says what has become of a step, and ends it.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/model.h"

namespace ema {
namespace {

constexpr int64_t kNamedRanks = 16;       // As QueryPushResponse.missing_ranks,
constexpr int64_t kNamedRanges = 1024;    // .missing,
constexpr size_t kMaxReasonBytes = 1024;  // and QueryPushRequest.give_up_reason.

absl::Status CheckGiveUp(bool abandon_if_unfinished, std::string_view give_up_reason) {
  if (give_up_reason.empty()) return absl::OkStatus();
  if (give_up_reason.size() > kMaxReasonBytes) {
    return BadRequest(absl::StrCat("give_up_reason: ", give_up_reason.size(),
                                   " bytes given, expected up to ", kMaxReasonBytes));
  }
  if (abandon_if_unfinished) return absl::OkStatus();
  return BadRequest("give_up_reason: given without abandon_if_unfinished");
}

}  // namespace

absl::StatusOr<Model::PushState> Model::QueryPush(int64_t run_epoch, int64_t step, int64_t rank,
                                                  bool abandon_if_unfinished,
                                                  std::string_view give_up_reason) {
  EMA_RETURN_IF_ERROR(CheckGiveUp(abandon_if_unfinished, give_up_reason));
  PushState result;
  std::shared_ptr<PushSession> session;
  {
    absl::MutexLock lock(&mu_);
    const SnapshotRef newest = history_.newest();
    EMA_RETURN_IF_ERROR(history_.closed());
    EMA_RETURN_IF_ERROR(runs_.CheckRank(run_epoch, rank, newest.get()));
    history_.VisitRecords([&](const Version& record) {
      if (record.step == step && record.run_epoch == run_epoch) result.record = record;
      return !result.record.has_value();
    });
    if (result.record.has_value()) {
      result.state = PushState::State::kCommitted;
      result.rank_committed = true;
      result.plan = PlanLocked();
      result.digest = open_step_.CommittedDigest(run_epoch, step, rank);
      return result;
    }
    if (!give_up_reason.empty()) {
      open_step_.NoteAbandoned(step, {rank, std::string(give_up_reason)}, newest.get());
    }
    session = open_step_.session();
    if (session == nullptr || session->plan().step != step) {
      result.state = PushState::State::kUnknown;
      return result;
    }
    if (abandon_if_unfinished) open_step_.Take();
  }
  if (abandon_if_unfinished) {
    DropStep(*session, give_up_reason.empty()
                           ? MakeError(absl::StatusCode::kAborted, ErrorReason::kStepAbandoned,
                                       absl::StrCat("step ", step, ": abandoned by rank ", rank))
                           : AbandonedStep{rank, std::string(give_up_reason)}.status(step));
    result.state = PushState::State::kAbandoned;
    return result;
  }
  result.state = PushState::State::kOpen;
  result.rank_committed = session->RankCommitted(rank);
  result.missing_ranks = session->MissingRanks(kNamedRanks);
  const RankLayout& layout = *session->run().layout(rank);
  for (const Coverage::Range& range : session->Missing(rank, kNamedRanges)) {
    const int64_t tensor = layout.shards()[layout.FindShard(range.offset)].tensor_index;
    result.missing.emplace_back(range, manifest().tensor(tensor).name);
  }
  return result;
}

}  // namespace ema
