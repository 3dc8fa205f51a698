// SPDX-License-Identifier: Apache-2.0
#include "client/cli/server_commands.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/output.h"
#include "client/cli/progress.h"
#include "ema/internal/status_macros.h"

namespace ema::cli {
namespace {

Json ToJson(const Client::ServerInfo& info) {
  Json limits = Json::object();
  for (const Client::ServerInfo::Limit& limit : info.limits) {
    limits[limit.name] = {{"in_use", limit.in_use}, {"limit", limit.limit}};
  }
  return {{"version", info.version},
          {"device", info.device},
          {"incarnation", info.incarnation},
          {"start_time", info.start_time},
          {"serving", info.not_serving.empty()},
          {"not_serving", info.not_serving},
          {"memory",
           {{"budget_bytes", info.memory_budget_bytes},
            {"reserved_bytes", info.memory_reserved_bytes},
            {"used_bytes", info.memory_used_bytes}}},
          {"limits", std::move(limits)}};
}

}  // namespace

std::string DescribeServer(const Client::ServerInfo& info, absl::Time now) {
  const absl::Duration up = absl::Trunc(now - info.start_time, absl::Seconds(1));
  Table limits({"LIMIT", "IN USE", "OF"});
  for (const Client::ServerInfo::Limit& limit : info.limits) {
    limits.Add({limit.name, limit.in_use.has_value() ? absl::StrCat(*limit.in_use) : "-",
                limit.limit == 0 ? "unlimited" : absl::StrCat(limit.limit)});
  }
  return absl::StrCat(
      "ema-server ", info.version, " on ", info.device, ", incarnation ", info.incarnation, "\n",
      info.not_serving.empty() ? "SERVING" : absl::StrCat("NOT_SERVING: ", info.not_serving),
      // FormatDuration() prints less than a second in smaller units.
      ", up ", up < absl::Seconds(1) ? "0s" : absl::FormatDuration(up), "\n",
      "memory for models: ", FormatBytes(info.memory_reserved_bytes), " reserved of ",
      FormatBytes(info.memory_budget_bytes), ", ", FormatBytes(info.memory_used_bytes),
      " in use\n\n", limits.ToString());
}

absl::Status Info(const Session& session) {
  EMA_ASSIGN_OR_RETURN(const Client::ServerInfo info,
                       session.client->GetServerInfo(session.timeout));
  return PrintResult(session.json, ToJson(info), DescribeServer(info, absl::Now()));
}

absl::Status SetLogLevel(const Session& session, const std::string& level) {
  EMA_ASSIGN_OR_RETURN(const Client::LogLevels levels,
                       session.client->SetLogLevel(level, session.timeout));
  return PrintResult(session.json, {{"before", levels.before}, {"now", levels.now}},
                     absl::StrCat(levels.now, "\n"));
}

absl::Status Drain(const Session& session) {
  EMA_ASSIGN_OR_RETURN(const Client::DrainResult result, session.client->Drain(session.timeout));
  return PrintResult(
      session.json,
      {{"began", result.began},
       {"delay_seconds", absl::ToDoubleSeconds(result.delay)},
       {"grace_seconds", absl::ToDoubleSeconds(result.grace)}},
      absl::StrCat(result.began ? "draining" : "draining already", ": keeps serving for ",
                   absl::FormatDuration(result.delay), ", then stops within ",
                   absl::FormatDuration(result.grace), " plus the time to save\n"));
}

}  // namespace ema::cli
