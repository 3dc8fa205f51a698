// SPDX-License-Identifier: Apache-2.0
//
// The home's side of a group's commits.
#ifndef EMA_SERVER_GROUP_ROUNDS_H_
#define EMA_SERVER_GROUP_ROUNDS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"
#include "server/group/messages.h"

namespace ema::group {

// Decides the rounds of one incarnation of a model.
//
// Invariants: a round ends once; it ends with a commit only when every partition has prepared the
// same step of the open run in that round; each commit has the next version. Decisions are in
// memory only: a home that loses it begins a new incarnation.
//
// When a call says that a round has ended, the caller applies state() to the home's own partition,
// answers every held Vote with it, and sends it once to the other partitions. A partition that does
// not receive it gets it as the answer to its next Sync. Not thread-safe.
class Rounds {
 public:
  struct Member {
    std::string name;  // In error messages.
    std::string boot;
  };
  struct Options {
    int64_t incarnation = 0;
    std::vector<Member> members;  // By partition, as the registry has them.
    int64_t base_version = 0;     // The number of the version that the incarnation begins with.
    int64_t tracks_revision = 0;
    absl::Duration session_timeout = absl::Seconds(30);
    absl::Duration max_registry_outage = absl::Minutes(10);
  };
  // `now`: when the registry was asked for the options.
  Rounds(Options options, SteadyTime now);

  const GroupState& state() const { return state_; }
  // Whether `id` is that of a partition of this incarnation, with its boot.
  bool HasPartition(const PartitionId& id) const;
  // OK: all partitions have joined. UNAVAILABLE, GROUP_DEGRADED: names one that has not.
  absl::Status CheckJoined() const;
  // Why no step can be committed.
  struct Problem {
    std::string text;  // "partition 1 on member \"ema-1\" has not joined"
    absl::Duration age;
  };
  // A partition has not joined, or has been silent for several intervals of its Sync, or the home
  // has not reached the registry for too long. Nullopt: none of these.
  std::optional<Problem> FindProblem(SteadyTime now) const;
  // A partition that the round waits for.
  struct Slowest {
    size_t partition = 0;
    std::string activity;  // The end of a sentence: "has received 12 bytes and waits for ranks 3".
  };
  // Of several, the one with the fewest received bytes. Nullopt: nothing has arrived in the round,
  // or some partitions have not joined.
  std::optional<Slowest> FindSlowest() const;

  enum class Answer {
    kState,   // state(), now.
    kHold,    // state(), when the round has ended. A call that is held for the partition already is
              // answered now.
    kFenced,  // ABORTED, FENCED, with the home's incarnation: the sender reads the registry. The
              // home does, too, if the sender's incarnation is higher.
  };
  struct Result {
    Answer answer = Answer::kState;
    bool round_ended = false;
  };
  // Each message also joins its sender, unless Sync::loading is set. Round 0 ends when all
  // partitions have joined.
  // `commit_time`: for the version's record, if the round ends with a commit.
  Result OnVote(const Vote& vote, SteadyTime now, absl::Time commit_time);
  Result OnSync(const Sync& sync, SteadyTime now);

  // The home has accepted a push of `step` in the current round.
  void NotePush(int64_t step) { step_ = std::max(step_, step); }

  // Functions that can end a round, except round 0, and return whether they have.

  // Aborts `round` because `step` cannot complete: a rank has abandoned it. `step` 0: all steps in
  // the round, because a rank has joined the open run again and may push other bytes. False, and no
  // change, if it is not the current round: then its step was committed, or has been aborted
  // before. Unless `why` is UNAVAILABLE, which makes trainers push the step again,
  // GroupState::failed_step becomes `step`, or for 0 the last step in the round that a partition
  // has reported.
  bool Abort(int64_t round, int64_t step, const absl::Status& why);
  // Aborts a round in which something has arrived, but nothing more for Options::session_timeout,
  // and accepts pushes again when the time of RejectPushes() is over. To be called at
  // kSyncInterval.
  bool Expire(SteadyTime now);
  // Fences the open run. `run_epoch` is higher than its epoch.
  bool OpenRun(int64_t run_epoch, std::string_view launch_id);
  // Rejects pushes until AcceptPushes(`until`), or until Expire() is called at that time or later.
  // Ends the open round with `why`, unless pushes are rejected already. Several such periods may
  // overlap: pushes are accepted when all have ended.
  bool RejectPushes(const absl::Status& why, SteadyTime until);
  // Ends one period of RejectPushes() with that `until`; does nothing if there is none.
  bool AcceptPushes(SteadyTime until);
  // Every partition has the tracks of that revision ready. They come into force with the next
  // commit, or the next run; `is_urgent`: now, and the round ends. An aborted round changes
  // nothing, so that trainers learn the new plan from the reply to a push.
  bool SetTracksRevision(int64_t revision, bool is_urgent);

  // The registry has answered. The home commits nothing if that is longer ago than
  // Options::max_registry_outage: then it may have been replaced.
  void NoteRegistryReached(SteadyTime now) { registry_reached_ = now; }
  // As in GroupState.
  void SetHomePinnedVersions(std::vector<int64_t> versions) {
    state_.home_pinned_versions = std::move(versions);
  }

 private:
  struct Partition {
    bool has_joined = false;
    std::string loading;      // The last Sync::loading before it has joined.
    SteadyTime last_message;  // When it arrived. Meaningless before the partition has joined.
    // These belong to the current round.
    std::optional<PreparedStep> prepared;
    int64_t received_bytes = 0;
    std::vector<int64_t> missing_ranks;
  };

  Result Receive(const PartitionId& from, std::string_view loading, SteadyTime now);
  // "partition 2 (ema-2)"
  std::string NameOf(size_t partition) const;
  // Nullopt: the home has reached the registry recently enough.
  std::optional<Problem> FindRegistryProblem(SteadyTime now) const;
  // Why the step that `partition` has prepared cannot be committed with those of the others.
  absl::Status CheckAgreement(size_t partition) const;
  void Commit(absl::Time commit_time);
  // Ends the round without a version. `failed_step`: the step that cannot be committed any more, as
  // those before it; 0: unknown.
  void EndWithout(int64_t failed_step, const absl::Status& why);
  // After the end of a period of RejectPushes(): ends the round, unless another one lasts.
  bool PermitPushes();
  // Ends the round, and the new tracks come into force.
  bool AbortForTracks(const absl::Status& why);
  void BeginNextRound();

  const Options options_;
  const SteadyTime start_;
  GroupState state_;
  std::vector<Partition> partitions_;
  size_t joined_count_ = 0;
  size_t prepared_count_ = 0;
  int64_t step_ = 0;  // The last step in the round that a partition has reported; 0: none.
  std::optional<SteadyTime> last_progress_;         // Nullopt: nothing has arrived in the round.
  int64_t version_;                                 // The newest one.
  std::multiset<SteadyTime> rejects_pushes_until_;  // One for each RejectPushes().
  int64_t next_tracks_revision_;
  SteadyTime registry_reached_;
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_ROUNDS_H_
