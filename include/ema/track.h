// SPDX-License-Identifier: Apache-2.0
//
// One average of a model, as CreateModel takes it.
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

// Tensors of which a name (or alias) is `pattern` or matches it as a glob: `*` is any text, `?` any
// byte, as fnmatch(3) without flags.
struct TensorRule {
  std::string pattern;
  TensorAction action = TensorAction::kAverage;
  // Of tensors that are averaged by a schedule of their own; absent: by the track's. See
  // RuleSchedule().
  std::optional<Schedule> schedule;
  friend bool operator==(const TensorRule&, const TensorRule&) = default;
};

struct TrackConfig {
  std::string name;
  Schedule schedule;
  // The first that matches decides.
  std::vector<TensorRule> tensor_rules;
  // For buffers (TensorSpec::is_buffer) that no rule matches: kAverage or kCopy.
  TensorAction buffers = TensorAction::kAverage;
  // Keeps two float32 per averaged element, whose sum is the average: small weights do not stall.
  // Twice the memory. Readers get the first, which is the average rounded to float32.
  bool compensated = false;
  // Pushes do not change it.
  bool paused = false;
  // Of a power function: the server keeps a version on its disk for each such length of training,
  // from which it can build averages of other lengths later.
  std::optional<TrainingDuration> snapshot_interval = std::nullopt;

  friend bool operator==(const TrackConfig&, const TrackConfig&) = default;
};

// What becomes of a step in which a pushed float is not finite. Numbers are those of
// ema.v1.NonFinitePolicy, which says what each means.
enum class NonFinitePolicy : int { kReject = 1, kSkipTensor = 2, kAllow = 3 };
// "reject", "skip", "allow"; "unknown": it is none of these.
std::string_view NonFinitePolicyName(NonFinitePolicy policy);
// The one of that name; absent: there is none.
std::optional<NonFinitePolicy> ParseNonFinitePolicy(std::string_view name);

// INVALID_ARGUMENT: a bad name, an empty pattern, buffers that are neither averaged nor copied, a
// copy track that is compensated, more than 256 patterns with wildcards, or such as would take long
// to look for, a rule with a schedule that copies, or has no use (it does not average, or the track
// copies), more than 16 of these, a snapshot_interval of no length, without a power function, or
// beside rules with schedules, or (BAD_SCHEDULE) a rule that matches no tensor of `manifest`, but
// for one that ignores: what all tracks ignore a model need not have, and readers learn from the
// rule that the track has not.
absl::Status ValidateTrack(const TrackConfig& track, const Manifest& manifest);

// BAD_SCHEDULE: a rule, also one that ignores, matches no tensor. `manifest`: of all tensors that
// there are, whether a track has them or not.
absl::Status CheckRulesMatch(const TrackConfig& track, const Manifest& manifest);

// What the track does with each tensor of the manifest. A copy track copies what it does not
// ignore; only floats are averaged.
std::vector<TensorAction> ActionsOf(const TrackConfig& track, const Manifest& manifest);

// A rule's schedule as readers of text and messages take it into a track: one without an
// update_interval has the track's. BAD_SCHEDULE: it cannot go by that.
absl::StatusOr<Schedule> RuleSchedule(const Schedule& rule, const Schedule& track);

// The schedules of a track, in this order everywhere: its own, then those of its tensor rules.
std::vector<const Schedule*> SchedulesOf(const TrackConfig& track);

// For each tensor of the manifest, by which of SchedulesOf() it goes.
std::vector<int> ScheduleIndicesOf(const TrackConfig& track, const Manifest& manifest);

// Where each of SchedulesOf() stands. Empty: before the track's first update.
using TrackState = std::vector<Schedule::State>;

// What a push at `now` does by each of SchedulesOf(), whether the track is paused or not. Errors as
// Schedule::Plan(); BAD_TIME also where `now` lacks the unit of the snapshot_interval.
absl::StatusOr<std::vector<Schedule::Update>> PlanTrack(const TrackConfig& track,
                                                        const TrackState& state,
                                                        const TrainingTime& now);
// True if one of them is due.
bool IsDue(absl::Span<const Schedule::Update> updates);
// Where the track stands after `updates`. REQUIRES: these are PlanTrack(track, state, now).
TrackState NextState(const TrackConfig& track, const TrackState& state,
                     absl::Span<const Schedule::Update> updates, const TrainingTime& now);

// The track without the rules that ValidateTrack() refuses as they match no tensor of the manifest.
TrackConfig WithoutIdleRules(TrackConfig track, const Manifest& manifest);

// Such as "half_life=200ba, update_interval=5ba; compensated; head.* ignore; stem.*
// (half_life=10ba, update_interval=5ba)": the schedule and what is not at its default; of many
// rules their number.
std::string TrackText(const TrackConfig& track);

}  // namespace ema

#endif  // EMA_TRACK_H_
