// SPDX-License-Identifier: Apache-2.0
//
// The step that a model's trainer is pushing, and the last committed and the skipped steps.
#ifndef EMA_SERVER_CORE_OPEN_STEP_H_
#define EMA_SERVER_CORE_OPEN_STEP_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"
#include "server/core/push_session.h"
#include "server/core/run_table.h"
#include "server/core/snapshot.h"

namespace ema {

// A step that one rank will never push, so no session can complete it.
struct SkippedStep {
  int64_t rank = 0;
  std::string why;

  absl::Status status(int64_t step) const;  // ABORTED, STEP_SKIPPED.
};

// Invariant: at most one session is open, it belongs to the open run, and its step is after the
// newest version's. The caller that removes a session ends it, without the model's lock. Only
// TakePrepared() removes a prepared session (see CommitGate).
//
// Not thread-safe: the model locks it.
class OpenStep {
 public:
  explicit OpenStep(std::string model_name) : model_name_(std::move(model_name)) {}

  // Null: none is open.
  const std::shared_ptr<PushSession>& session() const { return session_; }
  // UNAVAILABLE, MODEL_BUSY: the open session is prepared.
  absl::Status CheckNotPrepared() const;
  // The previous session; the next one waits for its memory. Null: the memory is free.
  std::shared_ptr<PushSession> previous_session() const { return previous_session_.lock(); }
  SteadyTime last_end() const { return last_end_; }  // When a session last ended.
  // The newest step begun in the run; 0: none.
  int64_t begun_step() const { return begun_step_; }
  // Woken when session() changes.
  SteadyWait& changed() { return changed_; }

  // Checks a rank's start against the versions and the skipped steps. Returns the digest of the
  // rank's bytes if it pushes the last committed step again; nullopt: the step is new. ABORTED:
  // STALE_STEP, STEP_SKIPPED. FAILED_PRECONDITION, PLAN_MISMATCH.
  absl::StatusOr<std::optional<uint32_t>> CheckStep(const PushStart& start,
                                                    const Snapshot* newest) const;
  // ABORTED, STEP_SKIPPED.
  absl::Status CheckNotSkipped(int64_t step) const;
  // The open session if `start` belongs to it; null: a new one must be made, which ends the open
  // one, for example because that is of an earlier round. ABORTED, STALE_STEP. FAILED_PRECONDITION,
  // PLAN_MISMATCH; if ranks disagree on omitting frozen tensors, calls runs.RequireFrozen().
  // UNAVAILABLE, MODEL_BUSY: the open step still waits for other ranks.
  absl::StatusOr<std::shared_ptr<PushSession>> JoinSession(const PushStart& start,
                                                           RunTable& runs) const;
  // The digest of the rank's bytes if `step` is the last one that the run has committed; else
  // nullopt.
  std::optional<uint32_t> CommittedDigest(int64_t run_epoch, int64_t step, int64_t rank) const;

  // REQUIRES: no session is open.
  void Begin(std::shared_ptr<PushSession> session);
  // Removes and returns the open session; null: none is open, or it is prepared.
  std::shared_ptr<PushSession> Take();
  // Removes `session`. False: it is not the open one, or it is prepared.
  bool Detach(const PushSession* session);

  struct Prepared {
    std::shared_ptr<PushSession> session;
    PushSession::FinishedSnapshot version;
    absl::Time begin;  // When its commit began.
  };
  // Stores `step`: its session is now prepared. False, and no change: its session is not open.
  bool Prepare(Prepared& step);
  // Removes and returns the prepared session; nullopt: there is none.
  std::optional<Prepared> TakePrepared();
  bool is_prepared() const { return prepared_.has_value(); }
  // The step of `session` has been committed.
  void NoteCommit(const PushSession& session);
  // Records that a step can never be completed; keeps the highest 16 such steps. Ignores steps that
  // are not after `newest`, and the prepared one.
  void NoteSkipped(int64_t step, SkippedStep skipped, const Snapshot* newest);
  // Clears the steps of the run, which has been fenced. Removes and returns its session. REQUIRES:
  // CheckNotPrepared() is OK.
  std::shared_ptr<PushSession> EndRun();

 private:
  // run_epoch 0: there was no commit.
  struct LastCommit {
    int64_t run_epoch = 0;
    int64_t step = 0;
    bool omits_frozen = false;
    std::vector<uint32_t> digests;  // By rank.
  };

  const std::string model_name_;
  std::shared_ptr<PushSession> session_;
  std::optional<Prepared> prepared_;  // Its session is session_.
  std::weak_ptr<PushSession> previous_session_;
  SteadyWait changed_;
  SteadyTime last_end_ = SteadyTime::min();
  int64_t begun_step_ = 0;
  std::map<int64_t, SkippedStep> skipped_;  // By step, of this run, after the newest version.
  LastCommit last_commit_;                  // For retries.
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_OPEN_STEP_H_
