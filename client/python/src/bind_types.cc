// SPDX-License-Identifier: Apache-2.0
//
// Array, Schedule, ScheduleState, Track, even_share.
#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/trainer/import_check.h"
#include "client/python/src/array.h"
#include "client/python/src/bind.h"
#include "client/python/src/gil.h"
#include "client/python/src/python_error.h"
#include "client/python/src/python_values.h"
#include "ema/error_reason.h"
#include "ema/schedule.h"
#include "ema/shard.h"
#include "ema/time.h"
#include "ema/track.h"
#include "server/base/crc32c.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: the only way to "name"_a.

namespace ema::python {
namespace {

Schedule FromFields(const nb::dict& dict) {
  Schedule::Fields fields;
  for (const auto& [name, value] : dict) {
    fields.emplace_back(nb::cast<std::string>(name), nb::cast<std::string>(value));
  }
  return Unwrap(Schedule::FromFields(fields));
}

nb::dict ToFields(const Schedule& schedule) {
  nb::dict result;
  for (const auto& [name, value] : schedule.ToFields()) result[nb::cast(name)] = value;
  return result;
}

// By schedule: (due, update_weight, from_zero, elapsed).
std::vector<std::tuple<bool, double, bool, double>> Plan(const TrackConfig& track,
                                                         const TrackState& state,
                                                         const nb::dict& now) {
  std::vector<std::tuple<bool, double, bool, double>> result;
  for (const Schedule::Update& update : Unwrap(PlanTrack(track, state, ToTime(now)))) {
    result.emplace_back(update.due, update.update_weight, update.from_zero, update.elapsed);
  }
  return result;
}

TrackState Next(const TrackConfig& track, const TrackState& state, const nb::dict& now) {
  const TrainingTime time = ToTime(now);
  return NextState(track, state, Unwrap(PlanTrack(track, state, time)), time);
}

// None: absent.
nb::object FromOptionalTime(const std::optional<TrainingTime>& time) {
  if (!time.has_value()) return nb::none();
  return FromTime(*time);
}

std::optional<TrainingTime> ToOptionalTime(const std::optional<nb::dict>& time) {
  if (!time.has_value()) return std::nullopt;
  return ToTime(*time);
}

std::string FromAction(TensorAction action) { return std::string(TensorActionName(action)); }

TensorAction ToAction(const std::string& track, const std::string& what, const std::string& name,
                      const char* expected) {
  if (const std::optional<TensorAction> action = ParseTensorAction(name)) return *action;
  ThrowStatus(MakeError(
      absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
      absl::StrCat("track \"", track, "\": ", what, " \"", name, "\": must be ", expected)));
}

// Pattern, action, schedule.
using RuleTuple = std::tuple<std::string, std::string, std::optional<Schedule>>;

TrackConfig MakeTrack(const std::string& name, const Schedule& schedule,
                      const std::vector<RuleTuple>& tensor_rules, const std::string& buffers,
                      const std::string& dtype, bool paused,
                      const std::optional<std::string>& snapshot_interval) {
  TrackConfig track{.name = name,
                    .schedule = schedule,
                    .tensor_rules = {},
                    .buffers = ToAction(name, "buffers", buffers, R"("average" or "copy")"),
                    .dtype = Unwrap(ParseDtype(dtype)),
                    .paused = paused};
  for (const auto& [pattern, action, rule_schedule] : tensor_rules) {
    track.tensor_rules.push_back(
        {pattern, ToAction(name, absl::StrCat("tensor_rules: ", pattern), action,
                           R"("average", "copy" or "ignore", such as {"head.*": "ignore"})")});
    if (rule_schedule.has_value()) {
      const absl::StatusOr<Schedule> made = RuleSchedule(*rule_schedule, schedule);
      if (!made.ok()) {
        ThrowStatus(WithPrefix(
            made.status(), absl::StrCat("track \"", name, "\": tensor_rules: ", pattern, ": ")));
      }
      track.tensor_rules.back().schedule = *made;
    }
  }
  if (snapshot_interval.has_value()) {
    const absl::StatusOr<TrainingDuration> interval = TrainingDuration::Parse(*snapshot_interval);
    if (!interval.ok()) {
      ThrowStatus(
          WithPrefix(interval.status(), absl::StrCat("track \"", name, "\": snapshot_interval ")));
    }
    track.snapshot_interval = *interval;
  }
  return track;
}

std::vector<RuleTuple> TensorRules(const TrackConfig& track) {
  std::vector<RuleTuple> result;
  for (const TensorRule& rule : track.tensor_rules) {
    result.emplace_back(rule.pattern, FromAction(rule.action), rule.schedule);
  }
  return result;
}

// By tensor: the action, and by which of the track's schedules.
std::vector<std::tuple<std::string, int>> Actions(const TrackConfig& track,
                                                  const std::vector<SpecTuple>& specs) {
  const Manifest manifest = ToManifest(specs);
  const std::vector<TensorAction> actions = ActionsOf(track, manifest);
  const std::vector<int> schedules = ScheduleIndicesOf(track, manifest);
  std::vector<std::tuple<std::string, int>> result;
  for (size_t i = 0; i < actions.size(); ++i) {
    result.emplace_back(FromAction(actions[i]), schedules[i]);
  }
  return result;
}

class TensorFlags {
 public:
  TensorFlags(const Manifest& manifest, const std::vector<std::string>& names)
      : size_(manifest.tensors().size()), flags_(std::make_unique<bool[]>(size_)) {
    for (const std::string& name : names) {
      if (const auto index = manifest.Find(name)) flags_[*index] = true;
    }
  }
  TensorSet set() const { return absl::MakeConstSpan(flags_.get(), size_); }

 private:
  const size_t size_;
  const std::unique_ptr<bool[]> flags_;
};

// The shards, and how many of the last of them are frozen. No boxes: the whole model.
std::tuple<std::vector<ShardTuple>, int64_t> Share(
    const std::vector<SpecTuple>& specs, const std::vector<std::string>& rank0_only,
    const std::vector<std::string>& frozen, int64_t rank, int64_t world_size,
    const std::optional<std::vector<ShardTuple>>& boxes) {
  const Manifest manifest = ToManifest(specs);
  const TensorFlags rank0_flags(manifest, rank0_only);
  const TensorFlags frozen_flags(manifest, frozen);
  RankShare share;
  if (boxes.has_value()) {
    std::vector<Shard> held;
    for (const auto& [index, offsets, extents] : *boxes) held.push_back({index, offsets, extents});
    share =
        Unwrap(EvenShare(manifest, held, rank0_flags.set(), frozen_flags.set(), rank, world_size));
  } else {
    share = Unwrap(EvenShare(manifest, rank0_flags.set(), frozen_flags.set(), rank, world_size));
  }
  std::vector<ShardTuple> shards;
  for (Shard& shard : share.shards) {
    shards.emplace_back(shard.tensor_index, std::move(shard.offsets), std::move(shard.extents));
  }
  return {std::move(shards), share.frozen_shard_count};
}

}  // namespace

void BindTypes(nb::module_& module) {
  nb::class_<Array>(module, "Array")
      .def(
          "__init__",
          [](Array* self, const std::string& name, nb::handle object, const std::string& dtype,
             std::optional<std::vector<int64_t>> offsets, bool may_have_strides) {
            new (self) Array(
                Unwrap(Array::Read(name, object, dtype, std::move(offsets), may_have_strides)));
          },
          "name"_a, "object"_a, "dtype"_a = "", "offsets"_a = nb::none(),
          "may_have_strides"_a = false)
      .def_prop_ro("spec", [](const Array& array) { return FromSpec(array.spec); })
      .def_ro("gpu", &Array::gpu)
      .def_prop_ro("crc32c", [](const Array& array) {
        ThrowIfError(array.CheckOnHost());
        const GilReleased released;
        return Crc32c(0, array.bytes);
      });

  nb::class_<Schedule::State>(module, "ScheduleState")
      .def(nb::init<>())
      .def_static(
          "from_fields",
          [](int64_t update_count, int64_t averaged_count,
             const std::optional<nb::dict>& last_update, const std::optional<nb::dict>& started) {
            return Schedule::State{update_count, averaged_count, ToOptionalTime(last_update),
                                   ToOptionalTime(started)};
          },
          "update_count"_a, "averaged_count"_a, "last_update"_a.none(), "started"_a.none())
      .def_ro("update_count", &Schedule::State::update_count)
      .def_ro("averaged_count", &Schedule::State::averaged_count)
      .def_prop_ro("last_update",
                   [](const Schedule::State& state) { return FromOptionalTime(state.last_update); })
      .def_prop_ro("started",
                   [](const Schedule::State& state) { return FromOptionalTime(state.started); })
      .def(
          "__eq__",
          [](const Schedule::State& self, const Schedule::State& other) { return self == other; },
          nb::is_operator());

  nb::class_<Schedule>(module, "Schedule")
      .def_static("from_fields", &FromFields, "fields"_a)
      .def_static(
          "parse", [](const std::string& text) { return Unwrap(Schedule::Parse(text)); }, "text"_a)
      .def("to_fields", &ToFields)
      .def_prop_ro("is_copy", &Schedule::is_copy)
      .def_prop_ro("kept_weights_count", &Schedule::kept_weights_count)
      .def_prop_ro("update_interval",
                   [](const Schedule& schedule) {
                     const TrainingDuration interval = schedule.update_interval();
                     return interval.value > 0 ? interval.ToString() : std::string();
                   })
      .def(
          "__eq__", [](const Schedule& self, const Schedule& other) { return self == other; },
          nb::is_operator())
      .def("__str__", &Schedule::ToString);

  nb::class_<TrackConfig>(module, "Track")
      .def(
          "__init__",
          [](TrackConfig* self, const std::string& name, const Schedule& schedule,
             const std::vector<RuleTuple>& tensor_rules, const std::string& buffers,
             const std::string& dtype, bool paused,
             const std::optional<std::string>& snapshot_interval) {
            new (self) TrackConfig(
                MakeTrack(name, schedule, tensor_rules, buffers, dtype, paused, snapshot_interval));
          },
          "name"_a, "schedule"_a, "tensor_rules"_a = std::vector<RuleTuple>(),
          "buffers"_a = "average", "dtype"_a = "float32", "paused"_a = false,
          "snapshot_interval"_a = nb::none())
      .def_ro("name", &TrackConfig::name)
      .def_ro("schedule", &TrackConfig::schedule)
      .def_prop_ro("tensor_rules", &TensorRules)
      .def("plan", &Plan, "state"_a, "now"_a)
      .def("next", &Next, "state"_a, "now"_a)
      .def_prop_ro("buffers", [](const TrackConfig& track) { return FromAction(track.buffers); })
      .def_prop_ro("dtype",
                   [](const TrackConfig& track) { return std::string(DtypeName(track.dtype)); })
      .def_ro("paused", &TrackConfig::paused)
      .def_prop_ro("snapshot_interval",
                   [](const TrackConfig& track) -> std::optional<std::string> {
                     if (!track.snapshot_interval.has_value()) return std::nullopt;
                     return track.snapshot_interval->ToString();
                   })
      .def(
          "check",
          [](const TrackConfig& track, const std::vector<SpecTuple>& specs) {
            const Manifest manifest = ToManifest(specs);
            ThrowIfError(ValidateTrack(track, manifest));
            ThrowIfError(CheckRulesMatch(track, manifest));
          },
          "specs"_a)
      .def(
          "without_idle_rules",
          [](const TrackConfig& track, const std::vector<SpecTuple>& specs) {
            return WithoutUnmatchedRules(track, ToManifest(specs));
          },
          "specs"_a)
      .def(
          "check_keeps_first_value",
          [](const TrackConfig& track, const nb::dict& now, int64_t updates) {
            ThrowIfError(CheckCanContinueImport(track, ToTime(now), updates));
          },
          "now"_a, "updates"_a)
      .def("actions", &Actions, "specs"_a)
      .def(
          "__eq__", [](const TrackConfig& self, const TrackConfig& other) { return self == other; },
          nb::is_operator())
      .def("__str__", &TrackText);

  module.def("even_share", &Share, "specs"_a, "rank0_only"_a, "frozen"_a, "rank"_a, "world_size"_a,
             "boxes"_a = nb::none());
}

}  // namespace ema::python
