// SPDX-License-Identifier: Apache-2.0
#include "server/group/group_overview.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"

namespace ema::group {
namespace {

// For the answers of other members.
constexpr absl::Duration kTimeout = absl::Seconds(1);
// A creation that takes longer was interrupted.
constexpr absl::Duration kLongestCreation = absl::Minutes(1);

using Answers = std::map<std::string, absl::StatusOr<v1::DescribeMemberResponse>>;  // By boot.

// In whole seconds, and not "0", which has no unit.
std::string Seconds(absl::Duration duration) {
  return absl::FormatDuration(absl::Ceil(duration, absl::Seconds(1)));
}

void SetProblem(v1::GroupModelState state, const std::string& problem, absl::Duration age,
                v1::GetGroupResponse::Model& model) {
  model.set_state(state);
  model.set_problem(absl::StrCat("model ", Quoted(model.name()), ": ", problem));
  model.set_degraded_seconds(std::max(absl::ToDoubleSeconds(age), 0.0));
}

void SetProgress(v1::GroupModelProgress progress, v1::GetGroupResponse::Model& model) {
  if (!progress.problem().empty()) {
    SetProblem(
        progress.round() == 0 ? v1::GROUP_MODEL_STATE_LOADING : v1::GROUP_MODEL_STATE_DEGRADED,
        progress.problem(), absl::Seconds(progress.problem_seconds()), model);
  } else {
    model.set_state(progress.rejects_pushes() ? v1::GROUP_MODEL_STATE_READ_ONLY
                                              : v1::GROUP_MODEL_STATE_SERVING);
    model.clear_problem();
    model.set_degraded_seconds(0);
  }
  *model.mutable_progress() = std::move(progress);
}

void AddRegistry(const Member& self, v1::GetGroupResponse& response) {
  const RegistryHealth health = self.registry_health();
  v1::GetGroupResponse::Registry& registry = *response.mutable_registry();
  registry.mutable_endpoints()->Assign(health.endpoints.begin(), health.endpoints.end());
  registry.set_seconds_since_contact(absl::ToDoubleSeconds(Since(self.last_contact())));
  registry.set_latency_seconds(absl::ToDoubleSeconds(health.latency));
  registry.set_error(std::string(health.error.message()));
  if (!health.error.ok()) {
    response.add_problems(absl::StrCat(
        "the registry has been unusable for ", Seconds(Since(self.last_contact())),
        ", so members and models are as it last reported them: ", health.error.message()));
  } else if (const absl::Status key = self.key_status(); absl::IsAlreadyExists(key)) {
    response.add_problems(absl::StrCat("another process has joined as member ", Quoted(self.name()),
                                       ": ", key.message()));
  }
}

// Adds what the other members have answered.
void AddAnswers(const Answers& answers, v1::GetGroupResponse& response) {
  for (v1::GetGroupResponse::Member& member : *response.mutable_members()) {
    const auto answer = answers.find(member.boot());
    if (answer == answers.end()) continue;
    if (answer->second.ok()) {
      member.set_memory_reserved_bytes(answer->second->memory_reserved_bytes());
      continue;
    }
    member.set_error(std::string(answer->second.status().message()));
    response.add_problems(
        absl::StrCat("member ", Quoted(member.name()), " does not answer: ", member.error()));
  }
}

void AddHomesAnswer(const std::string& boot, const Answers& answers,
                    v1::GetGroupResponse::Model& model) {
  const auto answer = answers.find(boot);
  // Without an answer the home is this server, or is missing.
  if (answer == answers.end()) return;
  const std::string home = absl::StrCat("its home, member ", Quoted(model.members(0)));
  if (!answer->second.ok()) {
    return SetProblem(v1::GROUP_MODEL_STATE_DEGRADED, absl::StrCat(home, ", does not answer"),
                      absl::Seconds(model.degraded_seconds()), model);
  }
  const auto& homes = answer->second->homes();
  const auto progress = homes.find(model.name());
  if (progress == homes.end()) {
    return SetProblem(v1::GROUP_MODEL_STATE_LOADING, absl::StrCat(home, ", has not loaded it"),
                      absl::Seconds(model.degraded_seconds()), model);
  }
  if (model.state() == v1::GROUP_MODEL_STATE_DEGRADED) {  // A member is missing.
    *model.mutable_progress() = progress->second;
  } else {
    SetProgress(progress->second, model);
  }
}

// A call of Describe() that waits for answers.
struct PendingDescription {
  v1::GetGroupResponse response;
  std::vector<std::string> home_boots;  // By model; empty: the model is not ACTIVE.
  Answers answers;  // Each is written once, by one thread; the map does not change.
  std::atomic<int64_t> missing_count = 0;
  std::function<void(absl::StatusOr<v1::GetGroupResponse>)> reply;

  void EndOne() {
    if (--missing_count > 0) return;
    AddAnswers(answers, response);
    for (int i = 0; i < response.models_size(); ++i) {
      AddHomesAnswer(home_boots[i], answers, *response.mutable_models(i));
    }
    reply(std::move(response));
  }
};

}  // namespace

absl::StatusOr<v1::GetGroupResponse> GroupOverview::DescribeHere() const {
  EMA_ASSIGN_OR_RETURN(const Member* const self, hosted_.GetMember());
  v1::GetGroupResponse response;
  response.set_group(self->group());
  response.set_member(self->name());
  AddRegistry(*self, response);
  AddMembers(*self, response);
  for (const auto& [name, record] : self->models()) {
    DescribeModel(*self, name, record, *response.add_models());
  }
  if (const auto incident = follower_.history().last_incident()) {
    response.set_last_incident(incident->text);
    response.set_last_incident_time_us(absl::ToUnixMicros(incident->time));
  }
  return response;
}

void GroupOverview::AddMembers(const Member& self, v1::GetGroupResponse& response) const {
  std::vector<v1::GetGroupResponse::Member> members;
  for (const auto& [name, record] : self.members()) {
    v1::GetGroupResponse::Member& member = members.emplace_back();
    member.set_name(name);
    member.set_boot(record.boot);
    member.set_address(record.address);
    member.set_device(record.device);
    member.set_version(record.program_version);
    member.set_memory_budget_bytes(record.memory_budget_bytes);
    if (record.boot == self.boot()) {
      member.set_memory_reserved_bytes(store_.budget().reserved_bytes());
    }
  }
  for (const GroupHistory::Missing& missing : follower_.history().missing()) {
    const absl::Duration age = absl::Now() - missing.since;
    v1::GetGroupResponse::Member& member = members.emplace_back();
    member.set_name(missing.member);
    member.set_boot(missing.boot);
    member.set_missing_seconds(absl::ToDoubleSeconds(age));
    response.add_problems(absl::StrCat("member ", Quoted(missing.member),
                                       " has not been in the registry for ", Seconds(age),
                                       "; start it again"));
  }
  std::stable_sort(members.begin(), members.end(),
                   [](const auto& a, const auto& b) { return a.name() < b.name(); });
  response.mutable_members()->Assign(members.begin(), members.end());
}

void GroupOverview::DescribeModel(const Member& self, const std::string& name,
                                  const ModelRecord& record,
                                  v1::GetGroupResponse::Model& model) const {
  model.set_name(name);
  model.set_incarnation(record.incarnation);
  for (const Partition& partition : record.partitions) model.add_members(partition.member);
  if (const GroupCheckpoint* const checkpoint = record.NewestCheckpoint()) {
    model.mutable_checkpoint()->set_version(checkpoint->id.version);
    model.mutable_checkpoint()->set_incarnation(checkpoint->id.incarnation);
    model.set_checkpoint_step(checkpoint->step);
  }
  if (record.copy.has_value()) model.set_copy_step(record.copy->step);
  model.set_checkpoint_return_count(follower_.history().CheckpointReturnCount(name));
  const absl::Duration age = absl::Now() - absl::FromUnixMicros(record.incarnation);
  switch (record.state) {
    case ModelRecord::State::kCreating:
      model.set_state(v1::GROUP_MODEL_STATE_CREATING);
      if (age > kLongestCreation) {
        SetProblem(v1::GROUP_MODEL_STATE_CREATING, "its creation was interrupted; create it again",
                   age, model);
      }
      return;
    case ModelRecord::State::kDeleting:
      return SetProblem(v1::GROUP_MODEL_STATE_DELETING,
                        "it is being deleted; if that was interrupted, delete it again",
                        absl::ZeroDuration(), model);
    case ModelRecord::State::kActive:
      return DescribeActive(self, record, model);
  }
}

void GroupOverview::DescribeActive(const Member& self, const ModelRecord& record,
                                   v1::GetGroupResponse::Model& model) const {
  model.set_state(v1::GROUP_MODEL_STATE_SERVING);
  const std::shared_ptr<const HostedModel> hosted = hosted_.Find(model.name());
  const bool is_here =
      hosted != nullptr && hosted->partition->id().incarnation == record.incarnation;
  if (is_here) {
    const HostedPartition& partition = *hosted->partition;
    model.set_commit_wait_seconds(absl::ToDoubleSeconds(partition.commit_wait()));
    if (partition.is_home()) {
      SetProgress(partition.DescribeProgress(), model);
    } else if (const auto age = partition.time_without_round()) {
      SetProblem(v1::GROUP_MODEL_STATE_LOADING, "not all partitions have joined", *age, model);
    }
  } else if (record.PartitionOf(self.name(), self.boot()).has_value()) {
    const absl::Status error = follower_.LoadError(model.name());
    SetProblem(v1::GROUP_MODEL_STATE_LOADING,
               absl::StrCat(
                   "its partition on this server is loading",
                   error.ok() ? "" : absl::StrCat("; the last attempt failed: ", error.message())),
               absl::Now() - absl::FromUnixMicros(record.incarnation), model);
  }
  for (size_t i = 0; i < record.partitions.size(); ++i) {
    const Partition& partition = record.partitions[i];
    if (self.AddressOf(partition.member, partition.boot).has_value()) continue;
    const absl::Time since = follower_.history().MissingSince(partition).value_or(absl::Now());
    // The home may have noticed it before the registry.
    const absl::Duration noticed = absl::Seconds(model.degraded_seconds());
    return SetProblem(
        v1::GROUP_MODEL_STATE_DEGRADED,
        absl::StrCat("the process of partition ", i, ", member ", Quoted(partition.member),
                     ", is missing; when it is back, the model continues from its "
                     "newest checkpoint or copy"),
        std::max(absl::Now() - since, noticed), model);
  }
}

void GroupOverview::Describe(
    std::function<void(absl::StatusOr<v1::GetGroupResponse>)> reply) const {
  const absl::StatusOr<Member*> self = hosted_.GetMember();
  absl::StatusOr<v1::GetGroupResponse> here = DescribeHere();
  if (!self.ok() || !here.ok()) return reply(self.ok() ? here.status() : self.status());
  const auto pending = std::make_shared<PendingDescription>();
  pending->response = *std::move(here);
  pending->reply = std::move(reply);
  const std::map<std::string, ModelRecord> records = (*self)->models();
  for (const v1::GetGroupResponse::Model& model : pending->response.models()) {
    const auto record = records.find(model.name());
    const bool is_active =
        record != records.end() && record->second.state == ModelRecord::State::kActive;
    pending->home_boots.push_back(is_active ? record->second.partitions[0].boot : "");
  }
  std::vector<std::pair<std::string, std::string>> to_ask;  // Boots and addresses.
  for (const v1::GetGroupResponse::Member& member : pending->response.members()) {
    if (member.has_missing_seconds() || member.boot() == (*self)->boot()) continue;
    pending->answers.emplace(member.boot(), absl::UnknownError(""));
    to_ask.emplace_back(member.boot(), member.address());
  }
  pending->missing_count = static_cast<int64_t>(to_ask.size()) + 1;
  for (const auto& [boot, address] : to_ask) {
    v1::DescribeMemberRequest request;
    request.set_boot(boot);
    peers_.DescribeMember(
        address, request, kTimeout,
        [pending, boot = boot](const absl::StatusOr<v1::DescribeMemberResponse>& answer) {
          pending->answers.at(boot) = answer;
          pending->EndOne();
        });
  }
  pending->EndOne();
}

absl::StatusOr<v1::DescribeMemberResponse> GroupOverview::DescribeMember(
    const v1::DescribeMemberRequest& request) const {
  EMA_ASSIGN_OR_RETURN(const Member* const self, hosted_.GetMember());
  if (request.boot() != self->boot()) {
    return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced,
                     absl::StrCat("this process has the boot ", self->boot(), ", expected ",
                                  Quoted(request.boot())));
  }
  v1::DescribeMemberResponse response;
  response.set_memory_reserved_bytes(store_.budget().reserved_bytes());
  for (const auto& [name, hosted] : hosted_.All()) {
    if (!hosted->partition->is_home() || !hosted->partition->is_active()) continue;
    (*response.mutable_homes())[name] = hosted->partition->DescribeProgress();
  }
  return response;
}

}  // namespace ema::group
