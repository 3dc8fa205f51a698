// SPDX-License-Identifier: Apache-2.0
//
// Checks whether a schedule can start from an imported average.
#ifndef EMA_CLIENT_CPP_TRAINER_IMPORT_CHECK_H_
#define EMA_CLIENT_CPP_TRAINER_IMPORT_CHECK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "ema/time.h"
#include "ema/track.h"

namespace ema {

// OK if all schedules of the track continue from an average that is pushed first, at `now`, as if
// they had produced it. `updates`: number of updates in it; 0: unknown. INVALID_ARGUMENT,
// BAD_SCHEDULE: a schedule would soon overwrite it; the message says which, and what is missing.
absl::Status CheckCanContinueImport(const TrackConfig& track, const TrainingTime& now,
                                    int64_t updates);

}  // namespace ema

#endif  // EMA_CLIENT_CPP_TRAINER_IMPORT_CHECK_H_
