// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/drop_step.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/transport/interrupt.h"
#include "ema/error_reason.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {
namespace {

// The server has the message at once, or is not there.
constexpr absl::Duration kAbandonTimeout = absl::Seconds(1);

}  // namespace

absl::StatusOr<PushProgress> DropStep(RunCore& run, const FailedPush& failed) {
  const absl::Status& error = failed.error;
  // ABORTED means that a server has ended the step, but the other servers of a group may keep it.
  const bool may_be_open = failed.round != 0 || error.code() != absl::StatusCode::kAborted ||
                           GetErrorReason(error) == ErrorReason::kStepAbandoned;
  // Other ranks may have opened the step, so an abandoned one is dropped even if this rank has not
  // begun.
  if (failed.is_abandoned || (failed.has_begun && may_be_open)) {
    Interrupt never;
    const SteadyTime wait_end = After(SteadyNow(), kAbandonTimeout);
    std::vector<int64_t> missing_ranks;
    // A GPU that was too slow is no other rank's fault.
    if (error.code() == absl::StatusCode::kDeadlineExceeded &&
        GetErrorReason(error) != ErrorReason::kDevice) {
      const absl::StatusOr<PushProgress> progress = run.QueryPush(
          failed.step, /*abandon_if_unfinished=*/false, wait_end, &never, /*retry=*/false);
      if (progress.ok()) missing_ranks = progress->missing_ranks;
    }
    absl::StatusOr<PushProgress> progress =
        run.DropStep(failed.step, failed.round, wait_end, &never);
    if (progress.ok() && progress->state == PushProgress::State::kCommitted) {
      // A stale step of this run was committed before this push, with other bytes.
      const bool is_other_push = GetErrorReason(error) == ErrorReason::kStaleStep &&
                                 progress->version->run_epoch == run.run_epoch();
      if (is_other_push) return error;
      return progress;
    }
    if (!missing_ranks.empty()) {
      return MakeError(absl::StatusCode::kDeadlineExceeded, ErrorReason::kSessionExpired,
                       absl::StrCat(failed.name, " timed out; ranks that had not committed: ",
                                    absl::StrJoin(missing_ranks, ", ")));
    }
  }
  if (!failed.is_abandoned) return error;
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kStepAbandoned,
                   absl::StrCat(failed.name, ": abandoned by this rank"));
}

}  // namespace ema::client_internal
