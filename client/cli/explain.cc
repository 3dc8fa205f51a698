// SPDX-License-Identifier: Apache-2.0
#include "client/cli/explain.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::cli {
namespace {

constexpr std::array<ScheduleOption, 24> kOptions = {{
    {"half_life", "Training time until a contribution halves, such as 1000ba"},
    {"ramp_ratio", "The half-life is at most this share of the time since the start, such as 0.09"},
    {"debias", "Begin with zeros, and correct for their share", true},
    {"smoothing", "The same decay at every update, such as 0.999"},
    {"zero_init",
     "With --smoothing: begin with zeros (plain), or also correct for their share (debias)"},
    {"inv_gamma", "Warm-up 1 - (1 + n / inv_gamma)^-power, such as 1"},
    {"power", "Exponent of the warm-up of --inv-gamma (default: 2/3)"},
    {"ramp", "Warm-up (1 + n) / (ramp + n), such as 10"},
    {"min_decay", "Smallest decay of a warm-up (default: 0)"},
    {"exp_ramp", "Warm-up max_decay * (1 - exp(-n / exp_ramp)), such as 2000"},
    {"max_decay", "Largest decay of a warm-up (default: 0.9999)"},
    {"count_offset", "Added to the position n of a warm-up, such as 1 (default: 0)"},
    {"decays", "Decays at points of the training time, such as \"0dur:0.996 1dur:1\""},
    {"decays_shape", "Between the points of --decays: linear (the default) or cosine"},
    {"sigma_rel", "Power-function profile of this relative width, such as 0.05"},
    {"age_offset", "With --sigma-rel: added to the time since the start, such as 1"},
    {"uniform", "The mean of all updates (SWA)", true},
    {"mean_of_last", "The mean of this number of last updates (LAWA), such as 5"},
    {"copy", "The latest weights", true},
    {"update_interval", "Training time between two updates, such as 10ba"},
    {"interval_phase", "Shifts the updates by this number of units of the interval"},
    {"ema_start", "When averaging starts, such as 100ba"},
    {"before_start", "What the track holds before --ema-start: reinit, copy or hold"},
    {"ema_end", "When averaging ends"},
}};

constexpr int64_t kMaxUpdates = 1'000'000;
constexpr std::array<int64_t, 4> kShareCounts = {1, 10, 100, 1000};
// With smaller weights, float32 averages have a relative error above 2^-24 / 1e-4 = 0.06 %.
constexpr double kSmallWeight = 1e-4;

absl::Status Refuse(std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule, message);
}

// The pushes of a trainer: one at each interval.
class Pushes {
 public:
  static absl::StatusOr<Pushes> Create(const Schedule& schedule,
                                       const std::optional<TrainingDuration>& total);

  // The time of push `i`, from 0, in the interval's unit. Absent: training has ended, or the number
  // of the push is too large.
  std::optional<double> At(int64_t i) const;
  TrainingTime TimeAt(double time) const;
  // The first push at or after `moment`; at most one earlier, by rounding.
  int64_t IndexAt(const TrainingDuration& moment) const;

 private:
  explicit Pushes(TrainingDuration interval) : interval_(interval) {}

  TrainingDuration interval_;
  double first_ = 0;
  std::optional<double> total_;  // In the interval's unit.
};

// OK if the pushes count the unit of `field`.
absl::Status CheckUnit(const char* field, const TrainingDuration& duration,
                       const TrainingDuration& interval, bool has_total) {
  const bool is_share = duration.unit == TimeUnit::kProgress;
  if (duration.unit == interval.unit || (is_share && has_total)) return absl::OkStatus();
  const std::string suffix(TimeUnitSuffix(interval.unit));
  return Refuse(absl::StrCat(
      field, " \"", duration.ToString(), "\": cannot be compared with update_interval \"",
      interval.ToString(), "\"; give ",
      is_share ? absl::StrCat("the whole training, such as --total 100000", suffix)
               : absl::StrCat("both in one unit, such as 1000", suffix)));
}

absl::StatusOr<Pushes> Pushes::Create(const Schedule& schedule,
                                      const std::optional<TrainingDuration>& total) {
  const Schedule::Options& options = schedule.options();
  const TrainingDuration interval = schedule.update_interval();
  const std::string suffix(TimeUnitSuffix(interval.unit));
  if (interval.value == 0) {
    return Refuse(
        absl::StrCat(schedule.ToString(),
                     ": is updated at every push; give the training time between pushes, such as "
                     "--update-interval ",
                     interval.unit == TimeUnit::kProgress ? "0.001" : "30", suffix));
  }
  if (total.has_value() && (total->unit != interval.unit || total->value <= 0)) {
    return Refuse(absl::StrCat("total \"", total->ToString(), "\": must be above 0 in ", suffix,
                               ", the unit of update_interval, such as 100000", suffix));
  }
  const auto* half_life = std::get_if<HalfLifeRule>(&options.rule);
  if (half_life != nullptr && std::isfinite(half_life->half_life.value)) {
    EMA_RETURN_IF_ERROR(CheckUnit("half_life", half_life->half_life, interval, total.has_value()));
  }
  if (const auto* decays = std::get_if<DecaysRule>(&options.rule)) {
    const TrainingDuration& last = decays->points.back().time;
    EMA_RETURN_IF_ERROR(CheckUnit("decays", last, interval, total.has_value()));
  }
  if (options.start.value > 0) {
    EMA_RETURN_IF_ERROR(CheckUnit("ema_start", options.start, interval, total.has_value()));
  }
  if (options.end.has_value()) {
    EMA_RETURN_IF_ERROR(CheckUnit("ema_end", *options.end, interval, total.has_value()));
  }
  Pushes pushes(interval);
  const double phase = std::fmod(static_cast<double>(options.interval_phase), interval.value);
  pushes.first_ = phase > 0 ? phase : interval.value;
  if (total.has_value()) pushes.total_ = total->value;
  return pushes;
}

std::optional<double> Pushes::At(int64_t i) const {
  constexpr double kTolerance = 1e-9;  // Rounding errors of the summed shares.
  constexpr double kMaxCount = 9007199254740992.0;
  const double time = first_ + static_cast<double>(i) * interval_.value;
  const double end = interval_.unit == TimeUnit::kProgress ? 1 : total_.value_or(kMaxCount);
  if (time > end * (1 + kTolerance)) return std::nullopt;
  return std::min(time, end);
}

TrainingTime Pushes::TimeAt(double time) const {
  TrainingTime now;
  if (total_.has_value()) now.Set(TimeUnit::kProgress, time / *total_);
  now.Set(interval_.unit, time);
  return now;
}

int64_t Pushes::IndexAt(const TrainingDuration& moment) const {
  const double time = moment.unit == interval_.unit ? moment.value : moment.value * *total_;
  constexpr double kMaxIndex = 1e16;
  const double index = std::ceil((time - first_) / interval_.value - 1e-6);
  return static_cast<int64_t>(std::clamp(index, 0.0, kMaxIndex));
}

// The total share of updates with these weights in the average after the last of them.
double ShareOf(const Schedule& schedule, absl::Span<const double> weights) {
  if (schedule.kept_weights_count() > 0) {
    return std::min(1.0, weights.back() * static_cast<double>(weights.size()));
  }
  double log_decay = 0;
  for (const double weight : weights) log_decay += std::log1p(-weight);
  return -std::expm1(log_decay);
}

ExplainedUpdate Describe(const Schedule& schedule, absl::Span<const double> weights, double time) {
  constexpr double kLn2 = 0.693147180559945309417;
  const double interval = schedule.update_interval().value;
  const int64_t count = static_cast<int64_t>(weights.size());
  ExplainedUpdate update{.number = count, .time = time, .weight = weights.back()};
  if (update.weight > 0) {
    update.window = interval / update.weight;
    if (schedule.kept_weights_count() == 0) {
      update.half_life = interval * kLn2 / -std::log1p(-update.weight);
    }
  }
  for (const int64_t last : kShareCounts) {
    if (last <= count) update.shares.push_back(ShareOf(schedule, weights.subspan(count - last)));
  }
  return update;
}

bool IsShown(int64_t number) {
  while (number % 10 == 0) number /= 10;
  return number == 1;
}

void WarnOfStall(const std::vector<double>& weights, Explanation& explanation) {
  const auto is_small = [](double weight) { return weight > 0 && weight < kSmallWeight; };
  const auto first = std::find_if(weights.begin(), weights.end(), is_small);
  if (first == weights.end()) return;
  double least = *first;
  for (const double weight : weights) {
    if (is_small(weight)) least = std::min(least, weight);
  }
  explanation.warnings.push_back(absl::StrFormat(
      "from update %d on the weight is 1e-4 or less, down to %.4g: a float32 average stalls at a "
      "relative gap of 2^-24 / weight = %.2g; with dtype=float64 at 2^-53 / weight",
      first - weights.begin() + 1, least, std::exp2(-24) / least));
}

std::string Number(const std::optional<double>& value, const std::string& unit) {
  return value.has_value() ? absl::StrFormat("%.6g%s", *value, unit) : "-";
}

}  // namespace

absl::Span<const ScheduleOption> ScheduleOptions() { return kOptions; }

absl::StatusOr<Explanation> ExplainSchedule(const Schedule& schedule,
                                            const std::optional<TrainingDuration>& total) {
  EMA_ASSIGN_OR_RETURN(const Pushes pushes, Pushes::Create(schedule, total));
  Explanation explanation{.schedule = schedule};
  Schedule::State state;
  std::vector<double> weights;
  // Pushes between the first one and the start do not affect the average.
  const int64_t start = pushes.IndexAt(schedule.options().start);
  for (int64_t i = 0; static_cast<int64_t>(weights.size()) < kMaxUpdates;
       i = i == 0 ? std::max<int64_t>(1, start) : i + 1) {
    const std::optional<double> time = pushes.At(i);
    if (!time.has_value()) break;
    const TrainingTime now = pushes.TimeAt(*time);
    EMA_ASSIGN_OR_RETURN(const Schedule::Update update, schedule.Plan(state, now));
    if (!update.due && state.started.has_value()) break;  // The end.
    if (!update.due && i > start + 1) break;              // The end comes before the start.
    state = schedule.Next(state, update, now);
    if (!update.due || !state.started.has_value()) continue;
    weights.push_back(update.update_weight);
    if (weights.size() != 2 && !IsShown(static_cast<int64_t>(weights.size()))) continue;
    explanation.updates.push_back(Describe(schedule, weights, *time));
  }
  if (weights.empty()) {
    return Refuse(absl::StrCat(schedule.ToString(),
                               ": training ends before ema_start; give an earlier one, such as "
                               "--ema-start 0dur"));
  }
  WarnOfStall(weights, explanation);
  return explanation;
}

std::string ExplanationText(const Explanation& explanation) {
  const TrainingDuration interval = explanation.schedule.update_interval();
  const std::string unit(TimeUnitSuffix(interval.unit));
  std::vector<std::string> heading = {"UPDATE", "TIME", "DECAY", "WEIGHT", "WINDOW", "HALF-LIFE"};
  for (const int64_t count : kShareCounts) heading.push_back(absl::StrCat("LAST ", count));
  Table table(heading);
  for (const ExplainedUpdate& update : explanation.updates) {
    std::vector<std::string> row = {absl::StrCat(update.number),
                                    TrainingDuration{update.time, interval.unit}.ToString(),
                                    absl::StrFormat("%.9g", 1 - update.weight),
                                    absl::StrFormat("%.6g", update.weight),
                                    Number(update.window, unit),
                                    Number(update.half_life, unit)};
    for (const double share : update.shares) row.push_back(absl::StrFormat("%.4g %%", 100 * share));
    row.resize(heading.size(), "-");
    table.Add(std::move(row));
  }
  std::string text = absl::StrCat(explanation.schedule.ToString(), ", pushed every ",
                                  interval.ToString(), "\n\n", table.ToString());
  for (const std::string& warning : explanation.warnings) {
    absl::StrAppend(&text, "\nwarning: ", warning, "\n");
  }
  return text;
}

Json ToJson(const Explanation& explanation) {
  const TrainingDuration interval = explanation.schedule.update_interval();
  Json updates = Json::array();
  for (const ExplainedUpdate& update : explanation.updates) {
    Json shares = Json::object();
    for (size_t i = 0; i < update.shares.size(); ++i) {
      shares[absl::StrCat(kShareCounts[i])] = update.shares[i];
    }
    updates.push_back({{"update", update.number},
                       {"time", update.time},
                       {"decay", 1 - update.weight},
                       {"weight", update.weight},
                       {"window", update.window},
                       {"half_life", update.half_life},
                       {"shares_of_last", std::move(shares)}});
  }
  return {{"schedule", explanation.schedule},
          {"update_interval", interval},
          {"unit", TimeUnitSuffix(interval.unit)},
          {"updates", std::move(updates)},
          {"warnings", explanation.warnings}};
}

absl::Status Explain(const ExplainOptions& options, bool json) {
  EMA_ASSIGN_OR_RETURN(const Schedule schedule, Schedule::FromFields(options.fields));
  std::optional<TrainingDuration> total;
  if (!options.total.empty()) {
    const absl::StatusOr<TrainingDuration> parsed = TrainingDuration::Parse(options.total);
    if (!parsed.ok()) return Refuse(absl::StrCat("total ", parsed.status().message()));
    total = *parsed;
  }
  EMA_ASSIGN_OR_RETURN(const Explanation explanation, ExplainSchedule(schedule, total));
  return PrintResult(json, ToJson(explanation), ExplanationText(explanation));
}

}  // namespace ema::cli
