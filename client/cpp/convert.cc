// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/convert.h"

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/v1/error.pb.h"

namespace ema::client_internal {
namespace {

// What a reply holds was right on the server: an error in it is not the caller's.
absl::Status Malformed(std::string_view what, const absl::Status& error) {
  return MalformedReply(absl::StrCat(std::string(what), ": ", error.message()));
}

absl::StatusOr<Schedule> ScheduleFromProto(const v1::Schedule& proto) {
  std::optional<TrainingDuration> interval;
  if (!proto.update_interval().empty()) {
    EMA_ASSIGN_OR_RETURN(interval, TrainingDuration::Parse(proto.update_interval()));
    // "Every push" has no text that Create() takes; it is the default where it can stand.
    if (interval->value == 0) interval.reset();
  }
  switch (proto.rule_case()) {
    case v1::Schedule::kHalfLife: {
      EMA_ASSIGN_OR_RETURN(const TrainingDuration half_life,
                           TrainingDuration::Parse(proto.half_life().half_life()));
      return Schedule::Create(HalfLifeRule{half_life}, interval);
    }
    case v1::Schedule::kConstantDecay:
      return Schedule::Create(ConstantDecayRule{proto.constant_decay().smoothing()}, interval);
    case v1::Schedule::kCopy:
      return Schedule::Create(CopyRule{}, interval);
    case v1::Schedule::RULE_NOT_SET:
      break;
  }
  return absl::UnimplementedError("a schedule that this client does not know; use a newer client");
}

int64_t Whole(double value) { return static_cast<int64_t>(std::llround(value)); }

}  // namespace

absl::Status ErrorFromDetail(const grpc::Status& status, std::string_view detail) {
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  v1::ErrorDetail parsed;
  if (!parsed.ParseFromArray(detail.data(), static_cast<int>(detail.size()))) {
    return absl::Status(code, status.error_message());
  }
  absl::Status error =
      MakeError(code, static_cast<ErrorReason>(parsed.reason()), status.error_message());
  if (parsed.retry_delay_ms() > 0) {
    SetRetryDelay(error, absl::Milliseconds(parsed.retry_delay_ms()));
  }
  return error;
}

absl::Status MalformedReply(std::string_view what) {
  return absl::InternalError(absl::StrCat("the server's reply is malformed: ", std::string(what)));
}

void ToProto(const Manifest& manifest, v1::Manifest* proto) {
  proto->mutable_tensors()->Reserve(static_cast<int>(manifest.tensor_count()));
  for (const TensorSpec& spec : manifest.tensors()) {
    v1::TensorSpec* const tensor = proto->add_tensors();
    tensor->set_name(spec.name);
    tensor->set_dtype(static_cast<v1::Dtype>(spec.dtype));
    tensor->mutable_shape()->Assign(spec.shape.begin(), spec.shape.end());
  }
}

void ToProto(absl::Span<const Shard> shards, v1::RankLayout* proto) {
  proto->mutable_shards()->Reserve(static_cast<int>(shards.size()));
  for (const Shard& shard : shards) {
    v1::Shard* const added = proto->add_shards();
    added->set_tensor_index(shard.tensor_index);
    added->mutable_offsets()->Assign(shard.offsets.begin(), shard.offsets.end());
    added->mutable_extents()->Assign(shard.extents.begin(), shard.extents.end());
  }
}

void ToProto(const TrackSpec& track, v1::Track* proto) {
  proto->set_name(track.name);
  v1::Schedule* const schedule = proto->mutable_schedule();
  const Schedule::Rule& rule = track.schedule.rule();
  if (const auto* half_life = std::get_if<HalfLifeRule>(&rule)) {
    schedule->mutable_half_life()->set_half_life(half_life->half_life.ToString());
  } else if (const auto* constant = std::get_if<ConstantDecayRule>(&rule)) {
    schedule->mutable_constant_decay()->set_smoothing(constant->smoothing);
  } else {
    schedule->mutable_copy();
  }
  // 0 is a default that has no text of its own.
  const TrainingDuration interval = track.schedule.update_interval();
  if (interval.value > 0) schedule->set_update_interval(interval.ToString());
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

Version FromProto(const v1::VersionRecord& proto) {
  Version version;
  version.incarnation = proto.incarnation();
  version.number = proto.version();
  version.step = proto.step();
  version.time = FromProto(proto.time());
  version.run_epoch = proto.run_epoch();
  version.commit_time = absl::FromUnixMicros(proto.commit_time_us());
  version.tracks.reserve(proto.tracks_size());
  for (const v1::TrackRecord& track : proto.tracks()) {
    version.tracks.push_back({.track = track.track(),
                              .updated = track.updated(),
                              .update_weight = track.update_weight(),
                              .elapsed = track.elapsed(),
                              .update_count = track.update_count()});
  }
  return version;
}

absl::StatusOr<TensorSpec> FromProto(const v1::TensorSpec& proto) {
  if (proto.dtype() == v1::DTYPE_UNSPECIFIED || !v1::Dtype_IsValid(proto.dtype())) {
    return absl::UnimplementedError(absl::StrCat("tensor \"", proto.name(), "\": dtype ",
                                                 static_cast<int>(proto.dtype()),
                                                 " is not known to this client; use a newer one"));
  }
  TensorSpec spec{.name = proto.name(),
                  .dtype = static_cast<Dtype>(proto.dtype()),
                  .shape = {proto.shape().begin(), proto.shape().end()}};
  if (absl::Status status = spec.Validate(); !status.ok()) return Malformed("a tensor", status);
  return spec;
}

absl::StatusOr<TrackSpec> FromProto(const v1::Track& proto) {
  absl::StatusOr<Schedule> schedule = ScheduleFromProto(proto.schedule());
  if (!schedule.ok()) {
    if (schedule.status().code() == absl::StatusCode::kUnimplemented) return schedule.status();
    return Malformed(absl::StrCat("track \"", proto.name(), "\""), schedule.status());
  }
  return TrackSpec{proto.name(), *std::move(schedule)};
}

absl::Status CheckPartitions(const v1::Model& proto) {
  if (proto.partitions_size() == 1 && proto.partitions(0).address().empty() &&
      proto.partitions(0).first_tensor_index() == 0 &&
      proto.partitions(0).tensor_count() == proto.manifest().tensors_size()) {
    return absl::OkStatus();
  }
  return absl::UnimplementedError(
      absl::StrCat("model \"", proto.name(), "\" is spread over ", proto.partitions_size(),
                   " partitions; this client can use a model that lies whole on the server it is "
                   "connected to; use a newer client"));
}

absl::StatusOr<ModelInfo> FromProto(const v1::Model& proto) {
  ModelInfo info;
  info.name = proto.name();
  std::vector<TensorSpec> tensors;
  tensors.reserve(proto.manifest().tensors_size());
  for (const v1::TensorSpec& tensor : proto.manifest().tensors()) {
    EMA_ASSIGN_OR_RETURN(TensorSpec spec, FromProto(tensor));
    tensors.push_back(std::move(spec));
  }
  if (!tensors.empty()) {
    absl::StatusOr<Manifest> manifest = Manifest::Create(std::move(tensors));
    if (!manifest.ok()) return Malformed("the manifest", manifest.status());
    if (manifest->digest() != proto.manifest_digest()) {
      return MalformedReply(absl::StrCat("the manifest's digest is ", manifest->digest(), " here, ",
                                         proto.manifest_digest(), " there"));
    }
    info.manifest = *std::move(manifest);
  }
  for (const v1::Track& track : proto.tracks()) {
    EMA_ASSIGN_OR_RETURN(TrackSpec spec, FromProto(track));
    info.tracks.push_back(std::move(spec));
  }
  info.max_pinned_versions = proto.max_pinned_versions();
  info.reserved_bytes = proto.reserved_bytes();
  if (proto.has_latest()) info.latest = FromProto(proto.latest());
  info.run_epoch = proto.run_epoch();
  return info;
}

absl::StatusOr<PullInfo> FromProto(const v1::PullHeader& proto) {
  PullInfo info;
  info.version = FromProto(proto.version());
  info.total_bytes = proto.total_bytes();
  if (info.total_bytes < 0) return MalformedReply("a negative size");
  info.tensors.reserve(proto.tensors_size());
  int64_t end = 0;
  for (const v1::PullHeader::Tensor& tensor : proto.tensors()) {
    EMA_ASSIGN_OR_RETURN(TensorSpec spec, FromProto(tensor.spec()));
    // Callers cut their memory up by these, so nothing may point outside of it.
    if (tensor.offset() < end || tensor.length_bytes() != spec.byte_count() ||
        tensor.offset() > info.total_bytes ||
        tensor.length_bytes() > info.total_bytes - tensor.offset()) {
      return MalformedReply(absl::StrCat("tensor \"", spec.name, "\" at ", tensor.offset(),
                                         ", length ", tensor.length_bytes(),
                                         ", does not fit the pulled bytes"));
    }
    end = tensor.offset() + tensor.length_bytes();
    info.tensors.push_back({std::move(spec), tensor.offset(), tensor.length_bytes()});
  }
  return info;
}

absl::StatusOr<PushProgress> FromProto(const v1::QueryPushResponse& proto) {
  PushProgress progress;
  switch (proto.state()) {
    case v1::QueryPushResponse::STATE_UNKNOWN:
      progress.state = PushProgress::State::kUnknown;
      break;
    case v1::QueryPushResponse::STATE_OPEN:
      progress.state = PushProgress::State::kOpen;
      break;
    case v1::QueryPushResponse::STATE_COMMITTED:
      progress.state = PushProgress::State::kCommitted;
      break;
    case v1::QueryPushResponse::STATE_ABANDONED:
      progress.state = PushProgress::State::kAbandoned;
      break;
    default:
      return MalformedReply(absl::StrCat("push state ", static_cast<int>(proto.state())));
  }
  if (proto.has_version()) progress.version = FromProto(proto.version());
  if (progress.state == PushProgress::State::kCommitted && !progress.version.has_value()) {
    return MalformedReply("a committed step without its version");
  }
  progress.rank_committed = proto.rank_committed();
  for (const v1::QueryPushResponse::Range& range : proto.missing()) {
    progress.missing.push_back({range.offset(), range.length_bytes()});
  }
  progress.missing_ranks.assign(proto.missing_ranks().begin(), proto.missing_ranks().end());
  return progress;
}

}  // namespace ema::client_internal
