// SPDX-License-Identifier: Apache-2.0
//
// A partition's side of a group's commits.
#ifndef EMA_SERVER_GROUP_PARTICIPANT_H_
#define EMA_SERVER_GROUP_PARTICIPANT_H_

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/group/messages.h"

namespace ema::group {

// The open step of one partition in one incarnation of its model. The home's own partition has one,
// too.
//
// The caller owns the memory of the step, its session. When the registry names a newer incarnation
// with this process in it, the caller drops the session (ABORTED, FENCED), destroys the object,
// loads the base of the new incarnation and makes another object. If the registry names another
// process in its place, the caller drops the partition.
//
// Invariant: in kPrepared only OnState() ends the session. A timeout, an abandoned push, a new run,
// and a stop of the server do not: they go to the home. Not thread-safe.
class Participant {
 public:
  enum class Phase {
    kNone,       // No session in this round.
    kReceiving,  // A session receives the round's step.
    kPrepared,   // It is complete, and nothing can fail any more. The home decides.
    kRefused,    // It has been dropped. The home will abort the round.
  };

  // `base_version`: the number of the version that the incarnation begins with.
  Participant(PartitionId id, int64_t base_version) : id_(std::move(id)), version_(base_version) {}

  const PartitionId& id() const { return id_; }
  Phase phase() const { return phase_; }
  int64_t round() const { return round_; }
  int64_t version() const { return version_; }  // The newest one.

  // The fields of a push's header that concern the group.
  struct Header {
    int64_t incarnation = 0;
    int64_t round = 0;
    int64_t run_epoch = 0;
    int64_t step = 0;
  };
  enum class HeaderAnswer {
    kAccept,          // Into the session; in kReceiving the caller checks that it is of its step.
    kStaleRound,      // ABORTED, with round().
    kFenced,          // ABORTED, FENCED, with the incarnation.
    kPushesRejected,  // UNAVAILABLE, DRAINING.
    kSync,            // UNAVAILABLE, MODEL_BUSY; the caller also requests a Sync.
    kReadRegistry,    // UNAVAILABLE, MODEL_BUSY: the watch will report the next incarnation.
  };
  // kAccept begins the session of the round. A repeated push of the last committed step must be
  // answered by the caller: its round is over.
  HeaderAnswer OnHeader(const Header& header);

  // Ends kReceiving: the session of `round` is complete, its snapshot is built; or it is refused
  // for that error, and the caller drops it. Then the caller sends to_send(). False, and no change,
  // if that session does not receive: it is prepared, or has ended.
  bool EndReceiving(int64_t round, absl::StatusOr<PreparedStep> step);
  // To send to the home now, and at kVoteInterval, until the phase changes. Null: nothing.
  const Vote* to_send() const;

  struct Action {
    enum class Kind {
      kNothing,
      kPublish,       // The session becomes the version of GroupState::last_commit.
      kDrop,          // Drop the session with `why`.
      kReadRegistry,  // The home is in a newer incarnation.
      kDiverged,  // A version of the group is missing here, which the protocol excludes: close the
                  // model.
    };
    Kind kind = Kind::kNothing;
    absl::Status why;
  };
  // A change of GroupState::tracks_revision comes into force after the action.
  Action OnState(const GroupState& state);

 private:
  const PartitionId id_;
  Phase phase_ = Phase::kNone;
  int64_t version_;
  // As in the newest GroupState.
  int64_t round_ = 0;
  int64_t run_epoch_ = 0;
  bool rejects_pushes_ = false;
  int64_t step_ = 0;  // The step of the round's session.
  Vote vote_;         // In kPrepared and kRefused.
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_PARTICIPANT_H_
