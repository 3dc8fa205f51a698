// SPDX-License-Identifier: Apache-2.0
//
// Decides when a complete step of a model becomes a version.
#ifndef EMA_SERVER_CORE_COMMIT_GATE_H_
#define EMA_SERVER_CORE_COMMIT_GATE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "ema/model_info.h"

namespace ema {

// What a model that is one partition of a larger one asks before it publishes a step: the step
// becomes a version in all partitions, or in none.
//
// A step is prepared when all ranks have committed it and its version has been built: nothing can
// fail any more. From then on only Model::PublishPrepared(), Model::DropOpenStep() and
// Model::Close() end it. Timeouts, ranks that abandon it and a stop of the server do not; a new
// run, a later step and a rollback have to wait.
//
// The model calls it from any thread. OnDropped() may be called inside Model::OpenPush(), so it
// must not call OpenPush() or RollBack(). Neither function may throw.
class CommitGate {
 public:
  virtual ~CommitGate() = default;

  // The open step is prepared. `record`: of its version, still without incarnation and commit time.
  // `may_omit_frozen`: whether the next push may omit frozen tensors if this version is published.
  virtual void OnPrepared(const Version& record, bool may_omit_frozen) = 0;
  // The open step, prepared or not, has ended without a version. May come before OnPrepared() of
  // the same step; it is then dropped all the same.
  virtual void OnDropped(int64_t run_epoch, int64_t step, const absl::Status& why) = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_COMMIT_GATE_H_
