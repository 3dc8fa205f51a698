// SPDX-License-Identifier: Apache-2.0
//
// Shared by the sources of Schedule: schedule.cc has the rules, schedule_check.cc the validation,
// schedule_fields.cc the text form.
#ifndef EMA_INTERNAL_SCHEDULE_PARTS_H_
#define EMA_INTERNAL_SCHEDULE_PARTS_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "ema/schedule.h"

namespace ema {

// INVALID_ARGUMENT, BAD_SCHEDULE.
absl::Status BadSchedule(std::string_view message);

// The shortest text that parses to the same number.
std::string NumberText(double value);

inline bool IsWarmUp(const Schedule::Rule& rule) {
  return std::holds_alternative<InverseGammaRule>(rule) || std::holds_alternative<RampRule>(rule) ||
         std::holds_alternative<ExponentialRampRule>(rule);
}

// The update_interval of a schedule without one.
TrainingDuration DefaultInterval(const Schedule::Rule& rule);

// floor((time - phase) / interval). For counted units this is exact up to 2^53; for shares and
// seconds it tolerates their rounding, and `phase` is ignored.
double WholeIntervals(double time, const TrainingDuration& interval, int64_t phase);

// Errors as Schedule::Create().
absl::Status CheckOptions(const Schedule::Options& options);

}  // namespace ema

#endif  // EMA_INTERNAL_SCHEDULE_PARTS_H_
