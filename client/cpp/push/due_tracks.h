// SPDX-License-Identifier: Apache-2.0
//
// Decides which tracks are due at a step, from the view of one rank of a trainer.
#ifndef EMA_CLIENT_CPP_PUSH_DUE_TRACKS_H_
#define EMA_CLIENT_CPP_PUSH_DUE_TRACKS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/client.h"
#include "ema/time.h"

namespace ema::client_internal {

// The tracks of a run's plan, with states that count the updates this rank has tried to push. The
// states are not taken from the server's replies: all ranks must try at the same steps, regardless
// of the outcome of earlier pushes.
class DueTracks {
 public:
  struct Due {
    size_t index = 0;
    std::vector<Schedule::Update> updates;
  };

  // Adopts `plan` if its revision differs from that of the last one, which means that UpdateModel()
  // has changed the tracks. Returns whether it does. A plan from before the run was joined has
  // track ids of 0; the states counted since then are kept.
  bool Adopt(RunPlan plan);
  // To be called when the run has been rejoined: the next plan is always adopted, since a restarted
  // server counts revisions from another start.
  void OnRejoined() { revision_ = 0; }

  // The tracks that a push would update; if all tracks are paused, those that it would update
  // otherwise. Errors as PlanTrack().
  absl::StatusOr<std::vector<Due>> At(const TrainingTime& now) const;
  // Counts the updates of `due`, which a push now tries. REQUIRES: `due` is the result of At(now),
  // and no plan has arrived since.
  void Count(absl::Span<const Due> due, const TrainingTime& now);
  // True if all tracks in `due` are paused. REQUIRES: as Count().
  bool ArePaused(absl::Span<const Due> due) const;

  // The plan's entries, indexed by Due::index.
  const std::vector<RunPlan::Entry>& tracks() const { return tracks_; }

 private:
  int64_t revision_ = 0;
  std::vector<RunPlan::Entry> tracks_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_DUE_TRACKS_H_
