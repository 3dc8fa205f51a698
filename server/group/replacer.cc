// SPDX-License-Identifier: Apache-2.0
#include "server/group/replacer.h"

#include <algorithm>
#include <set>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_join.h"
#include "server/group/rebalance.h"

namespace ema::group {
namespace {

// The time between two tries to move a model for which there is no place: each reads its
// checkpoint.
constexpr absl::Duration kRetryDelay = absl::Seconds(10);

// The processes that have a partition of a model, and are not in the registry.
std::set<MissingTimer::Process> FindMissing(const Member& member,
                                            const std::map<std::string, ModelRecord>& models) {
  std::set<MissingTimer::Process> missing;
  for (const auto& [name, record] : models) {
    if (record.state != ModelRecord::State::kActive) continue;
    for (const Partition& partition : record.partitions) {
      if (member.AddressOf(partition.member, partition.boot).has_value()) continue;
      missing.emplace(partition.member, partition.boot);
    }
  }
  return missing;
}

}  // namespace

absl::Status Replacer::Run() {
  const absl::StatusOr<Member*> found = hosted_.GetMember();
  if (!found.ok()) return absl::OkStatus();  // The server is stopping.
  const Member& member = **found;
  const std::map<std::string, ModelRecord> models = member.models();
  const std::set<MissingTimer::Process> missing = FindMissing(member, models);
  const LostProcesses lost = timer_.Update(missing, member.last_contact(), SteadyNow());
  std::erase_if(failures_, [&](const auto& failed) { return !models.contains(failed.first); });
  for (const auto& [name, record] : models) ReplaceIn(name, record, lost);
  return missing.empty() ? absl::OkStatus() : absl::UnavailableError("a process is missing");
}

void Replacer::ReplaceIn(const std::string& model, const ModelRecord& record,
                         const LostProcesses& lost) {
  std::vector<std::string> members;
  absl::Duration missing_for;
  for (const Partition& partition : record.partitions) {
    const auto found = lost.find({partition.member, partition.boot});
    if (record.state != ModelRecord::State::kActive || found == lost.end()) continue;
    members.push_back(partition.member);
    missing_for = std::max(missing_for, found->second);
  }
  if (members.empty()) {
    failures_.erase(model);
    return;
  }
  const auto failed = failures_.find(model);
  if (failed != failures_.end() && SteadyNow() < failed->second.next_try) return;
  const absl::Status status = ReplaceMembers(models_, hosted_, *options_.checkpoints, model,
                                             record.incarnation, members, options_.log)
                                  .status();
  // Another server has moved the model, a process is back, or the registry does not answer.
  if (absl::IsAborted(status) || absl::IsUnavailable(status)) return;
  const std::string names = absl::StrJoin(members, ",");
  if (status.ok()) {
    LogTo(options_.log, LogLevel::kWarning, "lost members replaced",
          {{"model", model},
           {"members", names},
           {"missing_for", absl::Trunc(missing_for, absl::Seconds(1))},
           {"replace_after", options_.replace_after}});
    return;
  }
  const bool is_known = failed != failures_.end() && failed->second.code == status.code();
  failures_[model] = {status.code(), After(SteadyNow(), kRetryDelay)};
  if (is_known) return;
  LogTo(options_.log, LogLevel::kWarning, "lost members cannot be replaced",
        {{"model", model},
         {"members", names},
         {"missing_for", absl::Trunc(missing_for, absl::Seconds(1))},
         {"replace_after", options_.replace_after},
         {"error", status}});
}

}  // namespace ema::group
