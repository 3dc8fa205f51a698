// SPDX-License-Identifier: Apache-2.0
#include "server/group/group_history.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/base/quoted.h"

namespace ema::group {
namespace {

// If several servers restart together, each begins an incarnation.
constexpr absl::Duration kSameReturn = absl::Minutes(1);

bool IsThere(const GroupHistory::Members& members, const Partition& partition) {
  const auto found = members.find(partition.member);
  return found != members.end() && found->second.boot == partition.boot;
}

// Where the next incarnation begins: "version 12 (step 30)".
std::string DescribeBase(const ModelRecord& record) {
  if (!record.base.has_value()) return "its beginning";
  const std::string version = absl::StrCat("version ", record.base->version);
  if (record.BeginsWithCopy())
    return absl::StrCat(version, " (step ", record.copy->step, ", a copy)");
  const GroupCheckpoint* const base = record.Find(*record.base);
  return base == nullptr ? version : absl::StrCat(version, " (step ", base->step, ")");
}

// Why the incarnation of `before` has ended. `missing`: since when processes were missing then.
std::string DescribeCause(const ModelRecord& before, const ModelRecord& record,
                          const std::map<std::pair<std::string, std::string>, absl::Time>& missing,
                          absl::Time now) {
  for (const Partition& partition : record.partitions) {
    const auto earlier =
        std::find_if(before.partitions.begin(), before.partitions.end(),
                     [&](const Partition& one) { return one.member == partition.member; });
    if (earlier != before.partitions.end() && earlier->boot != partition.boot) {
      return absl::StrCat("member ", Quoted(partition.member), " has restarted");
    }
  }
  for (const Partition& partition : before.partitions) {
    const bool has_left =
        std::none_of(record.partitions.begin(), record.partitions.end(),
                     [&](const Partition& one) { return one.member == partition.member; });
    const auto since = missing.find({partition.member, partition.boot});
    if (!has_left || since == missing.end()) continue;
    return absl::StrCat("member ", Quoted(partition.member),
                        " was replaced, which was missing for ",
                        absl::FormatDuration(absl::Floor(now - since->second, absl::Seconds(1))));
  }
  const bool has_moved = before.partitions != record.partitions;
  return has_moved ? "its tensors were moved to other servers" : "it was rolled back";
}

}  // namespace

void GroupHistory::Observe(const Members& members, const Models& models, absl::Time now) {
  absl::MutexLock lock(&mu_);
  const MissingSinceMap missing = missing_since_;
  ObserveMembers(members, models, now);
  for (const auto& [name, record] : models) {
    const auto before = models_.find(name);
    ObserveModel(name, before == models_.end() ? nullptr : &before->second, record, missing, now);
  }
  for (const auto& [name, record] : models_) {
    if (models.contains(name) || record.state != ModelRecord::State::kActive) continue;
    const bool is_lost = std::any_of(
        record.partitions.begin(), record.partitions.end(), [&](const Partition& partition) {
          return members.contains(partition.member) && !IsThere(members, partition);
        });
    if (!is_lost) continue;
    last_incident_ = {now, absl::StrCat("model ", Quoted(name),
                                        " was lost: a member has restarted, and the model had no "
                                        "checkpoint")};
  }
  models_ = models;
}

void GroupHistory::ObserveMembers(const Members& members, const Models& models, absl::Time now) {
  MissingSinceMap missing;
  for (const auto& [name, record] : models) {
    for (const Partition& partition : record.partitions) {
      if (IsThere(members, partition)) continue;
      const Process process{partition.member, partition.boot};
      const auto known = missing_since_.find(process);
      missing.emplace(process, known == missing_since_.end() ? now : known->second);
      if (known != missing_since_.end()) continue;
      last_incident_ = {now, absl::StrCat("member ", Quoted(partition.member),
                                          " is not in the registry any more: its process has "
                                          "stopped, or does not reach the registry")};
    }
  }
  for (const auto& [process, since] : missing_since_) {
    const auto member = members.find(process.first);
    if (member == members.end() || member->second.boot != process.second) continue;
    last_incident_ = {now,
                      absl::StrCat("member ", Quoted(process.first), " is back after ",
                                   absl::FormatDuration(absl::Ceil(now - since, absl::Seconds(1))),
                                   "; its process has not restarted")};
  }
  missing_since_ = std::move(missing);
}

void GroupHistory::ObserveModel(const std::string& model, const ModelRecord* before,
                                const ModelRecord& record, const MissingSinceMap& missing,
                                absl::Time now) {
  if (record.state != ModelRecord::State::kActive) return;
  if (before == nullptr) {
    // The incarnation is the time at which it began.
    const absl::Time begin = absl::FromUnixMicros(record.incarnation);
    if (!record.base.has_value() || (last_incident_.has_value() && last_incident_->time >= begin)) {
      return;
    }
    last_incident_ = {begin,
                      absl::StrCat("model ", Quoted(model), " returned to ", DescribeBase(record),
                                   "; this server had not joined the group yet")};
    return;
  }
  if (before->state != ModelRecord::State::kActive || before->incarnation >= record.incarnation) {
    return;
  }
  const absl::Duration age = absl::Microseconds(record.incarnation - before->incarnation);
  if (age >= kSameReturn) ++checkpoint_return_counts_[model];
  last_incident_ = {
      now, absl::StrCat("model ", Quoted(model), " returned to ", DescribeBase(record), ": ",
                        DescribeCause(*before, record, missing, now))};
}

std::vector<GroupHistory::Missing> GroupHistory::missing() const {
  absl::MutexLock lock(&mu_);
  std::vector<Missing> missing;
  for (const auto& [process, since] : missing_since_) {
    missing.push_back({process.first, process.second, since});
  }
  return missing;
}

std::optional<absl::Time> GroupHistory::MissingSince(const Partition& partition) const {
  absl::MutexLock lock(&mu_);
  const auto found = missing_since_.find({partition.member, partition.boot});
  return found != missing_since_.end() ? std::optional(found->second) : std::nullopt;
}

int64_t GroupHistory::CheckpointReturnCount(std::string_view model) const {
  absl::MutexLock lock(&mu_);
  const auto found = checkpoint_return_counts_.find(model);
  return found != checkpoint_return_counts_.end() ? found->second : 0;
}

std::optional<GroupHistory::Incident> GroupHistory::last_incident() const {
  absl::MutexLock lock(&mu_);
  return last_incident_;
}

}  // namespace ema::group
