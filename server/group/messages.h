// SPDX-License-Identifier: Apache-2.0
//
// Messages by which the servers of a group commit a model's steps together.
//
// Each partition of a model is on a server of its own; the server of partition 0 is the model's
// home. A step is committed in two phases. Each partition sends the home its Vote when it has
// received the step and cannot fail any more. When all partitions have voted for it, the home
// commits the step, and its GroupState makes them publish it.
//
// The home counts rounds. A round ends with one commit or one abort, and then the next one begins.
// An incarnation of the model ends when a partition has lost its memory; the registry names the
// next one. Messages may be lost, repeated, late and in any order.
#ifndef EMA_SERVER_GROUP_MESSAGES_H_
#define EMA_SERVER_GROUP_MESSAGES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ema::group {

// A partition repeats its Vote when it has had no answer for this long.
inline constexpr absl::Duration kVoteInterval = absl::Seconds(10);
// A partition sends its Sync at this interval, and at once when a push needs a newer state.
inline constexpr absl::Duration kSyncInterval = absl::Seconds(1);

// One partition in one incarnation, on one process.
struct PartitionId {
  int64_t incarnation = 0;
  int64_t partition = 0;
  std::string boot;  // Identifies one start of the server.
};

// A step that all ranks have pushed to one partition, or to all of them, and that can be published.
struct PreparedStep {
  int64_t step = 0;
  int64_t run_epoch = 0;
  // Digest of the other parts of the version's record that do not depend on the partition: training
  // time, tracks, update weights, wire dtype.
  int64_t plan_digest = 0;
  // As the fields of the same names in the version's record.
  int64_t skipped_tensor_count = 0;
  std::vector<std::string> skipped_tensors;
};

// The vote of a partition. The home holds its answer, a GroupState, until the round has ended.
struct Vote {
  PartitionId from;
  int64_t round = 0;
  // An error: the partition refuses the round's step.
  absl::StatusOr<PreparedStep> step = PreparedStep();
  int64_t refused_step = 0;  // With a refusal: the number of the step; else ignored.
};

// From a partition to the home; the answer is a GroupState.
struct Sync {
  PartitionId from;
  int64_t round = 0;
  int64_t step = 0;  // The step that the partition is receiving; 0: none. The next two are its.
  int64_t received_bytes = 0;
  std::vector<int64_t> missing_ranks;
  // If not empty, the partition cannot join yet, because it has not loaded the version that
  // the incarnation begins with. The text is the end of an error message: "is loading", and why the
  // last attempt failed.
  std::string loading;
};

// The commit that every partition publishes at the end of a round.
struct GroupCommit {
  int64_t round = 0;
  int64_t version = 0;
  PreparedStep step;  // For all partitions together.
  absl::Time commit_time;
};

struct GroupAbort {
  int64_t round = 0;
  absl::Status why;
};

// A step that cannot be committed any more: a round with it was aborted, and trainers that know it
// have continued with the next step.
struct FailedStep {
  int64_t step = 0;
  absl::Status why;
};

// From the home to a partition: the answer to its messages, and sent to all when a round has ended.
// A newer state has a higher round, or the same round and only newer home_pinned_versions.
struct GroupState {
  int64_t incarnation = 0;
  int64_t round = 0;            // 0: some partitions have not joined, so there are no pushes.
  bool rejects_pushes = false;  // No pushes in this round.
  // The last commit and the last abort of the incarnation.
  std::optional<GroupCommit> last_commit;
  std::optional<GroupAbort> last_abort;
  // The open run; epoch 0: there is none.
  int64_t run_epoch = 0;
  std::string launch_id;
  int64_t tracks_revision = 0;  // Number of the change of tracks that is in force in this round.
  // Versions that readers and saves have pinned at the home, so that partitions evict others first.
  std::vector<int64_t> home_pinned_versions;
  std::optional<FailedStep> failed_step;  // The highest one of the open run.

  // Why `step`, which was pushed in `push_round`, is lost. Null: this state does not show that it
  // is lost. If it has the abort of `push_round`, that abort was for an earlier step, and `step`
  // may be pushed again in the current round.
  const absl::Status* FindLoss(int64_t step, int64_t push_round) const {
    if (failed_step.has_value() && step <= failed_step->step) return &failed_step->why;
    if (!last_abort.has_value() || last_abort->round != push_round) return nullptr;
    const bool is_for_failed_step = failed_step.has_value() && failed_step->why == last_abort->why;
    return is_for_failed_step ? nullptr : &last_abort->why;
  }
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_MESSAGES_H_
