// SPDX-License-Identifier: Apache-2.0
//
// Schedules: pure functions from (config, elapsed training time) to the weight of an update. The
// engine knows nothing else about averaging.
#ifndef EMA_SCHEDULE_H_
#define EMA_SCHEDULE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "absl/status/statusor.h"
#include "ema/time.h"

namespace ema {

// `update_weight = 1 - 2^(-elapsed / half_life)`, `elapsed` counted from the last applied update:
// late, skipped or merged updates keep the half-life.
struct HalfLifeRule {
  TrainingDuration half_life;
  friend bool operator==(const HalfLifeRule&, const HalfLifeRule&) = default;
};

// `update_weight = 1 - smoothing` at every update, never rescaled.
struct ConstantDecayRule {
  double smoothing = 0;
  friend bool operator==(const ConstantDecayRule&, const ConstantDecayRule&) = default;
};

// The latest weights, bit for bit, in the dtype that was pushed.
struct CopyRule {
  friend bool operator==(const CopyRule&, const CopyRule&) = default;
};

// The rule that one track averages by. A value; immutable once made.
class Schedule {
 public:
  using Rule = std::variant<HalfLifeRule, ConstantDecayRule, CopyRule>;

  // `update_interval` absent: one unit of the half-life (for "dur" and "sec": every push), else 1
  // batch. INVALID_ARGUMENT, BAD_SCHEDULE: a half-life that is not above 0, smoothing outside [0,
  // 1), an interval that is not above 0. The message names the field, the value and a right one.
  static absl::StatusOr<Schedule> Create(Rule rule,
                                         std::optional<TrainingDuration> update_interval = {});

  // Reads the short form that clients use: "copy", or a half-life such as "200ba".
  static absl::StatusOr<Schedule> Parse(std::string_view text);

  const Rule& rule() const { return rule_; }
  bool is_copy() const { return std::holds_alternative<CopyRule>(rule_); }
  // 0 length: at every push.
  TrainingDuration update_interval() const { return update_interval_; }

  // Where a track stands between two updates.
  struct State {
    int64_t update_count = 0;
    std::optional<TrainingTime> last_update;  // Absent before the first.
    friend bool operator==(const State&, const State&) = default;
  };

  struct Update {
    bool due = false;
    // As it is applied: formed in double, rounded once. 1 means: copy the values. 0 if not due.
    float update_weight = 0;
    // Training time since the last update, in the half-life's unit (the interval's if there is
    // none).
    double elapsed = 0;
  };

  // What a push at `now` does to a track in `state`. The first push is always due, with weight 1;
  // then a push is due when floor(now / interval) > floor(last / interval). INVALID_ARGUMENT,
  // BAD_TIME: `now` lacks a unit that the schedule needs, or went back in it.
  absl::StatusOr<Update> Plan(const State& state, const TrainingTime& now) const;

  // Such as "half_life 200ba, update_interval 5ba".
  std::string ToString() const;

  friend bool operator==(const Schedule&, const Schedule&) = default;

 private:
  Schedule(Rule rule, TrainingDuration update_interval)
      : rule_(rule), update_interval_(update_interval) {}

  Rule rule_;
  TrainingDuration update_interval_;
};

}  // namespace ema

#endif  // EMA_SCHEDULE_H_
