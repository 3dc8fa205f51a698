// SPDX-License-Identifier: Apache-2.0
//
// Lengths of training time and schedules as text. What is accepted is written and read back, and
// plans a training: the weight of every update is 0 to 1.
#include <cmath>

#include "ema/schedule.h"
#include "tests/fuzz/fuzz.h"

namespace ema {
namespace {

void CheckDuration(std::string_view text) {
  const absl::StatusOr<TrainingDuration> duration = TrainingDuration::Parse(text);
  CheckMessage(duration.status());
  if (!duration.ok()) return;
  EMA_FUZZ_CHECK(std::isfinite(duration->value) && duration->value >= 0);
  EMA_FUZZ_CHECK(TrainingDuration::Parse(duration->ToString()) == duration);
}

TrainingTime TimeAt(double batch) {
  TrainingTime time;
  for (int unit = 0; unit < kTimeUnitCount; ++unit) time.Set(static_cast<TimeUnit>(unit), batch);
  time.Set(TimeUnit::kProgress, batch / 9007199254740992.0);
  return time;
}

void PlanTraining(const Schedule& schedule) {
  Schedule::State state;
  for (const double batch : {0.0, 1.0, 2.0, 2.0, 7.0, 1000.0, 1e9, 9007199254740992.0}) {
    const TrainingTime now = TimeAt(batch);
    const absl::StatusOr<Schedule::Update> update = schedule.Plan(state, now);
    EMA_FUZZ_CHECK(update.ok());
    EMA_FUZZ_CHECK(update->update_weight >= 0 && update->update_weight <= 1);
    EMA_FUZZ_CHECK(std::isfinite(update->elapsed) && update->elapsed >= 0);
    if (update->due) state = schedule.Next(state, *update, now);
  }
}

}  // namespace
}  // namespace ema

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = ema::FuzzInput(data, size).rest();
  ema::CheckDuration(text);
  const absl::StatusOr<ema::Schedule> schedule = ema::Schedule::Parse(text);
  ema::CheckMessage(schedule.status());
  if (!schedule.ok()) return 0;
  const absl::StatusOr<ema::Schedule> from_text = ema::Schedule::Parse(schedule->ToString());
  EMA_FUZZ_CHECK(from_text.ok() && from_text->rule() == schedule->rule());
  EMA_FUZZ_CHECK(from_text == schedule);
  EMA_FUZZ_CHECK(ema::Schedule::FromFields(schedule->ToFields()) == schedule);
  ema::PlanTraining(*schedule);
  return 0;
}
