// SPDX-License-Identifier: Apache-2.0
//
// Which schedules can begin with an average that was made elsewhere.
#ifndef EMA_CLIENT_CPP_TRAINER_FIRST_VALUE_H_
#define EMA_CLIENT_CPP_TRAINER_FIRST_VALUE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "ema/time.h"
#include "ema/track.h"

namespace ema {

// OK if all schedules of the track go on from an average that is pushed first, at `now`, as if they
// had made it; `updates`: how many went into it, 0: not known. INVALID_ARGUMENT, BAD_SCHEDULE: one
// would write it over soon; the message says which, and what is missing.
absl::Status CheckKeepsFirstValue(const TrackConfig& track, const TrainingTime& now,
                                  int64_t updates);

}  // namespace ema

#endif  // EMA_CLIENT_CPP_TRAINER_FIRST_VALUE_H_
