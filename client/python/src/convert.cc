// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/convert.h"

#include <cmath>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/python/src/python_error.h"

namespace nb = nanobind;

namespace ema::python {
namespace {

struct UnitName {
  TimeUnit unit;
  const char* name;
  bool is_count;
};
// The names of ema.v1.TrainingTime.
constexpr UnitName kUnitNames[kTimeUnitCount] = {
    {TimeUnit::kBatch, "batch", true},         {TimeUnit::kEpoch, "epoch", true},
    {TimeUnit::kSample, "sample", true},       {TimeUnit::kToken, "token", true},
    {TimeUnit::kIteration, "iteration", true}, {TimeUnit::kProgress, "progress", false},
    {TimeUnit::kSecond, "seconds", false},
};

nb::str FromText(std::string_view text) { return nb::str(text.data(), text.size()); }

}  // namespace

nb::dict FromTime(const TrainingTime& time) {
  nb::dict result;
  for (const UnitName& unit : kUnitNames) {
    const auto value = time.Get(unit.unit);
    if (!value.has_value()) continue;
    if (unit.is_count) {
      result[unit.name] = static_cast<int64_t>(*value);
    } else {
      result[unit.name] = *value;
    }
  }
  return result;
}

TrainingTime ToTime(const nb::dict& time) {
  TrainingTime result;
  for (const auto& [key, value] : time) {
    std::string name;
    double number = 0;
    const bool is_right =
        nb::try_cast(nb::borrow(key), name) && nb::try_cast(nb::borrow(value), number);
    bool is_known = false;
    for (const UnitName& unit : kUnitNames) {
      if (name != unit.name) continue;
      is_known = true;
      if (is_right) result.Set(unit.unit, number);
    }
    if (!is_known || !is_right) {
      ThrowStatus(MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadTime,
                            absl::StrCat("training time has a number for each of batch, epoch, "
                                         "sample, token, iteration, progress, seconds; not ",
                                         nb::repr(key).c_str(), ": ", nb::repr(value).c_str())));
    }
  }
  return result;
}

nb::dict FromVersion(const Version& version) {
  nb::dict tracks;
  for (const TrackVersion& track : version.tracks) {
    tracks[FromText(track.track)] =
        nb::make_tuple(track.updated, track.update_weight, track.elapsed, track.update_count);
  }
  nb::dict result;
  result["incarnation"] = version.incarnation;
  result["number"] = version.number;
  result["step"] = version.step;
  result["time"] = FromTime(version.time);
  result["run_epoch"] = version.run_epoch;
  result["tracks"] = tracks;
  result["commit_time"] = absl::ToDoubleSeconds(version.commit_time - absl::UnixEpoch());
  return result;
}

nb::dict FromModel(const ModelInfo& model) {
  nb::list tensors;
  for (const TensorSpec& spec : model.manifest.tensors()) tensors.append(nb::cast(FromSpec(spec)));
  nb::list tracks;
  for (const TrackSpec& track : model.tracks) {
    tracks.append(nb::make_tuple(FromText(track.name), nb::cast(track.schedule)));
  }
  nb::dict result;
  result["name"] = FromText(model.name);
  result["tensors"] = tensors;
  result["tracks"] = tracks;
  result["max_pinned_versions"] = model.max_pinned_versions;
  result["reserved_bytes"] = model.reserved_bytes;
  result["latest"] = model.latest.has_value() ? nb::object(FromVersion(*model.latest)) : nb::none();
  result["run_epoch"] = model.run_epoch;
  return result;
}

SpecTuple FromSpec(const TensorSpec& spec) {
  return {spec.name, std::string(DtypeName(spec.dtype)), spec.shape};
}

Manifest ToManifest(const std::vector<SpecTuple>& specs) {
  std::vector<TensorSpec> tensors;
  tensors.reserve(specs.size());
  for (const auto& [name, dtype, shape] : specs) {
    tensors.push_back({.name = name, .dtype = Unwrap(ParseDtype(dtype)), .shape = shape});
  }
  return Unwrap(Manifest::Create(std::move(tensors)));
}

absl::Duration ToDuration(double seconds) {
  if (std::isnan(seconds) || seconds < 0) {
    throw nb::value_error("a time-out is a number of seconds, 0 or more");
  }
  return absl::Seconds(seconds);
}

}  // namespace ema::python
