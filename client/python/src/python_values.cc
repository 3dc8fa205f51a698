// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/python_values.h"

#include <cmath>
#include <iterator>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/python/src/python_error.h"
#include "ema/error_reason.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: the only way to "name"_a.

namespace ema::python {
namespace {

nb::str FromText(std::string_view text) { return nb::str(text.data(), text.size()); }

double UnixSeconds(absl::Time time) { return absl::ToDoubleSeconds(time - absl::UnixEpoch()); }

// A dataclass of ema_client/_client/types.py.
nb::object RecordClass(const char* name) {
  return nb::module_::import_("ema_client._client.types").attr(name);
}

// By name; of tensor rules by pattern.
nb::dict FromTrackVersions(const std::vector<TrackVersion>& tracks) {
  nb::dict result;
  for (const TrackVersion& track : tracks) {
    result[FromText(track.track)] = RecordClass("TrackVersion")(
        track.update_weight, track.elapsed, track.update_count, track.updated, track.averaged_count,
        track.window_steps, track.config, track.stall_gap, FromTrackVersions(track.rules));
  }
  return result;
}

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

nb::object ToRecord(const Version& version, int64_t skipped) {
  nb::dict statistics;
  for (const TrackStatistics& track : version.statistics) {
    statistics[FromText(track.track)] = RecordClass("TrackStatistics")(track.norm, track.distance);
  }
  nb::object restored_from = nb::none();
  if (const auto& id = version.restored_from) {
    restored_from = nb::make_tuple(id->version, id->incarnation);
  }
  return RecordClass("Version")(
      "number"_a = version.number, "step"_a = version.step, "incarnation"_a = version.incarnation,
      "time"_a = RecordClass("TrainingTime")(**FromTime(version.time)),
      "tracks"_a = FromTrackVersions(version.tracks), "run_epoch"_a = version.run_epoch,
      "commit_time"_a = UnixSeconds(version.commit_time), "skipped"_a = skipped,
      "skipped_tensor_count"_a = version.skipped_tensor_count,
      "skipped_tensors"_a = nb::tuple(nb::cast(version.skipped_tensors)),
      "wire_dtype"_a = FromText(WireDtypeName(version.wire_dtype)),
      "restored_from"_a = restored_from, "statistics"_a = statistics);
}

nb::object ToRecord(const Client::ListedVersion& listed) {
  return RecordClass("ListedVersion")(listed.version, listed.available);
}

nb::object ToRecord(const Client::ServerInfo& info) {
  nb::dict limits;
  for (const Client::ServerInfo::Limit& limit : info.limits) {
    limits[FromText(limit.name)] = RecordClass("ServerLimit")(limit.in_use, limit.limit);
  }
  return RecordClass("ServerInfo")(
      "version"_a = info.version, "device"_a = info.device, "incarnation"_a = info.incarnation,
      "start_time"_a = UnixSeconds(info.start_time), "not_serving"_a = info.not_serving,
      "memory_budget_bytes"_a = info.memory_budget_bytes,
      "memory_reserved_bytes"_a = info.memory_reserved_bytes,
      "memory_used_bytes"_a = info.memory_used_bytes, "limits"_a = limits);
}

nb::object ToRecord(const Client::CheckpointResult& result) {
  return RecordClass("Checkpoint")(result.version, result.checkpoint, result.total_bytes,
                                   FromText(CheckpointStateName(result.state)));
}

nb::object ToRecord(const CheckpointInfo& checkpoint) {
  return RecordClass("CheckpointInfo")(
      "name"_a = checkpoint.name, "state"_a = FromText(CheckpointStateName(checkpoint.state)),
      "number"_a = checkpoint.id.version, "incarnation"_a = checkpoint.id.incarnation,
      "step"_a = checkpoint.step, "commit_time"_a = UnixSeconds(checkpoint.commit_time),
      "tracks"_a = nb::tuple(nb::cast(checkpoint.tracks)), "is_partial"_a = checkpoint.is_partial,
      "total_bytes"_a = checkpoint.total_bytes, "labels"_a = nb::tuple(nb::cast(checkpoint.labels)),
      "problem"_a = checkpoint.problem);
}

nb::object ToRecord(const CheckpointLabel& label) {
  return RecordClass("Label")(label.name, label.id.version, label.id.incarnation, label.step,
                              label.metric, label.lower_is_better);
}

nb::object ToRecord(const MetricResult& result) {
  return RecordClass("MetricResult")(result.label, result.moved);
}

nb::object ToRecord(const Synthesis& synthesis) {
  nb::list sources;
  for (const Synthesis::Source& source : synthesis.sources) {
    sources.append(RecordClass("SynthesisSource")(source.track, source.step, source.weight));
  }
  return RecordClass("Synthesis")(synthesis.version, synthesis.residual, nb::tuple(sources));
}

nb::object ToRecord(const PendingPush::Stats& stats) {
  nb::object server_seconds = nb::none();
  if (const auto& time = stats.server_time) {
    nb::dict seconds;
    seconds["receive"] = absl::ToDoubleSeconds(time->receive);
    seconds["fold"] = absl::ToDoubleSeconds(time->fold);
    seconds["wait"] = absl::ToDoubleSeconds(time->wait);
    seconds["commit"] = absl::ToDoubleSeconds(time->commit);
    server_seconds = seconds;
  }
  return RecordClass("PushStats")(stats.total_bytes, stats.sent_bytes, stats.stream_count,
                                  stats.connection_count, absl::ToDoubleSeconds(stats.send_time),
                                  FromText(LaneName(stats.lane)), FromText(stats.lane_reason),
                                  server_seconds);
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

std::vector<Shard> ToShards(const std::vector<ShardTuple>& shards) {
  std::vector<Shard> result;
  result.reserve(shards.size());
  for (const auto& [index, offsets, extents] : shards) result.push_back({index, offsets, extents});
  return result;
}

ResumePoint ToResumePoint(const ResumeTuple& resume) {
  const auto& [step, version, time] = resume;
  ResumePoint point = {.step = step, .version = std::nullopt, .time = std::nullopt};
  if (version.has_value()) point.version = {std::get<0>(*version), std::get<1>(*version)};
  if (time.has_value()) point.time = ToTime(*time);
  return point;
}

std::vector<SpecTuple> SpecsOf(const Manifest& manifest) {
  std::vector<SpecTuple> result;
  for (const TensorSpec& spec : manifest.tensors()) result.push_back(FromSpec(spec));
  return result;
}

Manifest ToManifest(const std::vector<SpecTuple>& specs) {
  std::vector<TensorSpec> tensors;
  tensors.reserve(specs.size());
  for (const auto& [name, dtype, shape, is_buffer, aliases] : specs) {
    const absl::StatusOr<Dtype> parsed = ParseDtype(dtype);
    ThrowIfError(WithPrefix(parsed.status(), absl::StrCat("tensor \"", name, "\": ")));
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
