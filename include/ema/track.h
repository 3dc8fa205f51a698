// SPDX-License-Identifier: Apache-2.0
//
// The configuration of one average of a model.
#ifndef EMA_TRACK_H_
#define EMA_TRACK_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/manifest.h"
#include "ema/schedule.h"
#include "ema/tensor_spec.h"
#include "ema/time.h"

namespace ema {

// Applies to tensors with a name or alias that is `pattern` or matches it as a glob, as fnmatch(3)
// without flags: `*` is any text, `?` any byte.
struct TensorRule {
  std::string pattern;
  TensorAction action = TensorAction::kAverage;
  // The schedule of these tensors; absent: the track's. See RuleSchedule().
  std::optional<Schedule> schedule;
  friend bool operator==(const TensorRule&, const TensorRule&) = default;
};

struct TrackConfig {
  std::string name;
  Schedule schedule;
  // The first rule that matches applies.
  std::vector<TensorRule> tensor_rules;
  // The action for buffers (TensorSpec::is_buffer) that no rule matches: kAverage or kCopy.
  TensorAction buffers = TensorAction::kAverage;
  // The dtype in which averages are kept and computed: kFloat32, or kFloat64, which does not round
  // small updates away, but takes twice the memory.
  Dtype dtype = Dtype::kFloat32;
  // True: pushes do not update the track.
  bool paused = false;
  // Only for a power function: for each such length of training the server keeps a version on its
  // disk, from which it can later build averages of other lengths.
  std::optional<TrainingDuration> snapshot_interval = std::nullopt;

  friend bool operator==(const TrackConfig&, const TrackConfig&) = default;
};

// How a step is handled if a pushed float is not finite. Numbers are those of
// ema.v1.NonFinitePolicy, which says what each means.
enum class NonFinitePolicy : int { kReject = 1, kSkipTensor = 2, kAllow = 3 };
// "reject", "skip", "allow"; "unknown" for any other number.
std::string_view NonFinitePolicyName(NonFinitePolicy policy);
// The policy of that name; absent: there is none.
std::optional<NonFinitePolicy> ParseNonFinitePolicy(std::string_view name);

// INVALID_ARGUMENT: BAD_NAME; otherwise BAD_SCHEDULE:
//  - `buffers` is not kAverage or kCopy, `dtype` is not kFloat32 or kFloat64, a copy track has
//    kFloat64, or every tensor is ignored;
//  - a rule has an empty pattern, or matches no tensor of `manifest`, unless its action is kIgnore
//    (a model need not have tensors that all tracks ignore, and readers learn from the rule that
//    the track lacks them);
//  - more than 256 patterns have wildcards, or matching them takes too long;
//  - a rule's schedule is a copy or has no use (the rule does not average, or the track is a copy);
//  - more than 16 rules have a schedule, or a rule has one, and it or the track's is mean_of_last;
//  - a snapshot_interval is 0, or the track is not a power function, or a rule has a schedule.
absl::Status ValidateTrack(const TrackConfig& track, const Manifest& manifest);

// BAD_SCHEDULE: a rule matches no tensor, even one that ignores. `manifest` has all existing
// tensors, including those that no track has.
absl::Status CheckRulesMatch(const TrackConfig& track, const Manifest& manifest);

// The track's action for each tensor of the manifest. A copy track copies all tensors that it does
// not ignore; only floats are averaged.
std::vector<TensorAction> ActionsOf(const TrackConfig& track, const Manifest& manifest);

// The effective schedule of a rule: without an update_interval it gets the track's. To be applied
// when a track is read from text or a message. BAD_SCHEDULE: the rule cannot use that interval, or
// one of the two is a mean of the last updates.
absl::StatusOr<Schedule> RuleSchedule(const Schedule& rule, const Schedule& track);

// The schedules of a track, in this order everywhere: its own, then those of its tensor rules.
std::vector<const Schedule*> SchedulesOf(const TrackConfig& track);

// For each tensor of the manifest, the index of its schedule in SchedulesOf().
std::vector<int> ScheduleIndicesOf(const TrackConfig& track, const Manifest& manifest);

// The states of SchedulesOf(). Empty: before the track's first update.
using TrackState = std::vector<Schedule::State>;

// The update that each of SchedulesOf() plans for a push at `now`, even if the track is paused.
// Errors as Schedule::Plan(), and BAD_TIME: `now` lacks the unit of the snapshot_interval.
absl::StatusOr<std::vector<Schedule::Update>> PlanTrack(const TrackConfig& track,
                                                        const TrackState& state,
                                                        const TrainingTime& now);
// True if at least one of `updates` is due.
bool IsDue(absl::Span<const Schedule::Update> updates);
// The track's state after `updates`. REQUIRES: these are PlanTrack(track, state, now).
TrackState NextState(const TrackConfig& track, const TrackState& state,
                     absl::Span<const Schedule::Update> updates, const TrainingTime& now);

// The track without the rules that ValidateTrack() rejects because they match no tensor of the
// manifest.
TrackConfig WithoutUnmatchedRules(TrackConfig track, const Manifest& manifest);

// A text such as "half_life=200ba, update_interval=5ba; dtype float64; head.* ignore; stem.*
// (half_life=10ba, update_interval=5ba)": the schedule and the options that are not at their
// defaults. Many rules are shown as their number.
std::string TrackText(const TrackConfig& track);

}  // namespace ema

#endif  // EMA_TRACK_H_
