// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/synthesis_plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/post_hoc.h"
#include "server/core/known_versions.h"

namespace ema {
namespace {

constexpr size_t kMaxSources = 1024;
constexpr size_t kNamedSteps = 16;  // At most so many are named in a message.

absl::Status Invalid(ErrorReason reason, std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message);
}

// A track of a checkpoint, as the maths sees it.
struct Candidate {
  SynthesisPlan::Source source;
  TimeUnit unit = TimeUnit::kBatch;
  // In `unit`: what the profile's times are counted from, and when the track began. Equal for all
  // that are used together, or they have averaged different things.
  double origin = 0;
  double started = 0;
  PowerProfile profile;

  const TrackConfig& config() const { return source.track->config; }
  int64_t step() const { return source.track->last_steps[0]; }
};

// Absent: the track is no power function with a snapshot_interval, or has not started.
std::optional<Candidate> AsCandidate(const StoredCheckpoint& checkpoint,
                                     const CheckpointTrack& track) {
  const Schedule& schedule = track.config.schedule;
  const auto* rule = std::get_if<PowerFunctionRule>(&schedule.rule());
  if (rule == nullptr || !track.config.snapshot_interval.has_value() ||
      !track.weights.has_value() || track.state.empty()) {
    return std::nullopt;
  }
  // Such a track has no other schedule.
  const Schedule::State& state = track.state[0];
  if (!state.started.has_value() || !state.last_update.has_value()) return std::nullopt;
  Candidate candidate{.source = {&checkpoint, &track}, .unit = schedule.update_interval().unit};
  const absl::StatusOr<double> origin = schedule.AgeOrigin(state);
  const std::optional<double> started = state.started->Get(candidate.unit);
  const std::optional<double> updated = state.last_update->Get(candidate.unit);
  if (!origin.ok() || !started.has_value() || !updated.has_value()) return std::nullopt;
  candidate.origin = *origin - rule->age_offset;
  candidate.started = *started;
  candidate.profile = {*updated - candidate.origin, GammaOfSigmaRel(rule->sigma_rel)};
  if (!(candidate.profile.end > 0)) return std::nullopt;
  return candidate;
}

// What hinders `candidate` from being used with `first`; empty: nothing.
std::string Misfit(const Candidate& candidate, const Candidate& first, const Manifest& manifest) {
  if (candidate.unit != first.unit) {
    return absl::StrCat("its update_interval is in ", std::string(TimeUnitSuffix(candidate.unit)),
                        ", not ", std::string(TimeUnitSuffix(first.unit)));
  }
  if (candidate.origin != first.origin || candidate.started != first.started) {
    return absl::StrCat("it began at ", candidate.started, " and counts from ", candidate.origin,
                        ", the other began at ", first.started, " and counts from ", first.origin);
  }
  if (ActionsOf(candidate.config(), manifest) != ActionsOf(first.config(), manifest)) {
    return "its tensor_rules or buffers differ";
  }
  return "";
}

// Every track of every checkpoint that can be used, newest first.
std::vector<Candidate> AllCandidates(absl::Span<const StoredCheckpoint> checkpoints) {
  std::vector<Candidate> candidates;
  for (const StoredCheckpoint& checkpoint : checkpoints) {
    for (const CheckpointTrack& track : checkpoint.manifest.tracks) {
      if (auto candidate = AsCandidate(checkpoint, track)) {
        candidates.push_back(*candidate);
      }
    }
  }
  return candidates;
}

const Candidate* FindNamed(const std::vector<Candidate>& candidates, std::string_view name) {
  const auto it =
      std::find_if(candidates.begin(), candidates.end(),
                   [&](const Candidate& candidate) { return candidate.config().name == name; });
  return it != candidates.end() ? &*it : nullptr;
}

// The error of a request for a track that has no candidate.
absl::Status NoCandidate(const Model& model, const std::string& name) {
  EMA_RETURN_IF_ERROR(model.tracks().CheckTrack(name));
  for (const TrackRef& track : model.tracks().after_next_commit()) {
    if (track->name() != name || track->config().snapshot_interval.has_value()) continue;
    return Invalid(ErrorReason::kBadRequest,
                   absl::StrCat("tracks \"", name, "\" (", track->config_text(),
                                "): has no snapshot_interval; use one like sigma_rel=0.05, "
                                "snapshot_interval=1000ba"));
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoVersion,
                   absl::StrCat("track \"", name, "\": no snapshot of it is on the disk yet"));
}

// The steps of `candidates` in words.
std::string StepsText(const std::vector<Candidate>& candidates) {
  std::vector<int64_t> steps;
  steps.reserve(candidates.size());
  for (const Candidate& candidate : candidates) steps.push_back(candidate.step());
  std::sort(steps.begin(), steps.end());
  steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
  const size_t count = steps.size();
  std::string last = count > kNamedSteps ? absl::StrCat(", ... ", steps.back()) : "";
  steps.resize(std::min(count, kNamedSteps));
  return absl::StrCat("there are snapshots of ", count, " steps: ", absl::StrJoin(steps, ", "),
                      last);
}

absl::Status BeforeFirst(const Model& model, int64_t step,
                         const std::vector<Candidate>& candidates) {
  return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                   absl::StrCat("model \"", model.config().name, "\": step ", step,
                                " is before the first snapshot; ", StepsText(candidates)));
}

// Those of `candidates` that are used together. REQUIRES: there is at least one.
// `all`: also those after the step that was asked for.
absl::StatusOr<std::vector<Candidate>> Choose(const Model& model, const Manifest& manifest,
                                              const SynthesisRequest& request,
                                              const std::vector<Candidate>& candidates,
                                              const std::vector<Candidate>& all) {
  std::vector<std::string> names = request.tracks;
  const Candidate* first = &candidates.front();
  for (const std::string& name : names) {
    const Candidate* const named = FindNamed(candidates, name);
    if (named == nullptr && FindNamed(all, name) == nullptr) return NoCandidate(model, name);
    if (named == nullptr) {
      std::vector<Candidate> later = all;
      std::erase_if(later, [&](const Candidate& c) { return c.config().name != name; });
      return BeforeFirst(model, request.step, later);
    }
    if (name == names.front()) first = named;
    const std::string misfit = Misfit(*named, *first, manifest);
    if (misfit.empty()) continue;
    return Invalid(ErrorReason::kBadRequest, absl::StrCat("tracks \"", name, "\" does not fit \"",
                                                          names.front(), "\": ", misfit));
  }
  std::vector<Candidate> chosen;
  for (const Candidate& candidate : candidates) {
    const bool is_named = names.empty() || std::find(names.begin(), names.end(),
                                                     candidate.config().name) != names.end();
    // An earlier track of the name may not fit: it is not what was meant.
    if (is_named && Misfit(candidate, *first, manifest).empty()) {
      chosen.push_back(candidate);
    }
  }
  // A track that has not changed is in several checkpoints.
  std::stable_sort(chosen.begin(), chosen.end(), [](const Candidate& a, const Candidate& b) {
    return std::pair(a.config().name, a.profile.end) < std::pair(b.config().name, b.profile.end);
  });
  const auto is_same = [](const Candidate& a, const Candidate& b) {
    return a.config().name == b.config().name && a.profile.end == b.profile.end;
  };
  chosen.erase(std::unique(chosen.begin(), chosen.end(), is_same), chosen.end());
  return chosen;
}

// Time at known steps.
class Clock {
 public:
  // Of a step, what is added first stays.
  void Add(int64_t step, const TrainingTime& time) { times_.emplace(step, time); }

  // In `unit`; between known steps it passes evenly. Absent: before the first or after the last, or
  // the trainer did not report it.
  std::optional<double> At(int64_t step, TimeUnit unit) const {
    const auto after = times_.lower_bound(step);
    if (after == times_.end()) return std::nullopt;
    if (after->first == step) return after->second.Get(unit);
    if (after == times_.begin()) return std::nullopt;
    const auto before = std::prev(after);
    const std::optional<double> from = before->second.Get(unit);
    const std::optional<double> to = after->second.Get(unit);
    if (!from.has_value() || !to.has_value()) return std::nullopt;
    const double share = static_cast<double>(step - before->first) /
                         static_cast<double>(after->first - before->first);
    return *from + share * (*to - *from);
  }

  // All units of a known step.
  const TrainingTime* Find(int64_t step) const {
    const auto it = times_.find(step);
    return it != times_.end() ? &it->second : nullptr;
  }

 private:
  std::map<int64_t, TrainingTime> times_;
};

Clock MakeClock(const Model& model, absl::Span<const StoredCheckpoint> checkpoints,
                const std::vector<Candidate>& candidates) {
  Clock clock;
  for (const Candidate& candidate : candidates) {
    clock.Add(candidate.step(), *candidate.source.track->state[0].last_update);
  }
  for (const StoredCheckpoint& checkpoint : checkpoints) {
    clock.Add(checkpoint.id.step, checkpoint.manifest.record.time);
  }
  const std::vector<VersionHistory::RecordEntry> records =
      model.history().RecordsAfter(0, /*incarnation=*/0, INT64_MAX);
  if (records.empty()) return clock;
  BranchWalk walk(records.back().record);
  for (auto entry = records.rbegin(); entry != records.rend(); ++entry) {
    const Version& record = entry->record;
    if (!walk.AdvanceIfOnBranch(record.id(), record.step, record.restored_from)) continue;
    clock.Add(record.step, record.time);
  }
  return clock;
}

// Of more than kMaxSources those of every second checkpoint, or third, ...: always the newest.
void ThinOut(std::vector<Candidate>& chosen) {
  if (chosen.size() <= kMaxSources) return;
  std::vector<CheckpointId> ids;
  ids.reserve(chosen.size());
  for (const Candidate& candidate : chosen) ids.push_back(candidate.source.checkpoint->id);
  std::sort(ids.begin(), ids.end(), std::greater<>());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  const size_t stride = (chosen.size() + kMaxSources - 1) / kMaxSources;
  std::erase_if(chosen, [&](const Candidate& candidate) {
    const auto it =
        std::lower_bound(ids.begin(), ids.end(), candidate.source.checkpoint->id, std::greater<>());
    return (it - ids.begin()) % stride != 0;
  });
}

// The rule that was asked for. BAD_SCHEDULE.
absl::StatusOr<Schedule> ScheduleOf(const SynthesisRequest& request,
                                    const std::optional<TrainingDuration>& update_interval) {
  Schedule::Options options{.update_interval = update_interval};
  if (const auto* half_life = std::get_if<TrainingDuration>(&request.profile)) {
    options.rule = HalfLifeRule{.half_life = *half_life, .debias = true};
  } else {
    options.rule = PowerFunctionRule{.sigma_rel = std::get<double>(request.profile)};
  }
  return Schedule::Create(options);
}

absl::StatusOr<TargetProfile> TargetOf(const SynthesisRequest& request, TimeUnit unit, double end) {
  const auto* half_life = std::get_if<TrainingDuration>(&request.profile);
  if (half_life == nullptr) {
    return PowerProfile{end, GammaOfSigmaRel(std::get<double>(request.profile))};
  }
  if (half_life->unit != unit) {
    const std::string suffix(TimeUnitSuffix(unit));
    return Invalid(
        ErrorReason::kBadSchedule,
        absl::StrCat("half_life \"", half_life->ToString(), "\": must be in ", suffix,
                     ", the unit of the tracks' update_interval, such as \"",
                     TrainingDuration{end / 10 >= 1 ? std::floor(end / 10) : 1, unit}.ToString(),
                     "\""));
  }
  return HalfLifeProfile{end, half_life->value};
}

TrainingTime OneUnit(TimeUnit unit, double value) {
  TrainingTime time;
  time.Set(unit, IsCounted(unit) ? std::round(value) : value);
  return time;
}

// Where the average of `step` ends, in the unit of the tracks and from their start on.
// VERSION_NOT_KEPT: the step's time is not known.
absl::StatusOr<double> EndOf(const Model& model, const Clock& clock, int64_t step,
                             const Candidate& newest, const std::vector<Candidate>& chosen) {
  if (step == newest.step()) return newest.profile.end;
  const std::optional<double> time = clock.At(step, newest.unit);
  if (!time.has_value()) {
    return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                     absl::StrCat("model \"", model.config().name, "\": the training time of step ",
                                  step, " in ", std::string(TimeUnitSuffix(newest.unit)),
                                  " is not known; ", StepsText(chosen)));
  }
  return std::max(newest.profile.end, *time - newest.origin);
}

// The one that ends last; of several, the one with the largest weight.
const Candidate& LastOf(const std::vector<Candidate>& chosen, const std::vector<double>& weights) {
  size_t last = 0;
  const auto key = [&](size_t i) { return std::pair(chosen[i].profile.end, std::abs(weights[i])); };
  for (size_t i = 1; i < chosen.size(); ++i) {
    if (key(i) > key(last)) last = i;
  }
  return chosen[last];
}

}  // namespace

absl::StatusOr<SynthesisPlan> PlanSynthesis(const Model& model, const Manifest& manifest,
                                            const SynthesisRequest& request,
                                            absl::Span<const StoredCheckpoint> checkpoints) {
  EMA_RETURN_IF_ERROR(ScheduleOf(request, std::nullopt).status());
  const std::vector<Candidate> all = AllCandidates(checkpoints);
  if (all.empty()) {
    for (const std::string& name : request.tracks) return NoCandidate(model, name);
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kNoVersion,
        absl::StrCat("model \"", model.config().name,
                     "\": no snapshot of a power function is on the disk yet; tracks with "
                     "sigma_rel and a snapshot_interval, such as \"1000ba\", save them"));
  }
  std::vector<Candidate> candidates = all;
  if (request.step > 0) {
    std::erase_if(candidates, [&](const Candidate& c) { return c.step() > request.step; });
    if (candidates.empty()) return BeforeFirst(model, request.step, all);
  }
  EMA_ASSIGN_OR_RETURN(std::vector<Candidate> chosen,
                       Choose(model, manifest, request, candidates, all));
  const auto newest = std::max_element(
      chosen.begin(), chosen.end(),
      [](const Candidate& a, const Candidate& b) { return a.profile.end < b.profile.end; });
  const TimeUnit unit = newest->unit;
  const int64_t step = request.step > 0 ? request.step : newest->step();

  const Clock clock = MakeClock(model, checkpoints, all);
  EMA_ASSIGN_OR_RETURN(const double end, EndOf(model, clock, step, *newest, chosen));
  EMA_ASSIGN_OR_RETURN(const TargetProfile target, TargetOf(request, unit, end));
  ThinOut(chosen);
  std::vector<PowerProfile> profiles;
  profiles.reserve(chosen.size());
  for (const Candidate& candidate : chosen) profiles.push_back(candidate.profile);
  const PostHocSolution solution = SolvePostHoc(profiles, target);

  EMA_ASSIGN_OR_RETURN(const Schedule schedule,
                       ScheduleOf(request, chosen.front().config().schedule.update_interval()));
  SynthesisPlan plan{.config = {.name = request.name, .schedule = schedule},
                     .residual = solution.residual};
  plan.config.tensor_rules = chosen.front().config().tensor_rules;
  plan.config.buffers = chosen.front().config().buffers;
  CheckpointId newest_id;
  for (size_t i = 0; i < chosen.size(); ++i) {
    if (solution.weights[i] == 0) continue;
    plan.sources.push_back(chosen[i].source);
    plan.sources.back().weight = solution.weights[i];
    newest_id = std::max(newest_id, chosen[i].source.checkpoint->id);
  }
  const Candidate& last = LastOf(chosen, solution.weights);
  plan.newest = last.source;
  const auto from = std::find_if(checkpoints.begin(), checkpoints.end(),
                                 [&](const StoredCheckpoint& c) { return c.id == newest_id; });
  const TrainingTime* const known = clock.Find(step);
  plan.record = {.incarnation = newest_id.incarnation,
                 .number = newest_id.version,
                 .step = step,
                 .time = known != nullptr ? *known : OneUnit(unit, end + last.origin),
                 .run_epoch = from->manifest.record.run_epoch,
                 // As precise as in a message, so that it is the same in all partitions.
                 .commit_time = absl::FromUnixMicros(absl::ToUnixMicros(absl::Now()))};
  plan.record.tracks.push_back(
      {.track = request.name,
       .config = absl::StrCat(TrackText(plan.config), "; built from ", plan.sources.size(),
                              " snapshots, residual ", solution.residual)});
  return plan;
}

SynthesisOrder OrderOf(const SynthesisPlan& plan) {
  const auto order = [](const SynthesisPlan::Source& source) {
    return SynthesisOrder::Source{source.checkpoint->id, source.track->config.name, source.weight};
  };
  SynthesisOrder all{.config = plan.config, .newest = order(plan.newest), .record = plan.record};
  for (const SynthesisPlan::Source& source : plan.sources) all.sources.push_back(order(source));
  return all;
}

}  // namespace ema
