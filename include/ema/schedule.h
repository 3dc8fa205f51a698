// SPDX-License-Identifier: Apache-2.0
//
// Schedules: pure functions from (config, update count, training time) to the weight of an update.
// Other parts of averaging, such as their dtype and which tensors are copied or ignored, belong to
// the track (ema/track.h).
#ifndef EMA_SCHEDULE_H_
#define EMA_SCHEDULE_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/time.h"

namespace ema {

// Every rule defines a decay `d` for each update; the update is `ema += (1 - d) * (param - ema)`,
// except that of MeanOfLastRule.
// `elapsed` is the training time since the track's last update, `age` the time since its start.

// `d = 2^(-elapsed / h)`, `h = min(half_life, ramp_ratio * age)`: late or skipped updates keep the
// half-life.
struct HalfLifeRule {
  // Infinite: only `ramp_ratio` counts, in the unit of the interval.
  TrainingDuration half_life;
  // Keeps the half-life short early in training, as EDM2's TraditionalEMA does. 0: off.
  double ramp_ratio = 0;
  // Divides by the total weight of all pushed values, 1 - 2^(-age / half_life): the result is an
  // average that started at zero, without the share of the zeros (Adam's bias correction).
  bool debias = false;
  friend bool operator==(const HalfLifeRule&, const HalfLifeRule&) = default;
};

// `d = smoothing` at every update, never rescaled.
struct ConstantDecayRule {
  enum class ZeroInit {
    kOff,    // Starts with the first weights.
    kPlain,  // Starts with zeros, as optax.ema(debias=False).
    // Starts with zeros, and removes their share from the average: d = b (1 - b^(k-1)) / (1 - b^k)
    // at update k, where b is `smoothing`.
    kDebiased,
  };
  double smoothing = 0;
  ZeroInit zero_init = ZeroInit::kOff;
  friend bool operator==(const ConstantDecayRule&, const ConstantDecayRule&) = default;
};

// The three warm-ups depend on a position `n`: the time since the start, in the interval's unit
// (for "3ba" in batches, not in intervals), minus one, plus `count_offset` (1 for libraries whose
// first update, of the initial weights, has n = 1). d = 0 up to n = 0, then it is limited to
// [min_decay, max_decay].

// `d = 1 - (1 + n / inv_gamma)^-power` (Crowson; ema-pytorch, diffusers, timm).
struct InverseGammaRule {
  double inv_gamma = 1;
  double power = 2.0 / 3.0;
  double min_decay = 0;
  double max_decay = 0.9999;
  double count_offset = 0;
  friend bool operator==(const InverseGammaRule&, const InverseGammaRule&) = default;
};

// `d = (1 + n) / (ramp + n)` (TensorFlow, diffusers).
struct RampRule {
  double ramp = 10;
  double min_decay = 0;
  double max_decay = 0.9999;
  double count_offset = 0;
  friend bool operator==(const RampRule&, const RampRule&) = default;
};

// `d = max_decay * (1 - exp(-n / exp_ramp))` (ultralytics, mmengine).
struct ExponentialRampRule {
  double exp_ramp = 2000;
  double max_decay = 0.9999;
  double count_offset = 0;
  friend bool operator==(const ExponentialRampRule&, const ExponentialRampRule&) = default;
};

// `d` is a function of the training time, given by some of its points; it is constant before the
// first and after the last. With a cosine from 0dur to 1dur: BYOL, DINO.
struct DecaysRule {
  enum class Shape {
    kLinear,
    kCosine,  // Half a wave: flat at both points.
  };
  struct Point {
    TrainingDuration time;
    double decay = 0;
    friend bool operator==(const Point&, const Point&) = default;
  };
  std::vector<Point> points;     // In one unit, by time.
  Shape shape = Shape::kLinear;  // From one point to the next.
  friend bool operator==(const DecaysRule&, const DecaysRule&) = default;
};

// `d = (1 - elapsed / age)^(gamma + 1)`: the profile u^gamma over the past, of relative width
// `sigma_rel` (Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models",
// 2024). Times are in the interval's unit; `age_offset` is added to the age (1 for libraries that
// are one step ahead of the paper).
struct PowerFunctionRule {
  double sigma_rel = 0.1;
  double age_offset = 0;
  friend bool operator==(const PowerFunctionRule&, const PowerFunctionRule&) = default;
};

// The mean of all updates since the start (SWA): `d = 1 - 1/n`.
struct UniformRule {
  friend bool operator==(const UniformRule&, const UniformRule&) = default;
};

// The mean of the weights of the last `count` updates (LAWA), of all updates while there are fewer.
// `d = 1 - 1/n` for n weights, but the update also takes the oldest of them out of the mean.
struct MeanOfLastRule {
  static constexpr int64_t kMinCount = 2;
  static constexpr int64_t kMaxCount = 16;
  int64_t count = kMinCount;
  friend bool operator==(const MeanOfLastRule&, const MeanOfLastRule&) = default;
};

// The latest weights, bit for bit, in the dtype that was pushed.
struct CopyRule {
  friend bool operator==(const CopyRule&, const CopyRule&) = default;
};

// The exponent of PowerFunctionRule's profile: the largest real root of
// g^3 + 7 g^2 + (16 - t) g + 12 - t, t = sigma_rel^-2. REQUIRES: 0 < sigma_rel <= kMaxSigmaRel.
double GammaOfSigmaRel(double sigma_rel);
inline constexpr double kMaxSigmaRel = 0.28867513459481287;  // 1 / sqrt(12): the uniform profile.

// The rule by which one track averages. A value; immutable once created.
class Schedule {
 public:
  using Rule =
      std::variant<HalfLifeRule, ConstantDecayRule, InverseGammaRule, RampRule, ExponentialRampRule,
                   DecaysRule, PowerFunctionRule, UniformRule, MeanOfLastRule, CopyRule>;

  // The values of a track before its start. (The very first push always sets them.)
  enum class BeforeStart {
    kReinit,  // The first weights; the push that reaches the start replaces them (Composer).
    // The latest weights. The first update at or after the start is the last copy, and the next
    // update averages. Exception: if the rule is a warm-up and the start has the interval's unit,
    // the first update at or after the start averages already.
    kCopy,
    kHold,  // The first weights, from which averaging starts.
  };

  struct Options {
    Rule rule = CopyRule{};
    // Absent: one unit of the half-life, or every push for "dur" and "sec". Other rules: 1 batch.
    std::optional<TrainingDuration> update_interval;
    // An update is due at interval_phase + k * update_interval, in the interval's unit. 1 matches
    // libraries that count steps from 0.
    int64_t interval_phase = 0;
    // Composer's ema_start. 0, in any unit: from the first push.
    TrainingDuration start = {0, TimeUnit::kProgress};
    BeforeStart before_start = BeforeStart::kReinit;
    // The track does not change after this time.
    std::optional<TrainingDuration> end;
  };

  // INVALID_ARGUMENT, BAD_SCHEDULE: an option is out of range, or the rule does not use it. The
  // message names the field, the value and a valid one.
  static absl::StatusOr<Schedule> Create(const Options& options);

  // Names and values as users write them, in a fixed order, without values at their defaults:
  //   half_life "200ba": also ramp_ratio "0.09", debias "true"
  //   smoothing "0.999": also zero_init "plain" or "debias"
  //   inv_gamma "1": also power, min_decay, max_decay, count_offset
  //   ramp "10": also min_decay, max_decay, count_offset
  //   exp_ramp "2000": also max_decay, count_offset
  //   decays "0dur:0.996 1dur:1": also decays_shape "linear" or "cosine"
  //   sigma_rel "0.05": also age_offset;  uniform "true";  mean_of_last "5";  copy "true"
  // For all rules also update_interval "5ba", interval_phase "1", ema_start "0.1dur", before_start
  // "reinit", "copy" or "hold", ema_end "0.9dur".
  using Fields = std::vector<std::pair<std::string, std::string>>;
  Fields ToFields() const;
  // The inverse of ToFields(). BAD_SCHEDULE: an unknown name (the message has the nearest one), an
  // unreadable value, two rules ("half_life and smoothing"), no rule, or as Create().
  static absl::StatusOr<Schedule> FromFields(const Fields& fields);

  // The fields on one line, such as "half_life=200ba, update_interval=5ba"; "copy" for a plain
  // copy.
  std::string ToString() const;
  // The inverse of ToString(); also accepts the short forms "copy" and "200ba".
  static absl::StatusOr<Schedule> Parse(std::string_view text);

  const Options& options() const { return options_; }
  const Rule& rule() const { return options_.rule; }
  bool is_copy() const { return std::holds_alternative<CopyRule>(options_.rule); }
  // The number of earlier updates whose weights an update needs: for a MeanOfLastRule its count
  // less one, otherwise 0.
  int64_t kept_weights_count() const {
    const auto* const rule = std::get_if<MeanOfLastRule>(&options_.rule);
    return rule != nullptr ? rule->count - 1 : 0;
  }
  // Length 0: at every push.
  TrainingDuration update_interval() const { return update_interval_; }

  // A track's state between two updates.
  struct State {
    int64_t update_count = 0;                 // All updates, including the first value.
    int64_t averaged_count = 0;               // Those from the start on.
    std::optional<TrainingTime> last_update;  // Absent before the first.
    std::optional<TrainingTime> started;      // The first update from the start on.
    friend bool operator==(const State&, const State&) = default;
  };

  struct Update {
    bool due = false;
    // Computed in double. 1: copy the values; 0: they do not change.
    double update_weight = 0;
    // Treat the average as 0, whatever its values are.
    bool from_zero = false;
    // Training time since the last update, in the unit of the half-life (of the interval if there
    // is none). 0 for the first update.
    double elapsed = 0;
  };

  // Says what a push at `now` does to a track in `state`. The first push is always due. Later ones
  // are due, from the start to the end, when floor((now - phase) / interval) > floor((last - phase)
  // / interval); with kReinit and kHold also when they reach the start. INVALID_ARGUMENT, BAD_TIME:
  // `now` lacks a unit that the schedule needs, or went back in the unit of the half-life or
  // interval. It may go back in the units of the start and the end: the progress of a training goes
  // back when the training is extended.
  absl::StatusOr<Update> Plan(const State& state, const TrainingTime& now) const;

  // The time from which a track's age is counted, in the unit of its rule. REQUIRES: the track has
  // started. INVALID_ARGUMENT, BAD_TIME: the time of its start lacks the unit.
  absl::StatusOr<double> AgeOrigin(const State& state) const;

  // The state after `update`. REQUIRES: `update` is Plan(state, now).
  State Next(const State& state, const Update& update, const TrainingTime& now) const;

  friend bool operator==(const Schedule& a, const Schedule& b) {
    return a.ToFields() == b.ToFields();
  }

 private:
  explicit Schedule(const Options& options);

  // True from the start on.
  absl::StatusOr<bool> HasStarted(const State& state, const TrainingTime& now) const;
  absl::StatusOr<double> Weight(const State& state, const TrainingTime& now, double elapsed) const;

  Options options_;
  TrainingDuration update_interval_;
  double gamma_ = 0;  // Exponent of a PowerFunctionRule.
};

}  // namespace ema

#endif  // EMA_SCHEDULE_H_
