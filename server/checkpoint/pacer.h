// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_CHECKPOINT_PACER_H_
#define EMA_SERVER_CHECKPOINT_PACER_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ema/internal/status_macros.h"
#include "server/base/steady_wait.h"
#include "server/core/model.h"

namespace ema {

// Limits disk work to a third of the time while its model is being pushed. Measured on two cores:
// without it, saving one version after another reduces pushes to 0.65 of their speed, with it to
// 0.78 to 0.81. Most of the remaining loss is disk traffic (a loop of `dd` leaves 0.78). The lowest
// thread priority instead, which may starve the thread, leaves only 0.72. Also ends work whose
// result no longer counts. For one thread.
class Pacer {
 public:
  explicit Pacer(Model& model) : model_(model) {}
  // Calls Pause() of a Pacer of its own.
  static std::function<absl::Status()> Hook(Model& model) {
    return [pacer = Pacer(model)]() mutable { return pacer.Pause(); };
  }

  // To be called after every few MiB: while pushes arrive, waits twice as long as has been worked
  // since the last call. Not OK: the model is a partition that has been dropped, and the next
  // incarnation needs its memory: Model::CheckOpen().
  absl::Status Pause() {
    if (model_.is_partition()) EMA_RETURN_IF_ERROR(model_.CheckOpen());
    const absl::Duration worked = absl::FromChrono(SteadyNow() - rested_at_);
    if (worked < kLeast) return absl::OkStatus();
    model_.AwaitNoPush(kRestPerWork * worked);
    rested_at_ = SteadyNow();
    return absl::OkStatus();
  }

 private:
  static constexpr absl::Duration kLeast = absl::Milliseconds(1);
  static constexpr int kRestPerWork = 2;

  Model& model_;
  SteadyTime rested_at_ = SteadyNow();
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_PACER_H_
