// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/convert_core.h"

#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

absl::StatusOr<NonFinitePolicy> FromProto(v1::NonFinitePolicy policy) {
  switch (policy) {
    case v1::NON_FINITE_POLICY_UNSPECIFIED:
    case v1::NON_FINITE_POLICY_REJECT:
      return NonFinitePolicy::kReject;
    case v1::NON_FINITE_POLICY_SKIP_TENSOR:
      return NonFinitePolicy::kSkipTensor;
    case v1::NON_FINITE_POLICY_ALLOW:
      return NonFinitePolicy::kAllow;
    default:
      return BadRequest(absl::StrCat("non_finite: ", static_cast<int>(policy),
                                     " given, expected REJECT, SKIP_TENSOR or ALLOW"));
  }
}

// Called before they are converted: a message of a few MiB can hold millions of empty ones.
absl::Status CheckCounts(const google::protobuf::RepeatedPtrField<v1::Track>& tracks) {
  EMA_RETURN_IF_ERROR(CheckTrackCount(tracks.size()));
  int64_t rule_count = 0;
  for (const v1::Track& track : tracks) rule_count += track.tensor_rules_size();
  return CheckRuleBytes(rule_count * kBytesPerRule);
}

}  // namespace

absl::StatusOr<ModelConfig> FromProto(const v1::CreateModelRequest& request) {
  constexpr int64_t kDefaultMaxPinnedVersions = 2;
  EMA_ASSIGN_OR_RETURN(Manifest manifest, ema::FromProto(request.manifest()));
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
  EMA_RETURN_IF_ERROR(CheckCounts(request.tracks()));
  ModelConfig config;
  config.name = request.model();
  config.manifest = std::make_shared<const Manifest>(std::move(manifest));
  int64_t rule_bytes = 0;
  for (const v1::Track& track : request.tracks()) {
    EMA_ASSIGN_OR_RETURN(TrackConfig track_config, ema::FromProto(track));
    config.tracks.push_back(std::move(track_config));
    rule_bytes += RuleBytes(config.tracks.back());
  }
  EMA_RETURN_IF_ERROR(CheckRuleBytes(rule_bytes));
  config.max_pinned_versions = request.max_pinned_versions() != 0 ? request.max_pinned_versions()
                                                                  : kDefaultMaxPinnedVersions;
  EMA_ASSIGN_OR_RETURN(config.non_finite, FromProto(request.non_finite()));
  return config;
}

absl::StatusOr<TrackChanges> FromProto(const v1::UpdateModelRequest& request) {
  for (const int count :
       {request.remove_tracks_size(), request.pause_tracks_size(), request.resume_tracks_size()}) {
    // Tracks and synthesized averages can be removed.
    constexpr int64_t kMaxNames = kMaxTracks + static_cast<int64_t>(TrackTable::kMaxSynthesized);
    if (count <= kMaxNames) continue;
    return BadRequest(absl::StrCat("remove_tracks, pause_tracks or resume_tracks: ", count,
                                   " given, expected at most ", kMaxNames));
  }
  TrackChanges changes;
  if (!request.put_tracks().empty()) EMA_RETURN_IF_ERROR(CheckCounts(request.put_tracks()));
  for (const v1::Track& track : request.put_tracks()) {
    EMA_ASSIGN_OR_RETURN(TrackConfig config, ema::FromProto(track));
    changes.put.push_back(std::move(config));
  }
  changes.remove.assign(request.remove_tracks().begin(), request.remove_tracks().end());
  changes.pause.assign(request.pause_tracks().begin(), request.pause_tracks().end());
  changes.resume.assign(request.resume_tracks().begin(), request.resume_tracks().end());
  return changes;
}

absl::StatusOr<SynthesisRequest> FromProto(const v1::SynthesizeRequest& request) {
  SynthesisRequest parsed{.name = request.name(), .step = request.step()};
  parsed.tracks.assign(request.tracks().begin(), request.tracks().end());
  switch (request.profile_case()) {
    case v1::SynthesizeRequest::kSigmaRel:
      parsed.profile = request.sigma_rel();
      return parsed;
    case v1::SynthesizeRequest::kHalfLife: {
      const absl::StatusOr<TrainingDuration> half_life =
          TrainingDuration::Parse(request.half_life());
      if (!half_life.ok()) return WithPrefix(half_life.status(), "half_life ");
      parsed.profile = *half_life;
      return parsed;
    }
    case v1::SynthesizeRequest::PROFILE_NOT_SET:
      break;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
                   "sigma_rel or half_life: one must be given, such as sigma_rel=0.07 or "
                   "half_life=\"1000ba\"");
}

ResumePoint FromProto(const v1::Resume& resume) {
  ResumePoint point{.step = resume.step()};
  if (resume.has_version()) {
    point.version = VersionId{resume.version().version(), resume.version().incarnation()};
  }
  if (resume.has_time()) point.time = ema::FromProto(resume.time());
  return point;
}

absl::StatusOr<uint32_t> ReadChecksum(const std::string& field, int64_t value) {
  if (value < 0 || value > std::numeric_limits<uint32_t>::max()) {
    return BadRequest(absl::StrCat(field, ": ", value, " given, expected 0 to 2^32 - 1"));
  }
  return static_cast<uint32_t>(value);
}

v1::Checkpoint ToProto(const CheckpointInfo& checkpoint) {
  v1::Checkpoint proto;
  proto.set_name(checkpoint.name);
  proto.set_state(static_cast<v1::Checkpoint::State>(checkpoint.state));
  proto.set_incarnation(checkpoint.id.incarnation);
  proto.set_version(checkpoint.id.version);
  proto.set_step(checkpoint.step);
  proto.set_commit_time_us(absl::ToUnixMicros(checkpoint.commit_time));
  proto.mutable_tracks()->Assign(checkpoint.tracks.begin(), checkpoint.tracks.end());
  proto.set_is_partial(checkpoint.is_partial);
  proto.set_total_bytes(checkpoint.total_bytes);
  proto.mutable_labels()->Assign(checkpoint.labels.begin(), checkpoint.labels.end());
  proto.set_problem(checkpoint.problem);
  return proto;
}

v1::Label ToProto(const CheckpointLabel& label) {
  v1::Label proto;
  proto.set_name(label.name);
  proto.set_incarnation(label.id.incarnation);
  proto.set_version(label.id.version);
  proto.set_step(label.step);
  if (label.metric.has_value()) proto.set_metric(*label.metric);
  proto.set_lower_is_better(label.lower_is_better);
  return proto;
}

v1::PushPlan ToProto(const PushPlan& plan, int64_t known_revision) {
  v1::PushPlan proto;
  proto.set_revision(plan.revision);
  proto.set_may_omit_frozen(plan.may_omit_frozen);
  for (const PushPlan::Entry& entry : plan.tracks) {
    v1::PushPlan::Entry* const out = proto.add_tracks();
    if (plan.revision != known_revision) {
      ToProto(entry.track->config(), out->mutable_track());
    }
    for (const Schedule::State& state : entry.state) ToProto(state, out->add_states());
    out->set_track_id(entry.track->id());
  }
  return proto;
}

v1::Model ToProto(const Model& model, bool in_a_list) {
  v1::Model proto;
  const Model::Description now = model.Describe();
  proto.set_name(model.config().name);
  proto.set_manifest_digest(model.manifest().digest());
  for (const TrackRef& track : now.tracks) ToProto(track->config(), proto.add_tracks());
  proto.set_plan_revision(now.plan_revision);
  for (const TrackRef& track : now.pending_tracks) {
    ToProto(track->config(), proto.add_pending_tracks());
  }
  proto.set_max_pinned_versions(model.config().max_pinned_versions);
  proto.set_non_finite(static_cast<v1::NonFinitePolicy>(model.config().non_finite));
  proto.set_reserved_bytes(now.reserved_bytes);
  if (now.latest.has_value()) *proto.mutable_latest() = ToProto(*now.latest);
  proto.set_run_epoch(now.run_epoch);
  if (in_a_list) {
    // A model may have very many of these.
    for (v1::Track& track : *proto.mutable_tracks()) track.clear_tensor_rules();
    for (v1::Track& track : *proto.mutable_pending_tracks()) track.clear_tensor_rules();
    if (proto.has_latest()) {
      for (v1::TrackRecord& track : *proto.mutable_latest()->mutable_tracks()) track.clear_rules();
    }
  } else {
    ToProto(model.manifest(), proto.mutable_manifest());
  }
  for (const auto& file : model.attached_files().files()) {
    v1::AttachedFile* const out = proto.add_attached_files();
    out->set_name(file->name);
    out->set_total_bytes(static_cast<int64_t>(file->bytes.size()));
  }
  return proto;
}

}  // namespace ema
