// SPDX-License-Identifier: Apache-2.0
#include "server/wire/convert_group.h"

#include <optional>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"

namespace ema {
namespace {

using Response = v1::GetGroupResponse;

GroupInfo::Member FromProto(const Response::Member& proto) {
  GroupInfo::Member member{.name = proto.name(),
                           .boot = proto.boot(),
                           .address = proto.address(),
                           .device = proto.device(),
                           .version = proto.version(),
                           .memory_budget_bytes = proto.memory_budget_bytes(),
                           .error = proto.error()};
  if (proto.has_memory_reserved_bytes()) {
    member.memory_reserved_bytes = proto.memory_reserved_bytes();
  }
  if (proto.has_missing_seconds()) member.missing = absl::Seconds(proto.missing_seconds());
  return member;
}

GroupInfo::Progress FromProto(const v1::GroupModelProgress& proto) {
  GroupInfo::Progress progress{.round = proto.round(),
                               .run_epoch = proto.run_epoch(),
                               .version = proto.version(),
                               .step = proto.step(),
                               .durable_step = proto.durable_step(),
                               .slowest_member = proto.slowest_member(),
                               .slowest_activity = proto.slowest_activity(),
                               .slowest_partition = proto.slowest_partition()};
  if (proto.has_checkpoint_age_seconds()) {
    progress.checkpoint_age = absl::Seconds(proto.checkpoint_age_seconds());
  }
  return progress;
}

// GROUP_MODEL_STATE_SERVING as "serving".
std::string StateName(v1::GroupModelState state) {
  const std::string& name = v1::GroupModelState_Name(state);
  if (state == v1::GROUP_MODEL_STATE_UNSPECIFIED || name.empty()) return "unknown";
  return absl::AsciiStrToLower(absl::StripPrefix(name, "GROUP_MODEL_STATE_"));
}

GroupInfo::Model FromProto(const Response::Model& proto) {
  GroupInfo::Model model{.name = proto.name(),
                         .state = StateName(proto.state()),
                         .incarnation = proto.incarnation(),
                         .members = {proto.members().begin(), proto.members().end()},
                         .checkpoint_step = proto.checkpoint_step(),
                         .degraded = absl::Seconds(proto.degraded_seconds()),
                         .checkpoint_return_count = proto.checkpoint_return_count(),
                         .commit_wait = absl::Seconds(proto.commit_wait_seconds()),
                         .problem = proto.problem()};
  if (proto.has_checkpoint()) {
    model.checkpoint = VersionId{proto.checkpoint().version(), proto.checkpoint().incarnation()};
  }
  if (proto.has_copy_step()) model.copy_step = proto.copy_step();
  if (proto.has_progress()) model.progress = FromProto(proto.progress());
  return model;
}

}  // namespace

GroupInfo FromProto(const v1::GetGroupResponse& response) {
  const Response::Registry& registry = response.registry();
  GroupInfo info{
      .group = response.group(),
      .member = response.member(),
      .registry = {.endpoints = {registry.endpoints().begin(), registry.endpoints().end()},
                   .since_contact = absl::Seconds(registry.seconds_since_contact()),
                   .latency = absl::Seconds(registry.latency_seconds()),
                   .error = registry.error()},
      .last_incident = response.last_incident(),
      .last_incident_time = absl::FromUnixMicros(response.last_incident_time_us()),
      .problems = {response.problems().begin(), response.problems().end()}};
  for (const Response::Member& member : response.members()) {
    info.members.push_back(FromProto(member));
  }
  for (const Response::Model& model : response.models()) {
    info.models.push_back(FromProto(model));
    if (!model.problem().empty()) info.problems.push_back(model.problem());
  }
  return info;
}

}  // namespace ema
