// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/convert.h"

#include <cmath>
#include <iterator>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/python/src/python_error.h"
#include "ema/error_reason.h"

namespace nb = nanobind;

namespace ema::python {
namespace {

nb::str FromText(std::string_view text) { return nb::str(text.data(), text.size()); }

}  // namespace

nb::dict FromTime(const TrainingTime& time) {
  nb::dict result;
  for (int i = 0; i < kTimeUnitCount; ++i) {
    const TimeUnit unit = static_cast<TimeUnit>(i);
    const std::optional<double> value = time.Get(unit);
    if (!value.has_value()) continue;
    const nb::str field = FromText(TimeUnitField(unit));
    if (IsCounted(unit)) {
      result[field] = static_cast<int64_t>(*value);
    } else {
      result[field] = *value;
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
    for (int i = 0; i < kTimeUnitCount; ++i) {
      const TimeUnit unit = static_cast<TimeUnit>(i);
      if (name != TimeUnitField(unit)) continue;
      is_known = true;
      if (is_right) result.Set(unit, number);
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

// By name; of tensor rules by pattern.
nb::dict FromTrackVersions(const std::vector<TrackVersion>& tracks) {
  nb::dict result;
  for (const TrackVersion& track : tracks) {
    result[FromText(track.track)] =
        nb::make_tuple(track.updated, track.update_weight, track.elapsed, track.update_count,
                       track.averaged_count, track.window_steps, FromText(track.config),
                       track.stall_gap, FromTrackVersions(track.rules));
  }
  return result;
}

nb::dict FromVersion(const Version& version) {
  nb::dict result;
  result["incarnation"] = version.incarnation;
  result["number"] = version.number;
  result["step"] = version.step;
  result["time"] = FromTime(version.time);
  result["run_epoch"] = version.run_epoch;
  result["tracks"] = FromTrackVersions(version.tracks);
  result["commit_time"] = absl::ToDoubleSeconds(version.commit_time - absl::UnixEpoch());
  result["skipped_tensor_count"] = version.skipped_tensor_count;
  result["skipped_tensors"] = nb::cast(version.skipped_tensors);
  result["wire_dtype"] = std::string(WireDtypeName(version.wire_dtype));
  result["restored_from"] =
      version.restored_from.has_value() ? FromVersionId(*version.restored_from) : nb::none();
  nb::dict statistics;
  for (const TrackStatistics& track : version.statistics) {
    statistics[FromText(track.track)] = nb::make_tuple(track.norm, track.distance);
  }
  result["statistics"] = statistics;
  return result;
}

nb::object FromVersionId(const VersionId& id) { return nb::make_tuple(id.version, id.incarnation); }

nb::dict FromCheckpoint(const Client::CheckpointInfo& checkpoint) {
  nb::dict result;
  result["name"] = FromText(checkpoint.name);
  result["state"] = FromText(CheckpointStateName(checkpoint.state));
  result["number"] = checkpoint.id.version;
  result["incarnation"] = checkpoint.id.incarnation;
  result["step"] = checkpoint.step;
  result["commit_time"] = absl::ToDoubleSeconds(checkpoint.commit_time - absl::UnixEpoch());
  result["tracks"] = nb::tuple(nb::cast(checkpoint.tracks));
  result["is_partial"] = checkpoint.is_partial;
  result["total_bytes"] = checkpoint.total_bytes;
  result["labels"] = nb::tuple(nb::cast(checkpoint.labels));
  result["problem"] = FromText(checkpoint.problem);
  return result;
}

nb::dict FromServerInfo(const Client::ServerInfo& info) {
  nb::dict result;
  result["version"] = FromText(info.version);
  result["device"] = FromText(info.device);
  result["incarnation"] = info.incarnation;
  result["start_time"] = absl::ToDoubleSeconds(info.start_time - absl::UnixEpoch());
  result["not_serving"] = FromText(info.not_serving);
  result["memory_budget_bytes"] = info.memory_budget_bytes;
  result["memory_reserved_bytes"] = info.memory_reserved_bytes;
  result["memory_used_bytes"] = info.memory_used_bytes;
  nb::dict limits;
  for (const Client::ServerInfo::Limit& limit : info.limits) {
    limits[FromText(limit.name)] = nb::make_tuple(limit.in_use, limit.limit);
  }
  result["limits"] = limits;
  return result;
}

nb::dict FromLabel(const Client::Label& label) {
  nb::dict result;
  result["name"] = FromText(label.name);
  result["number"] = label.id.version;
  result["incarnation"] = label.id.incarnation;
  result["step"] = label.step;
  result["metric"] = label.metric.has_value() ? nb::object(nb::float_(*label.metric)) : nb::none();
  result["lower_is_better"] = label.lower_is_better;
  return result;
}

nb::dict FromModel(const ModelInfo& model) {
  nb::list tensors;
  for (const TensorSpec& spec : model.manifest.tensors()) tensors.append(nb::cast(FromSpec(spec)));
  const auto from_tracks = [](const std::vector<TrackConfig>& tracks) {
    nb::list result;
    for (const TrackConfig& track : tracks) result.append(nb::cast(track));
    return result;
  };
  nb::dict result;
  result["name"] = FromText(model.name);
  result["tensors"] = tensors;
  result["tracks"] = from_tracks(model.tracks);
  result["pending_tracks"] = from_tracks(model.pending_tracks.value_or(std::vector<TrackConfig>()));
  result["plan_revision"] = model.plan_revision;
  result["non_finite"] = FromText(NonFinitePolicyName(model.non_finite));
  result["max_pinned_versions"] = model.max_pinned_versions;
  result["reserved_bytes"] = model.reserved_bytes;
  result["latest"] = model.latest.has_value() ? nb::object(FromVersion(*model.latest)) : nb::none();
  result["run_epoch"] = model.run_epoch;
  nb::dict files;
  for (const ModelInfo::AttachedFile& file : model.attached_files) {
    files[FromText(file.name)] = file.total_bytes;
  }
  result["attached_files"] = files;
  return result;
}

NonFinitePolicy ToNonFinite(const std::string& name) {
  if (const std::optional<NonFinitePolicy> policy = ParseNonFinitePolicy(name)) return *policy;
  ThrowStatus(BadRequest(absl::StrCat("non_finite: \"", name,
                                      "\" given, expected \"reject\", \"skip\" or \"allow\"")));
}

WireDtype ToWireDtype(const std::string& name) {
  for (const WireDtype dtype : {WireDtype::kAsPushed, WireDtype::kBFloat16}) {
    if (name == WireDtypeName(dtype)) return dtype;
  }
  ThrowStatus(BadRequest(
      absl::StrCat("wire_dtype: \"", name, "\" given, expected \"as pushed\" or \"bfloat16\"")));
}

SpecTuple FromSpec(const TensorSpec& spec) {
  return {spec.name, std::string(DtypeName(spec.dtype)), spec.shape, spec.is_buffer, spec.aliases};
}

Manifest ToManifest(const std::vector<SpecTuple>& specs) {
  std::vector<TensorSpec> tensors;
  tensors.reserve(specs.size());
  for (const auto& [name, dtype, shape, is_buffer, aliases] : specs) {
    const absl::StatusOr<Dtype> parsed = ParseDtype(dtype);
    ThrowIfError(WithPlace(parsed.status(), absl::StrCat("tensor \"", name, "\": ")));
    tensors.push_back({.name = name,
                       .dtype = *parsed,
                       .shape = shape,
                       .is_buffer = is_buffer,
                       .aliases = aliases});
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
