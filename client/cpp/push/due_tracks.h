// SPDX-License-Identifier: Apache-2.0
//
// Which tracks are due at a step, as far as one rank of a trainer knows.
#ifndef EMA_CLIENT_CPP_PUSH_DUE_TRACKS_H_
#define EMA_CLIENT_CPP_PUSH_DUE_TRACKS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/client.h"
#include "ema/time.h"

namespace ema::client_internal {

// The tracks of a run's plan, and where each stands as far as this rank has tried. Counted here and
// not taken from the server's replies: all ranks must try at the same steps, whatever became of the
// pushes before.
class DueTracks {
 public:
  struct Due {
    size_t index = 0;
    std::vector<Schedule::Update> updates;
  };

  // Takes over what UpdateModel() has changed. True: something.
  bool Adopt(RunPlan plan);
  // The next plan is another run's of the same trainer. The server may have been restarted, and
  // counts its revisions anew.
  void GoOn() { revision_ = 0; }

  // Those that a push would update; if all are paused, those that it would update else. Errors as
  // PlanTrack().
  absl::StatusOr<std::vector<Due>> At(const TrainingTime& now) const;
  // These are tried now. REQUIRES: they are of At(now) since the last plan.
  void Count(absl::Span<const Due> due, const TrainingTime& now);
  // True if a push would update none of them. REQUIRES: as above.
  bool ArePaused(absl::Span<const Due> due) const;

  // The plan's, by Due::index.
  const std::vector<RunPlan::Entry>& tracks() const { return tracks_; }

 private:
  int64_t revision_ = 0;
  std::vector<RunPlan::Entry> tracks_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_DUE_TRACKS_H_
