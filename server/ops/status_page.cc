// SPDX-License-Identifier: Apache-2.0
#include "server/ops/status_page.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "server/ops/options.h"

namespace ema {
namespace {

using Json = nlohmann::ordered_json;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

Json Usage(int64_t used, int64_t limit) { return {{"used", used}, {"limit", limit}}; }

Json TrackJson(const ModelOverview::Track& track) {
  Json json = {
      {"name", track.name},       {"schedule", track.config}, {"is_paused", track.is_paused},
      {"update_weight", nullptr}, {"norm", nullptr},          {"distance", nullptr}};
  if (track.update_weight > 0) json["update_weight"] = track.update_weight;
  if (track.statistics.has_value()) {
    json["norm"] = track.statistics->norm;
    if (track.statistics->distance.has_value()) json["distance"] = *track.statistics->distance;
  }
  return json;
}

Json ModelJson(const ServerState::Model& model) {
  const ModelOverview& overview = model.overview;
  Json json = {{"name", model.name},
               {"step", overview.step},
               {"version", overview.version.version},
               {"commit_time", UnixSeconds(overview.commit_time)},
               {"durable_step", nullptr},
               {"lag_steps", std::max<int64_t>(overview.begun_step - overview.step, 0)},
               {"reserved_bytes", overview.reserved_bytes},
               {"run", nullptr},
               {"session", nullptr},
               {"tracks", Json::array()},
               {"history", Json::array()}};
  if (overview.durable_version.version > 0) json["durable_step"] = overview.durable_step;
  if (const auto& run = overview.run; run.has_value()) {
    json["run"] = {{"epoch", run->epoch},
                   {"world_size", run->world_size},
                   {"is_ready", run->is_ready},
                   {"missing_ranks", run->missing_ranks}};
  }
  if (const auto& session = overview.session; session.has_value()) {
    json["session"] = {{"step", session->step},
                       {"age_seconds", absl::ToDoubleSeconds(session->age)},
                       {"missing_ranks", session->missing_ranks}};
  }
  for (const ModelOverview::Track& track : overview.tracks) {
    json["tracks"].push_back(TrackJson(track));
  }
  for (const StatisticsPoint& point : model.history) {
    Json distances = Json::object();
    for (const TrackStatistics& track : point.tracks) {
      if (track.distance.has_value()) distances[track.track] = *track.distance;
    }
    json["history"].push_back({{"step", point.step}, {"distances", std::move(distances)}});
  }
  return json;
}

Json GroupJson(const GroupInfo& group) {
  Json json = {{"name", group.group},
               {"member", group.member},
               {"registry_seconds", absl::ToDoubleSeconds(group.registry.since_contact)},
               {"registry_problem", group.registry.error},
               {"members", Json::array()},
               {"models", Json::array()},
               {"last_incident", group.last_incident},
               {"last_incident_time", UnixSeconds(group.last_incident_time)},
               {"problems", group.problems}};
  for (const GroupInfo::Member& member : group.members) {
    json["members"].push_back({{"name", member.name},
                               {"address", member.address},
                               {"device", member.device},
                               {"memory_budget_bytes", member.memory_budget_bytes},
                               {"missing_seconds", nullptr}});
    if (member.missing.has_value()) {
      json["members"].back()["missing_seconds"] = absl::ToDoubleSeconds(*member.missing);
    }
  }
  for (const GroupInfo::Model& model : group.models) {
    json["models"].push_back({{"name", model.name},
                              {"state", model.state},
                              {"home", model.members.empty() ? "" : model.members[0]},
                              {"incarnation", model.incarnation},
                              {"checkpoint_step", nullptr},
                              {"checkpoint_return_count", model.checkpoint_return_count}});
    if (model.checkpoint.has_value()) {
      json["models"].back()["checkpoint_step"] = model.checkpoint_step;
    }
  }
  return json;
}

}  // namespace

std::string StatusJson(const ServerState& state, const std::vector<Metrics::Problem>& problems) {
  const RpcUsage& usage = state.usage;
  const RpcLimits& limits = state.limits;
  Json json = {{"version", ServerVersion()},
               {"device", state.device},
               {"incarnation", state.incarnation},
               {"time", UnixSeconds(state.now)},
               {"start_time", UnixSeconds(state.start_time)},
               {"is_serving", state.health.ok()},
               {"problem", Message(state.health)},
               {"checkpoints_problem", Message(state.checkpoints_health)},
               {"has_data_dir", state.has_data_dir},
               {"statistics_every_commits", state.statistics_every_commits}};
  json["memory"] = {{"used", state.memory.reserved_bytes},
                    {"limit", state.memory.budget_bytes},
                    {"in_use_bytes", state.memory.device_use.block_bytes},
                    {"stream_bytes", state.memory.formula.stream_bytes}};
  json["usage"] = {{"models", Usage(static_cast<int64_t>(state.models.size()), state.max_models)},
                   {"push_streams", Usage(usage.push_streams, limits.max_push_streams)},
                   {"pull_streams", Usage(usage.pull_streams, limits.max_pull_streams)},
                   {"watch_streams", Usage(usage.watch_streams, limits.max_watch_streams)},
                   {"connections", Usage(usage.connections, limits.max_connections)}};
  json["models"] = Json::array();
  for (const ServerState::Model& model : state.models) json["models"].push_back(ModelJson(model));
  json["group"] = state.group.has_value() ? GroupJson(*state.group) : Json();
  json["problems"] = Json::array();
  for (const Metrics::Problem& problem : problems) {
    json["problems"].push_back({{"time", UnixSeconds(problem.time)},
                                {"what", problem.what},
                                {"count", problem.count},
                                {"text", problem.text}});
  }
  return json.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

}  // namespace ema
