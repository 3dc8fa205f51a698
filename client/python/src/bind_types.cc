// SPDX-License-Identifier: Apache-2.0
//
// Array, Schedule, even_share.
#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "client/python/src/array.h"
#include "client/python/src/bind.h"
#include "client/python/src/convert.h"
#include "client/python/src/python_error.h"
#include "ema/schedule.h"
#include "ema/shard.h"
#include "ema/time.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: the only way to "name"_a.

namespace ema::python {
namespace {

std::optional<TrainingDuration> ParseInterval(const std::optional<std::string>& text) {
  if (!text.has_value()) return std::nullopt;
  return Unwrap(TrainingDuration::Parse(*text));
}

Schedule HalfLife(const std::string& half_life, const std::optional<std::string>& update_interval) {
  const TrainingDuration parsed = Unwrap(TrainingDuration::Parse(half_life));
  return Unwrap(Schedule::Create(HalfLifeRule{parsed}, ParseInterval(update_interval)));
}

Schedule ConstantDecay(double smoothing, const std::optional<std::string>& update_interval) {
  return Unwrap(Schedule::Create(ConstantDecayRule{smoothing}, ParseInterval(update_interval)));
}

Schedule Copy(const std::optional<std::string>& update_interval) {
  return Unwrap(Schedule::Create(CopyRule{}, ParseInterval(update_interval)));
}

// (half_life, smoothing, update_interval), as the factories take them; the first two are absent for
// a copy.
nb::tuple Fields(const Schedule& schedule) {
  nb::object half_life = nb::none();
  nb::object smoothing = nb::none();
  if (const auto* rule = std::get_if<HalfLifeRule>(&schedule.rule())) {
    half_life = nb::cast(rule->half_life.ToString());
  } else if (const auto* constant = std::get_if<ConstantDecayRule>(&schedule.rule())) {
    smoothing = nb::cast(constant->smoothing);
  }
  return nb::make_tuple(half_life, smoothing, schedule.update_interval().ToString());
}

bool IsDue(const Schedule& schedule, const std::optional<nb::dict>& last, const nb::dict& now) {
  Schedule::State state;
  if (last.has_value()) {
    state.update_count = 1;
    state.last_update = ToTime(*last);
  }
  return Unwrap(schedule.Plan(state, ToTime(now))).due;
}

std::vector<ShardTuple> Share(const std::vector<SpecTuple>& specs,
                              const std::vector<std::string>& rank0_only, int64_t rank,
                              int64_t world_size) {
  const Manifest manifest = ToManifest(specs);
  const auto flags = std::make_unique<bool[]>(specs.size());
  for (const std::string& name : rank0_only) {
    if (const auto index = manifest.Find(name)) flags[*index] = true;
  }
  std::vector<ShardTuple> result;
  for (Shard& shard : Unwrap(
           EvenShare(manifest, absl::MakeConstSpan(flags.get(), specs.size()), rank, world_size))) {
    result.emplace_back(shard.tensor_index, std::move(shard.offsets), std::move(shard.extents));
  }
  return result;
}

}  // namespace

void BindTypes(nb::module_& module) {
  nb::class_<Array>(module, "Array")
      .def(
          "__init__",
          [](Array* self, const std::string& name, nb::handle object, const std::string& dtype) {
            new (self) Array(Unwrap(Array::Read(name, object, dtype)));
          },
          "name"_a, "object"_a, "dtype"_a = "")
      .def_prop_ro("spec", [](const Array& array) { return FromSpec(array.spec); });

  nb::class_<Schedule>(module, "Schedule")
      .def_static("half_life", &HalfLife, "half_life"_a, "update_interval"_a = nb::none())
      .def_static("constant_decay", &ConstantDecay, "smoothing"_a, "update_interval"_a = nb::none())
      .def_static("copy", &Copy, "update_interval"_a = nb::none())
      .def("fields", &Fields)
      .def("is_due", &IsDue, "last"_a.none(), "now"_a)
      .def("__str__", &Schedule::ToString);

  module.def("even_share", &Share, "specs"_a, "rank0_only"_a, "rank"_a, "world_size"_a);
}

}  // namespace ema::python
