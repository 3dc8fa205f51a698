// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/convert_replies.h"

#include <algorithm>
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

absl::StatusOr<TensorSpec> CheckedSpec(const v1::TensorSpec& proto) {
  absl::StatusOr<TensorSpec> spec = ema::FromProto(proto);
  if (!spec.ok()) {
    return absl::UnimplementedError(
        absl::StrCat(spec.status().message(), " to this client; use a newer one"));
  }
  if (absl::Status status = spec->Validate(); !status.ok()) return Malformed("a tensor", status);
  return spec;
}

absl::StatusOr<TrackConfig> CheckedTrack(const v1::Track& proto) {
  absl::StatusOr<TrackConfig> track = ema::FromProto(proto);
  if (GetErrorReason(track.status()) == ErrorReason::kBadSchedule) {
    return absl::UnimplementedError(absl::StrCat(track.status().message(), "; use a newer client"));
  }
  if (!track.ok()) return Malformed("a track", track.status());
  return track;
}

absl::StatusOr<CheckpointInfo::State> StateFromProto(v1::Checkpoint::State proto) {
  using State = CheckpointInfo::State;
  switch (proto) {
    case v1::Checkpoint::STATE_SAVING:
      return State::kSaving;
    case v1::Checkpoint::STATE_COMPLETE:
      return State::kComplete;
    case v1::Checkpoint::STATE_FAILED:
      return State::kFailed;
    case v1::Checkpoint::STATE_CORRUPT:
      return State::kCorrupt;
    default:
      return MalformedReply(absl::StrCat("checkpoint state ", static_cast<int>(proto)));
  }
}

}  // namespace

absl::Status ErrorOf(const v1::LaneError& error) {
  return ErrorFromDetail(static_cast<absl::StatusCode>(error.code()), error.message(),
                         error.detail());
}

absl::Status MalformedReply(std::string_view what) {
  return absl::InternalError(absl::StrCat("the server's reply is malformed: ", std::string(what)));
}

absl::StatusOr<ModelInfo> FromProto(const v1::Model& proto) {
  ModelInfo info;
  info.name = proto.name();
  std::vector<TensorSpec> tensors;
  tensors.reserve(proto.manifest().tensors_size());
  for (const v1::TensorSpec& tensor : proto.manifest().tensors()) {
    EMA_ASSIGN_OR_RETURN(TensorSpec spec, CheckedSpec(tensor));
    tensors.push_back(std::move(spec));
  }
  if (!tensors.empty()) {
    absl::StatusOr<Manifest> manifest = Manifest::Create(std::move(tensors));
    if (!manifest.ok()) return Malformed("the manifest", manifest.status());
    if (manifest->digest() != proto.manifest_digest()) {
      return MalformedReply(absl::StrCat("the manifest's digest is ", proto.manifest_digest(),
                                         ", expected ", manifest->digest()));
    }
    info.manifest = *std::move(manifest);
  }
  for (const v1::Track& track : proto.tracks()) {
    EMA_ASSIGN_OR_RETURN(TrackConfig config, CheckedTrack(track));
    info.tracks.push_back(std::move(config));
  }
  for (const v1::Track& track : proto.pending_tracks()) {
    EMA_ASSIGN_OR_RETURN(TrackConfig config, CheckedTrack(track));
    if (!info.pending_tracks.has_value()) info.pending_tracks.emplace();
    info.pending_tracks->push_back(std::move(config));
  }
  info.plan_revision = proto.plan_revision();
  if (proto.non_finite() != v1::NON_FINITE_POLICY_UNSPECIFIED) {
    info.non_finite = static_cast<NonFinitePolicy>(proto.non_finite());
  }
  info.max_pinned_versions = proto.max_pinned_versions();
  info.reserved_bytes = proto.reserved_bytes();
  if (proto.has_latest()) info.latest = FromProto(proto.latest());
  info.run_epoch = proto.run_epoch();
  for (const v1::AttachedFile& file : proto.attached_files()) {
    // Callers make files of these names: none may lead out of its folder.
    if (const absl::Status name = ValidateName("file", file.name()); !name.ok()) {
      return Malformed("an attached file", name);
    }
    info.attached_files.push_back({file.name(), file.total_bytes()});
  }
  return info;
}

absl::StatusOr<RunPlan> FromProto(const v1::PushPlan& proto, const RunPlan& known) {
  RunPlan plan{
      .revision = proto.revision(), .tracks = {}, .may_omit_frozen = proto.may_omit_frozen()};
  for (const v1::PushPlan::Entry& entry : proto.tracks()) {
    const auto before = std::find_if(
        known.tracks.begin(), known.tracks.end(),
        [&](const RunPlan::Entry& other) { return other.track_id == entry.track_id(); });
    const bool is_left_out =
        !entry.has_track() && proto.revision() == known.revision && before != known.tracks.end();
    absl::StatusOr<TrackConfig> track = is_left_out ? before->track : CheckedTrack(entry.track());
    EMA_RETURN_IF_ERROR(track.status());
    TrackState state;
    for (const v1::ScheduleState& schedule : entry.states()) {
      state.push_back(ema::FromProto(schedule));
    }
    plan.tracks.push_back({*std::move(track), std::move(state), entry.track_id()});
  }
  return plan;
}

absl::StatusOr<PullInfo> FromProto(const v1::PullHeader& proto) {
  PullInfo info;
  info.version = FromProto(proto.version());
  info.total_bytes = proto.total_bytes();
  info.not_newer = proto.not_newer();
  if (info.total_bytes < 0) return MalformedReply("a negative size");
  info.tensors.reserve(proto.tensors_size());
  int64_t end = 0;
  for (const v1::PullHeader::Tensor& tensor : proto.tensors()) {
    EMA_ASSIGN_OR_RETURN(TensorSpec spec, CheckedSpec(tensor.spec()));
    // Callers cut their memory up by these, so nothing may point outside of it.
    if (tensor.offset() < end || tensor.length_bytes() != spec.byte_count() ||
        tensor.offset() > info.total_bytes ||
        tensor.length_bytes() > info.total_bytes - tensor.offset()) {
      return MalformedReply(absl::StrCat("tensor \"", spec.name, "\" at ", tensor.offset(),
                                         ", length ", tensor.length_bytes(),
                                         ", does not fit the pulled bytes"));
    }
    end = tensor.offset() + tensor.length_bytes();
    info.tensors.push_back({std::move(spec),
                            tensor.offset(),
                            tensor.length_bytes(),
                            {tensor.slice_offsets().begin(), tensor.slice_offsets().end()}});
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
  EMA_ASSIGN_OR_RETURN(progress.plan, FromProto(proto.plan()));
  if (proto.has_digest()) progress.digest = static_cast<uint32_t>(proto.digest());
  progress.rank_committed = proto.rank_committed();
  for (const v1::QueryPushResponse::Range& range : proto.missing()) {
    progress.missing.push_back({range.offset(), range.length_bytes()});
  }
  progress.missing_ranks.assign(proto.missing_ranks().begin(), proto.missing_ranks().end());
  return progress;
}

absl::StatusOr<CheckpointInfo> FromProto(const v1::Checkpoint& proto) {
  EMA_ASSIGN_OR_RETURN(const CheckpointInfo::State state, StateFromProto(proto.state()));
  return CheckpointInfo{.name = proto.name(),
                        .state = state,
                        .id = {proto.version(), proto.incarnation()},
                        .step = proto.step(),
                        .commit_time = absl::FromUnixMicros(proto.commit_time_us()),
                        .tracks = {proto.tracks().begin(), proto.tracks().end()},
                        .is_partial = proto.is_partial(),
                        .total_bytes = proto.total_bytes(),
                        .labels = {proto.labels().begin(), proto.labels().end()},
                        .problem = proto.problem()};
}

CheckpointLabel FromProto(const v1::Label& proto) {
  CheckpointLabel label{.name = proto.name(),
                        .id = {proto.version(), proto.incarnation()},
                        .step = proto.step(),
                        .metric = std::nullopt,
                        .lower_is_better = proto.lower_is_better()};
  if (proto.has_metric()) label.metric = proto.metric();
  return label;
}

}  // namespace ema::client_internal
