// SPDX-License-Identifier: Apache-2.0
//
// What the parts of Schedule share: schedule.cc, its rules; schedule_check.cc, what may be asked
// for; schedule_fields.cc, its text.
#ifndef EMA_INTERNAL_SCHEDULE_PARTS_H_
#define EMA_INTERNAL_SCHEDULE_PARTS_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "ema/schedule.h"

namespace ema {

// INVALID_ARGUMENT, BAD_SCHEDULE.
absl::Status BadSchedule(std::string_view message);

// The shortest text that reads back to the same number.
std::string NumberText(double value);

inline bool IsWarmUp(const Schedule::Rule& rule) {
  return std::holds_alternative<InverseGammaRule>(rule) || std::holds_alternative<RampRule>(rule);
}

// The update_interval of a schedule that does not give one.
TrainingDuration DefaultInterval(const Schedule::Rule& rule);

// floor((time - phase) / interval). Counts are whole, and the floors of their quotients exact, up
// to 2^53; shares and seconds are tolerant of their rounding, and have no phase.
double WholeIntervals(double time, const TrainingDuration& interval, int64_t phase);

// Of Schedule::Create().
absl::Status CheckOptions(const Schedule::Options& options);

}  // namespace ema

#endif  // EMA_INTERNAL_SCHEDULE_PARTS_H_
