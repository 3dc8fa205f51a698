// SPDX-License-Identifier: Apache-2.0
#include "server/wire/convert_types.h"

#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

using ScheduleProto = google::protobuf::Map<std::string, std::string>;

absl::StatusOr<Schedule> FromProto(const ScheduleProto& proto) {
  return Schedule::FromFields({proto.begin(), proto.end()});
}

void ToProto(const Schedule& schedule, ScheduleProto* proto) {
  for (auto& [name, text] : schedule.ToFields()) (*proto)[name] = std::move(text);
  // ToFields() omits a default interval, but a tensor rule without one gets the track's. An
  // interval of 0 (at every push) has no text, and is always the default.
  if (const TrainingDuration interval = schedule.update_interval(); interval.value > 0) {
    (*proto)["update_interval"] = interval.ToString();
  }
}

absl::StatusOr<TensorAction> FromProto(v1::TensorAction action, std::string_view what) {
  switch (action) {
    case v1::TENSOR_ACTION_UNSPECIFIED:
    case v1::TENSOR_ACTION_AVERAGE:
      return TensorAction::kAverage;
    case v1::TENSOR_ACTION_COPY:
      return TensorAction::kCopy;
    case v1::TENSOR_ACTION_IGNORE:
      return TensorAction::kIgnore;
    default:
      return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
                       absl::StrCat(std::string(what), ": action ", static_cast<int>(action),
                                    " is not known; there are AVERAGE, COPY, IGNORE"));
  }
}

v1::TensorAction ActionToProto(TensorAction action) {
  switch (action) {
    case TensorAction::kAverage:
      return v1::TENSOR_ACTION_AVERAGE;
    case TensorAction::kCopy:
      return v1::TENSOR_ACTION_COPY;
    case TensorAction::kIgnore:
      break;
  }
  return v1::TENSOR_ACTION_IGNORE;
}

int64_t Whole(double value) { return static_cast<int64_t>(std::llround(value)); }

TrackVersion FromProto(const v1::TrackRecord& proto) {
  TrackVersion track{.track = proto.track(),
                     .updated = proto.updated(),
                     .update_weight = proto.update_weight(),
                     .elapsed = proto.elapsed(),
                     .update_count = proto.update_count(),
                     .averaged_count = proto.averaged_count(),
                     .window_steps = proto.window_steps(),
                     .config = proto.config(),
                     .stall_gap = proto.stall_gap(),
                     .rules = {}};
  for (const v1::TrackRecord& rule : proto.rules()) track.rules.push_back(FromProto(rule));
  return track;
}

void ToProto(const TrackVersion& track, v1::TrackRecord* proto) {
  proto->set_track(track.track);
  proto->set_updated(track.updated);
  proto->set_update_weight(track.update_weight);
  proto->set_elapsed(track.elapsed);
  proto->set_update_count(track.update_count);
  proto->set_averaged_count(track.averaged_count);
  proto->set_window_steps(track.window_steps);
  proto->set_config(track.config);
  proto->set_stall_gap(track.stall_gap);
  for (const TrackVersion& rule : track.rules) ToProto(rule, proto->add_rules());
}

}  // namespace

absl::Status ErrorFromDetail(absl::StatusCode code, std::string_view message,
                             const v1::ErrorDetail& detail) {
  absl::Status error = MakeError(code, static_cast<ErrorReason>(detail.reason()), message);
  if (detail.retry_delay_ms() > 0) {
    SetRetryDelay(error, absl::Milliseconds(detail.retry_delay_ms()));
  }
  SetGroupHint(
      error, {.home = detail.home(), .round = detail.round(), .incarnation = detail.incarnation()});
  return error;
}

absl::Status ErrorFromDetail(const grpc::Status& status, std::string_view detail) {
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  v1::ErrorDetail parsed;
  if (!parsed.ParseFromArray(detail.data(), static_cast<int>(detail.size()))) {
    return absl::Status(code, status.error_message());
  }
  return ErrorFromDetail(code, status.error_message(), parsed);
}

absl::StatusOr<TensorSpec> FromProto(const v1::TensorSpec& proto) {
  if (!v1::Dtype_IsValid(proto.dtype()) || proto.dtype() == v1::DTYPE_UNSPECIFIED) {
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadManifest,
                     absl::StrCat("tensor \"", proto.name(), "\": dtype ",
                                  static_cast<int>(proto.dtype()), " is not known; expected 1 to ",
                                  static_cast<int>(v1::Dtype_MAX), ", such as 1 (float32)"));
  }
  return TensorSpec{.name = proto.name(),
                    .dtype = static_cast<Dtype>(proto.dtype()),
                    .shape = {proto.shape().begin(), proto.shape().end()},
                    .is_buffer = proto.is_buffer(),
                    .aliases = {proto.aliases().begin(), proto.aliases().end()}};
}

absl::StatusOr<Manifest> FromProto(const v1::Manifest& proto) {
  // First: a message of a few MiB can hold millions of empty ones.
  EMA_RETURN_IF_ERROR(Manifest::CheckCount(proto.tensors_size()));
  std::vector<TensorSpec> tensors;
  tensors.reserve(proto.tensors_size());
  for (const v1::TensorSpec& tensor : proto.tensors()) {
    EMA_ASSIGN_OR_RETURN(TensorSpec spec, FromProto(tensor));
    tensors.push_back(std::move(spec));
  }
  return Manifest::Create(std::move(tensors));
}

absl::StatusOr<TrackConfig> FromProto(const v1::Track& proto) {
  const std::string what = absl::StrCat("track \"", proto.name(), "\"");
  absl::StatusOr<Schedule> schedule = FromProto(proto.schedule());
  if (!schedule.ok()) return WithPrefix(schedule.status(), absl::StrCat(what, ": "));
  TrackConfig track{.name = proto.name(), .schedule = *std::move(schedule)};
  for (const v1::TensorRule& rule : proto.tensor_rules()) {
    EMA_ASSIGN_OR_RETURN(
        const TensorAction action,
        FromProto(rule.action(), absl::StrCat(what, ", tensor_rules \"", rule.pattern(), "\"")));
    track.tensor_rules.push_back({rule.pattern(), action});
    if (rule.schedule().empty()) continue;
    schedule = FromProto(rule.schedule());
    if (schedule.ok()) schedule = RuleSchedule(*schedule, track.schedule);
    if (!schedule.ok()) {
      return WithPrefix(schedule.status(),
                        absl::StrCat(what, ", tensor_rules \"", rule.pattern(), "\": "));
    }
    track.tensor_rules.back().schedule = *std::move(schedule);
  }
  EMA_ASSIGN_OR_RETURN(track.buffers, FromProto(proto.buffers(), absl::StrCat(what, ", buffers")));
  if (proto.dtype() != v1::DTYPE_UNSPECIFIED) track.dtype = static_cast<Dtype>(proto.dtype());
  track.paused = proto.paused();
  if (!proto.snapshot_interval().empty()) {
    absl::StatusOr<TrainingDuration> interval = TrainingDuration::Parse(proto.snapshot_interval());
    if (!interval.ok()) {
      return WithPrefix(interval.status(), absl::StrCat(what, ": snapshot_interval "));
    }
    track.snapshot_interval = *interval;
  }
  return track;
}

TrainingTime FromProto(const v1::TrainingTime& proto) {
  TrainingTime time;
  const auto set = [&time](TimeUnit unit, int64_t count) {
    time.Set(unit, static_cast<double>(count));
  };
  if (proto.has_batch()) set(TimeUnit::kBatch, proto.batch());
  if (proto.has_epoch()) set(TimeUnit::kEpoch, proto.epoch());
  if (proto.has_sample()) set(TimeUnit::kSample, proto.sample());
  if (proto.has_token()) set(TimeUnit::kToken, proto.token());
  if (proto.has_iteration()) set(TimeUnit::kIteration, proto.iteration());
  if (proto.has_progress()) time.Set(TimeUnit::kProgress, proto.progress());
  if (proto.has_seconds()) time.Set(TimeUnit::kSecond, proto.seconds());
  return time;
}

Schedule::State FromProto(const v1::ScheduleState& proto) {
  Schedule::State state;
  state.update_count = proto.update_count();
  state.averaged_count = proto.averaged_count();
  if (proto.has_last_update()) state.last_update = FromProto(proto.last_update());
  if (proto.has_started()) state.started = FromProto(proto.started());
  return state;
}

TrackStatistics FromProto(const v1::TrackStatistics& proto) {
  TrackStatistics statistics{.track = proto.track(), .norm = proto.norm()};
  if (proto.has_distance()) statistics.distance = proto.distance();
  return statistics;
}

Version FromProto(const v1::VersionRecord& proto) {
  Version version;
  version.incarnation = proto.incarnation();
  version.number = proto.version();
  version.step = proto.step();
  version.time = FromProto(proto.time());
  version.run_epoch = proto.run_epoch();
  version.commit_time = absl::FromUnixMicros(proto.commit_time_us());
  version.tracks.reserve(proto.tracks_size());
  for (const v1::TrackRecord& track : proto.tracks()) version.tracks.push_back(FromProto(track));
  version.skipped_tensor_count = proto.skipped_tensor_count();
  version.skipped_tensors.assign(proto.skipped_tensors().begin(), proto.skipped_tensors().end());
  version.wire_dtype = static_cast<WireDtype>(proto.wire_dtype());
  if (proto.has_restored_from()) {
    version.restored_from = {proto.restored_from().version(), proto.restored_from().incarnation()};
  }
  for (const v1::TrackStatistics& track : proto.statistics()) {
    version.statistics.push_back(FromProto(track));
  }
  return version;
}

std::vector<Shard> FromProto(const v1::RankLayout& proto) {
  std::vector<Shard> shards;
  shards.reserve(proto.shards_size());
  for (const v1::Shard& shard : proto.shards()) {
    shards.push_back({shard.tensor_index(),
                      {shard.offsets().begin(), shard.offsets().end()},
                      {shard.extents().begin(), shard.extents().end()}});
  }
  return shards;
}

absl::StatusOr<Selection> FromProto(const v1::Selection& proto) {
  Selection selection{.tensors = {proto.tensors().begin(), proto.tensors().end()},
                      .slices = {},
                      .dtype = std::nullopt,
                      .overflow = OverflowPolicy::kError};
  selection.slices.reserve(proto.slices_size());
  for (const v1::TensorSlice& slice : proto.slices()) {
    selection.slices.push_back({slice.tensor(),
                                {slice.offsets().begin(), slice.offsets().end()},
                                {slice.extents().begin(), slice.extents().end()}});
  }
  if (!v1::Dtype_IsValid(proto.dtype())) {
    return BadRequest(absl::StrCat("dtype: unknown value ", static_cast<int>(proto.dtype()),
                                   "; expected float32, float16 or bfloat16"));
  }
  if (proto.dtype() != v1::DTYPE_UNSPECIFIED) selection.dtype = static_cast<Dtype>(proto.dtype());
  if (!v1::OverflowPolicy_IsValid(proto.overflow())) {
    return BadRequest(absl::StrCat("overflow: unknown value ", static_cast<int>(proto.overflow()),
                                   "; expected 0 to ", v1::OverflowPolicy_MAX));
  }
  selection.overflow = static_cast<OverflowPolicy>(proto.overflow());
  return selection;
}

void ToProto(const TensorSpec& spec, v1::TensorSpec* proto) {
  proto->set_name(spec.name);
  proto->set_dtype(static_cast<v1::Dtype>(spec.dtype));
  proto->mutable_shape()->Assign(spec.shape.begin(), spec.shape.end());
  proto->set_is_buffer(spec.is_buffer);
  proto->mutable_aliases()->Assign(spec.aliases.begin(), spec.aliases.end());
}

void ToProto(const Manifest& manifest, v1::Manifest* proto) {
  proto->mutable_tensors()->Reserve(static_cast<int>(manifest.tensor_count()));
  for (const TensorSpec& spec : manifest.tensors()) ToProto(spec, proto->add_tensors());
}

void ToProto(const TrackConfig& track, v1::Track* proto) {
  proto->set_name(track.name);
  ToProto(track.schedule, proto->mutable_schedule());
  for (const TensorRule& rule : track.tensor_rules) {
    v1::TensorRule* const out = proto->add_tensor_rules();
    out->set_pattern(rule.pattern);
    out->set_action(ActionToProto(rule.action));
    if (rule.schedule.has_value()) ToProto(*rule.schedule, out->mutable_schedule());
  }
  proto->set_buffers(ActionToProto(track.buffers));
  proto->set_dtype(static_cast<v1::Dtype>(track.dtype));
  proto->set_paused(track.paused);
  if (track.snapshot_interval.has_value()) {
    proto->set_snapshot_interval(track.snapshot_interval->ToString());
  }
}

void ToProto(const TrainingTime& time, v1::TrainingTime* proto) {
  if (auto value = time.Get(TimeUnit::kBatch)) proto->set_batch(Whole(*value));
  if (auto value = time.Get(TimeUnit::kEpoch)) proto->set_epoch(Whole(*value));
  if (auto value = time.Get(TimeUnit::kSample)) proto->set_sample(Whole(*value));
  if (auto value = time.Get(TimeUnit::kToken)) proto->set_token(Whole(*value));
  if (auto value = time.Get(TimeUnit::kIteration)) proto->set_iteration(Whole(*value));
  if (auto value = time.Get(TimeUnit::kProgress)) proto->set_progress(*value);
  if (auto value = time.Get(TimeUnit::kSecond)) proto->set_seconds(*value);
}

void ToProto(const Schedule::State& state, v1::ScheduleState* proto) {
  proto->set_update_count(state.update_count);
  proto->set_averaged_count(state.averaged_count);
  if (state.last_update.has_value()) ToProto(*state.last_update, proto->mutable_last_update());
  if (state.started.has_value()) ToProto(*state.started, proto->mutable_started());
}

void ToProto(const TrackStatistics& statistics, v1::TrackStatistics* proto) {
  proto->set_track(statistics.track);
  proto->set_norm(statistics.norm);
  if (statistics.distance.has_value()) proto->set_distance(*statistics.distance);
}

v1::VersionRecord ToProto(const Version& version) {
  v1::VersionRecord proto;
  proto.set_incarnation(version.incarnation);
  proto.set_version(version.number);
  proto.set_step(version.step);
  ToProto(version.time, proto.mutable_time());
  proto.set_run_epoch(version.run_epoch);
  for (const TrackVersion& track : version.tracks) ToProto(track, proto.add_tracks());
  proto.set_commit_time_us(absl::ToUnixMicros(version.commit_time));
  proto.set_skipped_tensor_count(version.skipped_tensor_count);
  for (const std::string& tensor : version.skipped_tensors) proto.add_skipped_tensors(tensor);
  proto.set_wire_dtype(static_cast<v1::WireDtype>(version.wire_dtype));
  if (version.restored_from.has_value()) {
    proto.mutable_restored_from()->set_version(version.restored_from->version);
    proto.mutable_restored_from()->set_incarnation(version.restored_from->incarnation);
  }
  for (const TrackStatistics& track : version.statistics) ToProto(track, proto.add_statistics());
  return proto;
}

void ToProto(const RankLayout& layout, v1::RankLayout* proto) {
  const absl::Span<const Shard> shards = layout.shards();
  proto->set_frozen_shard_count(static_cast<int64_t>(layout.frozen_shards().size()));
  proto->set_wire_dtype(static_cast<v1::WireDtype>(layout.wire_dtype()));
  proto->mutable_shards()->Reserve(static_cast<int>(shards.size()));
  for (const Shard& shard : shards) {
    v1::Shard* const out = proto->add_shards();
    out->set_tensor_index(shard.tensor_index);
    out->mutable_offsets()->Assign(shard.offsets.begin(), shard.offsets.end());
    out->mutable_extents()->Assign(shard.extents.begin(), shard.extents.end());
  }
}

void ToProto(const Selection& selection, v1::Selection* proto) {
  for (const std::string& tensor : selection.tensors) proto->add_tensors(tensor);
  for (const TensorSlice& slice : selection.slices) {
    v1::TensorSlice* const out = proto->add_slices();
    out->set_tensor(slice.tensor);
    out->mutable_offsets()->Assign(slice.offsets.begin(), slice.offsets.end());
    out->mutable_extents()->Assign(slice.extents.begin(), slice.extents.end());
  }
  if (selection.dtype.has_value()) proto->set_dtype(static_cast<v1::Dtype>(*selection.dtype));
  proto->set_overflow(static_cast<v1::OverflowPolicy>(selection.overflow));
}

}  // namespace ema
