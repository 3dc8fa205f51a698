// SPDX-License-Identifier: Apache-2.0
#include "client/cli/group_commands.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/output.h"
#include "client/cli/progress.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::cli {
namespace {

double Seconds(absl::Duration duration) { return absl::ToDoubleSeconds(duration); }

// Null without a value.
Json SecondsOrNull(std::optional<absl::Duration> duration) {
  return duration.has_value() ? Json(Seconds(*duration)) : Json();
}

// In whole seconds, or in milliseconds below a second.
std::string DurationText(absl::Duration duration) {
  const absl::Duration unit =
      duration < absl::Seconds(1) ? absl::Milliseconds(1) : absl::Seconds(1);
  return absl::FormatDuration(absl::Trunc(duration, unit));
}

Json ToJson(const GroupInfo::Member& member) {
  return {{"name", member.name},
          {"boot", member.boot},
          {"address", member.address},
          {"device", member.device},
          {"version", member.version},
          {"memory_budget_bytes", member.memory_budget_bytes},
          {"memory_reserved_bytes", member.memory_reserved_bytes},
          {"missing_seconds", SecondsOrNull(member.missing)},
          {"error", member.error}};
}

Json ToJson(const GroupInfo::Progress& progress) {
  Json json = {{"round", progress.round},
               {"run_epoch", progress.run_epoch},
               {"version", progress.version},
               {"step", progress.step},
               {"durable_step", progress.durable_step},
               {"checkpoint_age_seconds", SecondsOrNull(progress.checkpoint_age)},
               {"waits_for", nullptr}};
  if (!progress.slowest_member.empty()) {
    json["waits_for"] = {{"partition", progress.slowest_partition},
                         {"member", progress.slowest_member},
                         {"activity", progress.slowest_activity}};
  }
  return json;
}

Json ToJson(const GroupInfo::Model& model) {
  Json json = {{"name", model.name},
               {"state", model.state},
               {"incarnation", model.incarnation},
               {"members", model.members},
               {"checkpoint", nullptr},
               {"copy_step", nullptr},
               {"progress", nullptr},
               {"degraded_seconds", Seconds(model.degraded)},
               {"checkpoint_return_count", model.checkpoint_return_count},
               {"problem", model.problem}};
  if (model.checkpoint.has_value()) {
    json["checkpoint"] = {{"incarnation", model.checkpoint->incarnation},
                          {"version", model.checkpoint->version},
                          {"step", model.checkpoint_step}};
  }
  if (model.copy_step.has_value()) json["copy_step"] = *model.copy_step;
  if (model.progress.has_value()) json["progress"] = ToJson(*model.progress);
  return json;
}

Json ToJson(const GroupInfo& info) {
  Json json = {{"group", info.group},
               {"member", info.member},
               {"is_well", info.problems.empty()},
               {"registry",
                {{"endpoints", info.registry.endpoints},
                 {"seconds_since_contact", Seconds(info.registry.since_contact)},
                 {"latency_seconds", Seconds(info.registry.latency)},
                 {"error", info.registry.error}}},
               {"members", Json::array()},
               {"models", Json::array()},
               {"last_incident", nullptr},
               {"problems", info.problems}};
  for (const GroupInfo::Member& member : info.members) json["members"].push_back(ToJson(member));
  for (const GroupInfo::Model& model : info.models) json["models"].push_back(ToJson(model));
  if (!info.last_incident.empty()) {
    json["last_incident"] = {{"time", info.last_incident_time}, {"text", info.last_incident}};
  }
  return json;
}

std::string MemberTable(const GroupInfo& info) {
  constexpr size_t kBootLength = 8;  // Enough to distinguish two starts of a server.
  Table table({"MEMBER", "BOOT", "ADDRESS", "DEVICE", "MEMORY", "STATE"});
  for (const GroupInfo::Member& member : info.members) {
    const std::string boot = member.boot.substr(0, kBootLength);
    if (member.missing.has_value()) {
      table.Add({member.name, boot, "-", "-", "-",
                 absl::StrCat("missing for ", DurationText(*member.missing))});
      continue;
    }
    const std::string reserved =
        member.memory_reserved_bytes.has_value() ? FormatBytes(*member.memory_reserved_bytes) : "?";
    table.Add({member.name, boot, member.address, member.device,
               absl::StrCat(reserved, " of ", FormatBytes(member.memory_budget_bytes)),
               member.error.empty() ? "answers" : "does not answer"});
  }
  return table.ToString();
}

std::string ModelTable(const GroupInfo& info) {
  Table table({"MODEL", "STATE", "HOME", "SERVERS", "STEP", "VERSION", "ROUND", "CHECKPOINT", "AGE",
               "WAITS FOR"});
  for (const GroupInfo::Model& model : info.models) {
    std::vector<std::string> row = {model.name, model.state,
                                    model.members.empty() ? "-" : model.members[0],
                                    absl::StrCat(model.members.size())};
    std::string checkpoint =
        model.checkpoint.has_value() ? absl::StrCat("step ", model.checkpoint_step) : "none";
    if (model.copy_step.has_value()) {
      absl::StrAppend(&checkpoint, ", copy of step ", *model.copy_step);
    }
    if (const auto& progress = model.progress; progress.has_value()) {
      row.insert(
          row.end(),
          {absl::StrCat(progress->step), absl::StrCat(progress->version),
           absl::StrCat(progress->round), checkpoint,
           progress->checkpoint_age.has_value() ? DurationText(*progress->checkpoint_age) : "-",
           progress->slowest_member.empty()
               ? "-"
               : absl::StrCat(progress->slowest_member, ": ", progress->slowest_activity)});
    } else {
      row.insert(row.end(), {"?", "?", "?", checkpoint, "?", "?"});
    }
    table.Add(std::move(row));
  }
  return table.ToString();
}

std::string DescribeRegistry(const GroupInfo::Registry& registry) {
  return absl::StrCat("registry ", absl::StrJoin(registry.endpoints, ", "),
                      registry.error.empty() ? " answers" : " UNUSABLE", ": last contact ",
                      DurationText(registry.since_contact), " ago, last answer within ",
                      absl::FormatDuration(absl::Trunc(registry.latency, absl::Microseconds(10))),
                      "\n",
                      registry.error.empty() ? "" : "The tables show what it reported before.\n");
}

}  // namespace

std::string DescribeGroup(const GroupInfo& info) {
  std::string text = absl::StrCat("group ", info.group, ", described by member ", info.member, "\n",
                                  DescribeRegistry(info.registry));
  if (!info.last_incident.empty()) {
    absl::StrAppend(
        &text, "last incident, ",
        absl::FormatTime("%Y-%m-%d %H:%M:%S", info.last_incident_time, absl::LocalTimeZone()), ": ",
        info.last_incident, "\n");
  }
  absl::StrAppend(&text, "\n", MemberTable(info));
  absl::StrAppend(&text, "\n", info.models.empty() ? "no models\n" : ModelTable(info), "\n");
  if (info.problems.empty()) return absl::StrCat(text, "All is well.\n");
  absl::StrAppend(&text, "Problems:\n");
  for (const std::string& problem : info.problems) absl::StrAppend(&text, "- ", problem, "\n");
  return text;
}

absl::Status ShowGroup(const Session& session) {
  const absl::Duration timeout = session.has_timeout ? session.timeout : absl::Seconds(10);
  EMA_ASSIGN_OR_RETURN(const GroupInfo info, session.client->GetGroup(timeout));
  EMA_RETURN_IF_ERROR(PrintResult(session.json, ToJson(info), DescribeGroup(info)));
  if (info.problems.empty()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("group \"", info.group, "\" has problems: ", info.problems.size()));
}

absl::Status RebalanceModel(const Session& session, const std::string& model,
                            const std::vector<std::string>& without) {
  EMA_ASSIGN_OR_RETURN(const Client::RebalancedModel moved,
                       session.client->RebalanceModel(model, without, session.disk_timeout()));
  const Json json = {{"model", model},
                     {"has_changed", moved.has_changed},
                     {"incarnation", moved.incarnation},
                     {"version", moved.base.version},
                     {"base_incarnation", moved.base.incarnation},
                     {"step", moved.step},
                     {"members", moved.members}};
  const std::string members = absl::StrJoin(moved.members, ", ");
  return PrintResult(
      session.json, json,
      moved.has_changed
          ? absl::StrCat("model ", model, " continues from version ", moved.base.version, ", step ",
                         moved.step, ", on ", members, "\n")
          : absl::StrCat("model ", model, " stays on ", members, "\n"));
}

absl::Status ReplaceMembers(const Session& session, const std::vector<std::string>& lost) {
  EMA_ASSIGN_OR_RETURN(const GroupInfo info, session.client->GetGroup(session.timeout));
  const auto is_lost = [&](const std::string& name) {
    return std::find(lost.begin(), lost.end(), name) != lost.end();
  };
  for (const GroupInfo::Member& member : info.members) {
    if (!is_lost(member.name) || member.missing.has_value()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("member \"", member.name,
                     "\" runs, or its process ended less than 10 s ago; to move its "
                     "partitions while it runs, use `emactl group rebalance MODEL --without ",
                     member.name, "`"));
  }
  absl::Status result;
  bool has_partition = false;
  for (const GroupInfo::Model& model : info.models) {
    std::vector<std::string> without;
    std::copy_if(model.members.begin(), model.members.end(), std::back_inserter(without), is_lost);
    if (without.empty()) continue;
    has_partition = true;
    result.Update(WithPrefix(RebalanceModel(session, model.name, without),
                             absl::StrCat("model \"", model.name, "\": ")));
  }
  if (has_partition) return result;
  return absl::NotFoundError(
      absl::StrCat("no model has a partition on ", absl::StrJoin(lost, ", ")));
}

}  // namespace ema::cli
