// SPDX-License-Identifier: Apache-2.0
//
// Decides when a complete step of a model becomes a version.
#ifndef EMA_SERVER_CORE_COMMIT_GATE_H_
#define EMA_SERVER_CORE_COMMIT_GATE_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "ema/version.h"
#include "server/core/push_session.h"
#include "server/core/run_table.h"

namespace ema {

// A model that is one partition of a whole model asks its gate before it publishes a step: the step
// becomes a version in all partitions, or in none. The partitions count rounds; a round ends with
// one commit or one abort, and a step belongs to the round in which it began.
//
// A step is prepared when all ranks have committed it and its version has been built: nothing can
// fail any more. From then on only Model::PublishPrepared(), Model::DropOpenStep() and
// Model::Close() end it. Timeouts, ranks that abandon it and a stop of the server do not; a new
// run, a later step and a rollback have to wait.
//
// The model calls it from any thread, and holds its own lock during the calls of the first group:
// they must not call the model, and must not block. OnDropped() may be called inside
// Model::OpenPush(), so it must not call OpenPush() or RollBack(). No function may throw.
class CommitGate {
 public:
  virtual ~CommitGate() = default;

  // Whether this partition's server answers for the whole model. Constant.
  virtual bool is_home() const = 0;

  // --- Called with the model's lock held ---

  // The current round, for replies; also called without the lock. 0: none has begun, so nothing can
  // be pushed yet.
  virtual int64_t round() const = 0;
  // The number of the change of the tracks that is in force in round(); see TrackTable. 0: none is.
  virtual int64_t tracks_revision() const = 0;
  // Whether a rank of `launch` may join its run; if the run is not open here, the model then opens
  // it. ABORTED, FENCED: another run is open, or the launch's incarnation has ended. UNAVAILABLE,
  // MODEL_BUSY: the run is not known here yet. FAILED_PRECONDITION, NOT_HOME: the launch has no
  // epoch, and this is not the home.
  virtual absl::Status CheckLaunch(const Launch& launch) = 0;
  // A launch has opened a run here, so the current round ends.
  virtual void OnRunOpened(int64_t run_epoch, std::string_view launch_id) = 0;
  // Whether a stream of a push may enter the session of its round. ABORTED: FENCED, STALE_ROUND.
  // UNAVAILABLE: MODEL_BUSY, the round is not known here yet, or is about to end; DRAINING.
  virtual absl::Status CheckPush(const PushStart& start) = 0;
  // Ends `round` (0: the current one) without a version, because `step` cannot complete; 0: no step
  // in the round can. OK: it has ended without one, now or
  // earlier. UNAVAILABLE, MODEL_BUSY: it was committed, and PublishPrepared() follows.
  // FAILED_PRECONDITION, NOT_HOME: another server decides.
  virtual absl::Status AbandonRound(int64_t round, int64_t step, const absl::Status& why) = 0;

  // --- Called without the model's lock ---

  // The step of `round` is prepared. `record` is still without incarnation and commit time.
  virtual void OnPrepared(int64_t round, const Version& record) = 0;
  // The step of `round`, prepared or not, has ended without a version. May come before OnPrepared()
  // of the same step; the step is then dropped all the same. The lock that serializes the model's
  // pushes may be held.
  virtual void OnDropped(int64_t round, const absl::Status& why) = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_COMMIT_GATE_H_
