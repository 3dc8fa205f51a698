// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/convert.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// Says which field of which track a schedule's error is about.
absl::Status Annotate(const absl::Status& status, const std::string& track,
                      const std::string& field) {
  return MakeError(status.code(), GetErrorReason(status),
                   absl::StrCat("track \"", track, "\", ", field, ": ", status.message()));
}

}  // namespace

absl::StatusOr<Manifest> FromProto(const v1::Manifest& manifest) {
  std::vector<TensorSpec> tensors;
  tensors.reserve(manifest.tensors_size());
  for (const v1::TensorSpec& tensor : manifest.tensors()) {
    if (!v1::Dtype_IsValid(tensor.dtype()) || tensor.dtype() == v1::DTYPE_UNSPECIFIED) {
      return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadManifest,
                       absl::StrCat("tensor \"", tensor.name(), "\": dtype ",
                                    static_cast<int>(tensor.dtype()), " is not known"));
    }
    tensors.push_back({tensor.name(),
                       static_cast<Dtype>(tensor.dtype()),
                       {tensor.shape().begin(), tensor.shape().end()}});
  }
  return Manifest::Create(std::move(tensors));
}

absl::StatusOr<TrackConfig> FromProto(const v1::Track& track) {
  const v1::Schedule& schedule = track.schedule();
  Schedule::Rule rule;
  switch (schedule.rule_case()) {
    case v1::Schedule::kHalfLife: {
      auto half_life = TrainingDuration::Parse(schedule.half_life().half_life());
      if (!half_life.ok()) return Annotate(half_life.status(), track.name(), "half_life");
      rule = HalfLifeRule{*half_life};
      break;
    }
    case v1::Schedule::kConstantDecay:
      rule = ConstantDecayRule{schedule.constant_decay().smoothing()};
      break;
    case v1::Schedule::kCopy:
      rule = CopyRule{};
      break;
    case v1::Schedule::RULE_NOT_SET:
      return MakeError(
          absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
          absl::StrCat("track \"", track.name(),
                       "\": schedule has no rule; set half_life, constant_decay or copy"));
  }
  std::optional<TrainingDuration> interval;
  if (!schedule.update_interval().empty()) {
    auto parsed = TrainingDuration::Parse(schedule.update_interval());
    if (!parsed.ok()) return Annotate(parsed.status(), track.name(), "update_interval");
    interval = *parsed;
  }
  auto created = Schedule::Create(rule, interval);
  if (!created.ok()) return Annotate(created.status(), track.name(), "schedule");
  return TrackConfig{track.name(), *std::move(created)};
}

absl::StatusOr<ModelConfig> FromProto(const v1::CreateModelRequest& request,
                                      int64_t default_max_pinned_versions) {
  EMA_ASSIGN_OR_RETURN(Manifest manifest, FromProto(request.manifest()));
  // A pull begins with a header that lists every tensor with its place, in one message.
  constexpr size_t kPlaceBytes = 24;
  constexpr size_t kMaxHeaderBytes = (8 << 20) - (64 << 10);
  const size_t header_bytes = request.manifest().ByteSizeLong() +
                              kPlaceBytes * static_cast<size_t>(request.manifest().tensors_size());
  if (header_bytes > kMaxHeaderBytes) {
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadManifest,
                     absl::StrCat("manifest: ", manifest.tensor_count(), " tensors take ",
                                  header_bytes, " bytes in the header of a pull, expected at most ",
                                  kMaxHeaderBytes, "; use shorter names or several models"));
  }
  ModelConfig config;
  config.name = request.model();
  config.manifest = std::make_shared<const Manifest>(std::move(manifest));
  for (const v1::Track& track : request.tracks()) {
    EMA_ASSIGN_OR_RETURN(TrackConfig track_config, FromProto(track));
    config.tracks.push_back(std::move(track_config));
  }
  config.max_pinned_versions = request.max_pinned_versions() != 0 ? request.max_pinned_versions()
                                                                  : default_max_pinned_versions;
  return config;
}

TrainingTime FromProto(const v1::TrainingTime& time) {
  TrainingTime result;
  if (time.has_batch()) result.Set(TimeUnit::kBatch, static_cast<double>(time.batch()));
  if (time.has_epoch()) result.Set(TimeUnit::kEpoch, static_cast<double>(time.epoch()));
  if (time.has_sample()) result.Set(TimeUnit::kSample, static_cast<double>(time.sample()));
  if (time.has_token()) result.Set(TimeUnit::kToken, static_cast<double>(time.token()));
  if (time.has_iteration()) result.Set(TimeUnit::kIteration, static_cast<double>(time.iteration()));
  if (time.has_progress()) result.Set(TimeUnit::kProgress, time.progress());
  if (time.has_seconds()) result.Set(TimeUnit::kSecond, time.seconds());
  return result;
}

std::vector<Shard> FromProto(const v1::RankLayout& layout) {
  std::vector<Shard> shards;
  shards.reserve(layout.shards_size());
  for (const v1::Shard& shard : layout.shards()) {
    shards.push_back({shard.tensor_index(),
                      {shard.offsets().begin(), shard.offsets().end()},
                      {shard.extents().begin(), shard.extents().end()}});
  }
  return shards;
}

v1::Manifest ToProto(const Manifest& manifest) {
  v1::Manifest proto;
  for (const TensorSpec& tensor : manifest.tensors()) {
    v1::TensorSpec* const spec = proto.add_tensors();
    spec->set_name(tensor.name);
    spec->set_dtype(static_cast<v1::Dtype>(tensor.dtype));
    spec->mutable_shape()->Assign(tensor.shape.begin(), tensor.shape.end());
  }
  return proto;
}

v1::Track ToProto(const TrackConfig& track) {
  v1::Track proto;
  proto.set_name(track.name);
  v1::Schedule& schedule = *proto.mutable_schedule();
  if (const auto* half_life = std::get_if<HalfLifeRule>(&track.schedule.rule())) {
    schedule.mutable_half_life()->set_half_life(half_life->half_life.ToString());
  } else if (const auto* decay = std::get_if<ConstantDecayRule>(&track.schedule.rule())) {
    schedule.mutable_constant_decay()->set_smoothing(decay->smoothing);
  } else {
    schedule.mutable_copy();
  }
  if (const TrainingDuration interval = track.schedule.update_interval(); interval.value > 0) {
    schedule.set_update_interval(interval.ToString());
  }
  return proto;
}

v1::TrainingTime ToProto(const TrainingTime& time) {
  v1::TrainingTime proto;
  const auto count = [&](TimeUnit unit) { return static_cast<int64_t>(*time.Get(unit)); };
  if (time.Get(TimeUnit::kBatch)) proto.set_batch(count(TimeUnit::kBatch));
  if (time.Get(TimeUnit::kEpoch)) proto.set_epoch(count(TimeUnit::kEpoch));
  if (time.Get(TimeUnit::kSample)) proto.set_sample(count(TimeUnit::kSample));
  if (time.Get(TimeUnit::kToken)) proto.set_token(count(TimeUnit::kToken));
  if (time.Get(TimeUnit::kIteration)) proto.set_iteration(count(TimeUnit::kIteration));
  if (auto progress = time.Get(TimeUnit::kProgress)) proto.set_progress(*progress);
  if (auto seconds = time.Get(TimeUnit::kSecond)) proto.set_seconds(*seconds);
  return proto;
}

v1::VersionRecord ToProto(const VersionRecord& record, const std::vector<Track>& tracks) {
  v1::VersionRecord proto;
  proto.set_incarnation(record.incarnation);
  proto.set_version(record.version);
  proto.set_step(record.step);
  *proto.mutable_time() = ToProto(record.time);
  proto.set_run_epoch(record.run_epoch);
  for (size_t t = 0; t < record.tracks.size(); ++t) {
    const TrackRecord& track = record.tracks[t];
    v1::TrackRecord* const out = proto.add_tracks();
    out->set_track(tracks[t].name());
    out->set_updated(track.updated);
    out->set_update_weight(track.update_weight);
    out->set_elapsed(track.elapsed);
    out->set_update_count(track.update_count);
  }
  proto.set_commit_time_us(absl::ToUnixMicros(record.commit_time));
  return proto;
}

v1::Model ToProto(const Model& model, bool with_manifest) {
  v1::Model proto;
  proto.set_name(model.config().name);
  if (with_manifest) *proto.mutable_manifest() = ToProto(model.manifest());
  proto.set_manifest_digest(model.manifest().digest());
  for (const TrackConfig& track : model.config().tracks) *proto.add_tracks() = ToProto(track);
  proto.set_max_pinned_versions(model.config().max_pinned_versions);
  proto.set_reserved_bytes(model.reserved_bytes());
  v1::Partition* const partition = proto.add_partitions();
  partition->set_tensor_count(model.manifest().tensor_count());
  if (const auto latest = model.latest())
    *proto.mutable_latest() = ToProto(*latest, model.tracks());
  proto.set_run_epoch(model.run_epoch());
  return proto;
}

}  // namespace ema
