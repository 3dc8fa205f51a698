// SPDX-License-Identifier: Apache-2.0
#include "ema/track.h"

#include <algorithm>
#include <optional>
#include <variant>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "include/ema/internal/tensor_pattern.h"

namespace ema {
namespace {

absl::Status BadTrack(const TrackConfig& track, std::string_view problem) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
                   absl::StrCat("track \"", track.name, "\": ", std::string(problem)));
}

// For each tensor, the first rule that matches it; -1: none.
std::vector<int> RuleIndicesOf(const TrackConfig& track, const Manifest& manifest) {
  std::vector<int> indices(manifest.tensors().size(), -1);
  for (size_t rule = 0; rule < track.tensor_rules.size(); ++rule) {
    for (const int64_t i : MatchingTensors(track.tensor_rules[rule].pattern, manifest)) {
      if (indices[i] < 0) indices[i] = static_cast<int>(rule);
    }
  }
  return indices;
}

// Of a rule's pattern, `status` as an error of the track.
absl::Status AsRuleError(const TrackConfig& track, const absl::Status& status) {
  if (status.ok()) return status;
  return BadTrack(track, absl::StrCat("tensor_rules: ", status.message()));
}

absl::Status CheckMatches(const TrackConfig& track, const TensorRule& rule,
                          const Manifest& manifest, GlobBudget& budget) {
  return AsRuleError(track, FindTensors(rule.pattern, manifest, budget).status());
}

// A mean of the last updates needs their weights, which are kept for whole tracks.
absl::Status CheckNoMeanOfLast(const Schedule& rule, const Schedule& track) {
  for (const Schedule* const schedule : {&rule, &track}) {
    if (schedule->kept_weights_count() == 0) continue;
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
                     absl::StrCat("mean_of_last ", schedule->kept_weights_count() + 1,
                                  ": must be the only schedule of its track; use two tracks, each "
                                  "with the other's tensors ignored, such as \"head.*\" ignore"));
  }
  return absl::OkStatus();
}

absl::Status CheckRuleSchedules(const TrackConfig& track) {
  constexpr size_t kMaxSchedules = 16;
  for (const TensorRule& rule : track.tensor_rules) {
    if (!rule.schedule.has_value()) continue;
    const std::string what = absl::StrCat("tensor_rules: \"", absl::CHexEscape(rule.pattern),
                                          "\" (", rule.schedule->ToString(), "): ");
    if (track.schedule.is_copy() || rule.action != TensorAction::kAverage) {
      return BadTrack(track, what +
                                 "a schedule has no use where nothing is averaged; give an "
                                 "average one, such as half_life=1000ba, or no schedule");
    }
    if (const absl::Status status = CheckNoMeanOfLast(*rule.schedule, track.schedule);
        !status.ok()) {
      return BadTrack(track, absl::StrCat(what, status.message()));
    }
    if (rule.schedule->is_copy()) {
      return BadTrack(track, what +
                                 "to copy tensors, give the action \"copy\" and no schedule, "
                                 "such as \"head.*\" copy");
    }
  }
  if (SchedulesOf(track).size() - 1 <= kMaxSchedules) return absl::OkStatus();
  return BadTrack(track, absl::StrCat("tensor_rules: ", SchedulesOf(track).size() - 1,
                                      " have a schedule; at most ", kMaxSchedules, " may"));
}

absl::Status CheckSnapshotInterval(const TrackConfig& track) {
  if (!track.snapshot_interval.has_value()) return absl::OkStatus();
  const std::string given =
      absl::StrCat("snapshot_interval \"", track.snapshot_interval->ToString(), "\": ");
  if (!std::holds_alternative<PowerFunctionRule>(track.schedule.rule())) {
    return BadTrack(track, absl::StrCat(given,
                                        "averages can be built only from snapshots of power "
                                        "functions; use it with one, such as sigma_rel=0.05, "
                                        "snapshot_interval=1000ba"));
  }
  if (SchedulesOf(track).size() > 1) {
    return BadTrack(track,
                    absl::StrCat(given,
                                 "a tensor rule has a schedule of its own, but snapshots are "
                                 "of one profile; use two tracks, each with the other's "
                                 "tensors ignored, such as \"head.*\" ignore"));
  }
  if (!(track.snapshot_interval->value > 0) ||
      !TrainingDuration::Parse(track.snapshot_interval->ToString()).ok()) {
    return BadTrack(track, absl::StrCat(given, "must be finite and above 0, such as \"1000ba\""));
  }
  return absl::OkStatus();
}

absl::Status CheckSnapshotUnit(const TrackConfig& track, const TrainingTime& now) {
  if (!track.snapshot_interval.has_value()) return absl::OkStatus();
  const TrainingDuration& interval = *track.snapshot_interval;
  if (now.Get(interval.unit).has_value()) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, ErrorReason::kBadTime,
      absl::StrCat("training time lacks \"", std::string(TimeUnitSuffix(interval.unit)),
                   "\", which snapshot_interval ", interval.ToString(), " needs"));
}

}  // namespace

std::string_view NonFinitePolicyName(NonFinitePolicy policy) {
  switch (policy) {
    case NonFinitePolicy::kReject:
      return "reject";
    case NonFinitePolicy::kSkipTensor:
      return "skip";
    case NonFinitePolicy::kAllow:
      return "allow";
  }
  return "unknown";
}

std::optional<NonFinitePolicy> ParseNonFinitePolicy(std::string_view name) {
  for (const NonFinitePolicy policy :
       {NonFinitePolicy::kReject, NonFinitePolicy::kSkipTensor, NonFinitePolicy::kAllow}) {
    if (name == NonFinitePolicyName(policy)) return policy;
  }
  return std::nullopt;
}

absl::Status ValidateTrack(const TrackConfig& track, const Manifest& manifest) {
  GlobBudget budget;
  return ValidateTrack(track, manifest, budget);
}

absl::Status ValidateTrack(const TrackConfig& track, const Manifest& manifest, GlobBudget& budget) {
  EMA_RETURN_IF_ERROR(ValidateName("track", track.name));
  if (track.buffers != TensorAction::kAverage && track.buffers != TensorAction::kCopy) {
    return BadTrack(track, absl::StrCat("buffers \"", std::string(TensorActionName(track.buffers)),
                                        "\": must be \"average\" or \"copy\"; to ignore some, give "
                                        "a rule, such as \"*.running_mean ignore\""));
  }
  if (track.dtype != Dtype::kFloat32 && track.dtype != Dtype::kFloat64) {
    return BadTrack(track, absl::StrCat("dtype \"", std::string(DtypeName(track.dtype)),
                                        "\": must be \"float32\" or \"float64\""));
  }
  if (track.dtype == Dtype::kFloat64 && track.schedule.is_copy()) {
    return BadTrack(track,
                    "dtype \"float64\": has no use with copy, which keeps the dtypes that are "
                    "pushed; use it with an average, such as half_life=1000ba");
  }
  EMA_RETURN_IF_ERROR(CheckSnapshotInterval(track));
  // Each is tried on every tensor.
  constexpr int64_t kMaxGlobs = 256;
  const int64_t globs = std::count_if(track.tensor_rules.begin(), track.tensor_rules.end(),
                                      [](const TensorRule& rule) { return IsGlob(rule.pattern); });
  if (globs > kMaxGlobs || static_cast<int64_t>(track.tensor_rules.size()) > kMaxTensorCount) {
    return BadTrack(track,
                    absl::StrCat("tensor_rules: ", track.tensor_rules.size(), " given, ", globs,
                                 " with wildcards; at most ", kMaxTensorCount, " and ", kMaxGlobs,
                                 " are allowed, such as \"head.*\" ignore"));
  }
  for (const TensorRule& rule : track.tensor_rules) {
    EMA_RETURN_IF_ERROR(
        rule.action == TensorAction::kIgnore
            ? AsRuleError(track, MatchTensors(rule.pattern, manifest, budget).status())
            : CheckMatches(track, rule, manifest, budget));
  }
  EMA_RETURN_IF_ERROR(CheckRuleSchedules(track));
  const std::vector<TensorAction> actions = ActionsOf(track, manifest);
  if (std::all_of(actions.begin(), actions.end(),
                  [](TensorAction action) { return action == TensorAction::kIgnore; })) {
    return BadTrack(track,
                    "tensor_rules: every tensor is ignored; average or copy one, such as by "
                    "\"head.* average\" before the others");
  }
  return absl::OkStatus();
}

absl::Status CheckRulesMatch(const TrackConfig& track, const Manifest& manifest) {
  GlobBudget budget;
  for (const TensorRule& rule : track.tensor_rules) {
    EMA_RETURN_IF_ERROR(CheckMatches(track, rule, manifest, budget));
  }
  return absl::OkStatus();
}

std::vector<TensorAction> ActionsOf(const TrackConfig& track, const Manifest& manifest) {
  const std::vector<int> rules = RuleIndicesOf(track, manifest);
  std::vector<TensorAction> actions;
  actions.reserve(rules.size());
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    const TensorSpec& spec = manifest.tensor(i);
    TensorAction action = spec.is_buffer ? track.buffers : TensorAction::kAverage;
    if (rules[i] >= 0) action = track.tensor_rules[rules[i]].action;
    const bool can_average = !track.schedule.is_copy() && IsFloat(spec.dtype);
    if (action == TensorAction::kAverage && !can_average) action = TensorAction::kCopy;
    actions.push_back(action);
  }
  return actions;
}

absl::StatusOr<Schedule> RuleSchedule(const Schedule& rule, const Schedule& track) {
  EMA_RETURN_IF_ERROR(CheckNoMeanOfLast(rule, track));
  Schedule::Options options = rule.options();
  if (options.update_interval.has_value() || track.update_interval().value == 0) return rule;
  options.update_interval = track.update_interval();
  return Schedule::Create(options);
}

std::vector<const Schedule*> SchedulesOf(const TrackConfig& track) {
  std::vector<const Schedule*> schedules = {&track.schedule};
  for (const TensorRule& rule : track.tensor_rules) {
    if (rule.schedule.has_value()) schedules.push_back(&*rule.schedule);
  }
  return schedules;
}

std::vector<int> ScheduleIndicesOf(const TrackConfig& track, const Manifest& manifest) {
  std::vector<int> of_rule;
  int last = 0;
  for (const TensorRule& rule : track.tensor_rules) {
    of_rule.push_back(rule.schedule.has_value() ? ++last : 0);
  }
  if (last == 0) return std::vector<int>(manifest.tensors().size());
  std::vector<int> indices = RuleIndicesOf(track, manifest);
  for (int& index : indices) index = index < 0 ? 0 : of_rule[index];
  return indices;
}

absl::StatusOr<std::vector<Schedule::Update>> PlanTrack(const TrackConfig& track,
                                                        const TrackState& state,
                                                        const TrainingTime& now) {
  EMA_RETURN_IF_ERROR(CheckSnapshotUnit(track, now));
  std::vector<Schedule::Update> updates;
  for (const Schedule* const schedule : SchedulesOf(track)) {
    const size_t i = updates.size();
    EMA_ASSIGN_OR_RETURN(const Schedule::Update update,
                         schedule->Plan(i < state.size() ? state[i] : Schedule::State(), now));
    updates.push_back(update);
  }
  return updates;
}

bool IsDue(absl::Span<const Schedule::Update> updates) {
  return std::any_of(updates.begin(), updates.end(),
                     [](const Schedule::Update& update) { return update.due; });
}

TrackState NextState(const TrackConfig& track, const TrackState& state,
                     absl::Span<const Schedule::Update> updates, const TrainingTime& now) {
  const std::vector<const Schedule*> schedules = SchedulesOf(track);
  TrackState next = state;
  next.resize(schedules.size());
  for (size_t i = 0; i < schedules.size(); ++i) {
    if (updates[i].due) next[i] = schedules[i]->Next(next[i], updates[i], now);
  }
  return next;
}

TrackConfig WithoutUnmatchedRules(TrackConfig track, const Manifest& manifest) {
  std::erase_if(track.tensor_rules, [&manifest](const TensorRule& rule) {
    return rule.action != TensorAction::kIgnore && MatchingTensors(rule.pattern, manifest).empty();
  });
  return track;
}

std::string TrackText(const TrackConfig& track) {
  std::string text = track.schedule.ToString();
  if (track.buffers != TensorAction::kAverage) {
    absl::StrAppend(&text, "; buffers ", std::string(TensorActionName(track.buffers)));
  }
  if (track.dtype != Dtype::kFloat32) {
    absl::StrAppend(&text, "; dtype ", std::string(DtypeName(track.dtype)));
  }
  if (track.paused) absl::StrAppend(&text, "; paused");
  if (track.snapshot_interval.has_value()) {
    absl::StrAppend(&text, "; snapshot_interval ", track.snapshot_interval->ToString());
  }
  constexpr size_t kShownRules = 8;
  constexpr size_t kShownBytes = 200;
  std::string rules;
  for (const TensorRule& rule : track.tensor_rules) {
    if (rules.size() > kShownBytes) break;
    absl::StrAppend(&rules, "; ", rule.pattern, " ",
                    rule.schedule.has_value() ? absl::StrCat("(", rule.schedule->ToString(), ")")
                                              : std::string(TensorActionName(rule.action)));
  }
  // Every version's record has this text.
  if (track.tensor_rules.size() > kShownRules || rules.size() > kShownBytes) {
    return absl::StrCat(text, "; ", track.tensor_rules.size(), " tensor rules");
  }
  return text + rules;
}

}  // namespace ema
