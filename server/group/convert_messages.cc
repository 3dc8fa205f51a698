// SPDX-License-Identifier: Apache-2.0
#include "server/group/convert_messages.h"

#include <span>

#include "ema/error_reason.h"
#include "ema/v1/types.pb.h"
#include "server/base/crc32c.h"
#include "server/wire/convert_types.h"

namespace ema::group {
namespace {

void ToProto(const PreparedStep& step, v1::PreparedStep* proto) {
  proto->set_step(step.step);
  proto->set_run_epoch(step.run_epoch);
  proto->set_plan_digest(step.plan_digest);
  proto->set_skipped_tensor_count(step.skipped_tensor_count);
  proto->mutable_skipped_tensors()->Assign(step.skipped_tensors.begin(),
                                           step.skipped_tensors.end());
}

PreparedStep FromProto(const v1::PreparedStep& proto) {
  return {.step = proto.step(),
          .run_epoch = proto.run_epoch(),
          .plan_digest = proto.plan_digest(),
          .skipped_tensor_count = proto.skipped_tensor_count(),
          .skipped_tensors = {proto.skipped_tensors().begin(), proto.skipped_tensors().end()}};
}

void ToProto(const absl::Status& error, v1::GroupError* proto) {
  proto->set_code(static_cast<int>(error.code()));
  proto->set_message(std::string(error.message()));
  proto->set_reason(static_cast<v1::ErrorReason>(GetErrorReason(error)));
}

absl::Status FromProto(const v1::GroupError& proto) {
  absl::StatusCode code = static_cast<absl::StatusCode>(proto.code());
  if (code == absl::StatusCode::kOk) code = absl::StatusCode::kUnknown;
  return MakeError(code, static_cast<ErrorReason>(proto.reason()), proto.message());
}

// See PreparedStep::plan_digest.
int64_t PlanDigest(Version version) {
  version.skipped_tensor_count = 0;
  version.skipped_tensors.clear();
  std::string text;
  ema::ToProto(version).SerializeToString(&text);
  return Crc32c(0, std::as_bytes(std::span(text.data(), text.size())));
}

}  // namespace

v1::PartitionId ToProto(const std::string& model, const PartitionId& id) {
  v1::PartitionId proto;
  proto.set_model(model);
  proto.set_incarnation(id.incarnation);
  proto.set_partition(id.partition);
  proto.set_boot(id.boot);
  return proto;
}

PartitionId FromProto(const v1::PartitionId& proto) {
  return {.incarnation = proto.incarnation(), .partition = proto.partition(), .boot = proto.boot()};
}

PreparedStep ToPreparedStep(const Version& record) {
  return {.step = record.step,
          .run_epoch = record.run_epoch,
          .plan_digest = PlanDigest(record),
          .skipped_tensor_count = record.skipped_tensor_count,
          .skipped_tensors = record.skipped_tensors};
}

v1::VoteRequest ToProto(const std::string& model, const Vote& vote) {
  v1::VoteRequest proto;
  *proto.mutable_from() = ToProto(model, vote.from);
  proto.set_round(vote.round);
  if (vote.step.ok()) {
    ToProto(*vote.step, proto.mutable_step());
  } else {
    ToProto(vote.step.status(), proto.mutable_refusal());
    proto.set_refused_step(vote.refused_step);
  }
  return proto;
}

Vote FromProto(const v1::VoteRequest& proto) {
  Vote vote{.from = FromProto(proto.from()), .round = proto.round()};
  if (proto.has_step()) {
    vote.step = FromProto(proto.step());
  } else {
    vote.step = FromProto(proto.refusal());
    vote.refused_step = proto.refused_step();
  }
  return vote;
}

v1::SyncRequest ToProto(const std::string& model, const Sync& sync) {
  v1::SyncRequest proto;
  *proto.mutable_from() = ToProto(model, sync.from);
  proto.set_round(sync.round);
  proto.set_received_bytes(sync.received_bytes);
  proto.mutable_missing_ranks()->Assign(sync.missing_ranks.begin(), sync.missing_ranks.end());
  proto.set_loading(sync.loading);
  proto.set_step(sync.step);
  return proto;
}

Sync FromProto(const v1::SyncRequest& proto) {
  return {.from = FromProto(proto.from()),
          .round = proto.round(),
          .step = proto.step(),
          .received_bytes = proto.received_bytes(),
          .missing_ranks = {proto.missing_ranks().begin(), proto.missing_ranks().end()},
          .loading = proto.loading()};
}

v1::GroupState ToProto(const GroupState& state) {
  v1::GroupState proto;
  proto.set_incarnation(state.incarnation);
  proto.set_round(state.round);
  proto.set_rejects_pushes(state.rejects_pushes);
  if (state.last_commit.has_value()) {
    v1::GroupState::Commit& commit = *proto.mutable_last_commit();
    commit.set_round(state.last_commit->round);
    commit.set_version(state.last_commit->version);
    ToProto(state.last_commit->step, commit.mutable_step());
    commit.set_commit_time_us(absl::ToUnixMicros(state.last_commit->commit_time));
  }
  if (state.last_abort.has_value()) {
    v1::GroupState::Abort& abort = *proto.mutable_last_abort();
    abort.set_round(state.last_abort->round);
    ToProto(state.last_abort->why, abort.mutable_why());
  }
  proto.set_run_epoch(state.run_epoch);
  proto.set_launch_id(state.launch_id);
  proto.set_tracks_revision(state.tracks_revision);
  proto.mutable_home_pinned_versions()->Assign(state.home_pinned_versions.begin(),
                                               state.home_pinned_versions.end());
  if (state.failed_step.has_value()) {
    proto.mutable_failed_step()->set_step(state.failed_step->step);
    ToProto(state.failed_step->why, proto.mutable_failed_step()->mutable_why());
  }
  return proto;
}

GroupState FromProto(const v1::GroupState& proto) {
  GroupState state{.incarnation = proto.incarnation(),
                   .round = proto.round(),
                   .rejects_pushes = proto.rejects_pushes(),
                   .run_epoch = proto.run_epoch(),
                   .launch_id = proto.launch_id(),
                   .tracks_revision = proto.tracks_revision(),
                   .home_pinned_versions = {proto.home_pinned_versions().begin(),
                                            proto.home_pinned_versions().end()}};
  if (proto.has_last_commit()) {
    const v1::GroupState::Commit& commit = proto.last_commit();
    state.last_commit = GroupCommit{.round = commit.round(),
                                    .version = commit.version(),
                                    .step = FromProto(commit.step()),
                                    .commit_time = absl::FromUnixMicros(commit.commit_time_us())};
  }
  if (proto.has_last_abort()) {
    const v1::GroupState::Abort& abort = proto.last_abort();
    state.last_abort = GroupAbort{.round = abort.round(), .why = FromProto(abort.why())};
  }
  if (proto.has_failed_step()) {
    const v1::GroupState::FailedStep& failed = proto.failed_step();
    state.failed_step = FailedStep{.step = failed.step(), .why = FromProto(failed.why())};
  }
  return state;
}

}  // namespace ema::group
