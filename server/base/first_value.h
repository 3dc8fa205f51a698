// SPDX-License-Identifier: Apache-2.0
//
// Which schedules can begin with an average that was made elsewhere.
#ifndef EMA_SERVER_BASE_FIRST_VALUE_H_
#define EMA_SERVER_BASE_FIRST_VALUE_H_

#include "absl/status/status.h"
#include "ema/track.h"

namespace ema {

// OK if all schedules of the track go on from the value that its first push gives, as from an
// average of any age: a half-life or a constant decay that starts at once (or holds its first value
// until it does), or a copy. INVALID_ARGUMENT, BAD_SCHEDULE: for another that value is nothing, one
// update's weights among others, or what updates soon after the start write over; the message says
// which and why.
absl::Status CheckKeepsFirstValue(const TrackConfig& track);

}  // namespace ema

#endif  // EMA_SERVER_BASE_FIRST_VALUE_H_
