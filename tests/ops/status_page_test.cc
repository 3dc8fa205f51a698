// SPDX-License-Identifier: Apache-2.0
#include "server/ops/status_page.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ema {
namespace {

using nlohmann::json;

ServerState StateWithModel() {
  ServerState state{.now = absl::FromUnixSeconds(2000), .start_time = absl::FromUnixSeconds(1000)};
  ServerState::Model& model = state.models.emplace_back();
  model.name = "digits";
  model.overview.step = 40;
  model.overview.version = {4, 1};
  model.overview.commit_time = absl::FromUnixSeconds(1995);
  return state;
}

json Parsed(const ServerState& state, const std::vector<Metrics::Problem>& problems = {}) {
  return json::parse(StatusJson(state, problems));
}

TEST(StatusJsonTest, HasTheServersState) {
  ServerState state = StateWithModel();
  state.max_models = 64;
  state.usage.push_streams = 3;
  state.limits.max_push_streams = 8;
  state.memory.reserved_bytes = 10;
  state.memory.budget_bytes = 20;
  json status = Parsed(state);
  EXPECT_EQ(status["is_serving"], true);
  EXPECT_EQ(status["time"], 2000);
  EXPECT_EQ(status["start_time"], 1000);
  EXPECT_EQ(status["usage"]["models"], json({{"used", 1}, {"limit", 64}}));
  EXPECT_EQ(status["usage"]["push_streams"], json({{"used", 3}, {"limit", 8}}));
  EXPECT_EQ(status["memory"]["used"], 10);
  EXPECT_EQ(status["memory"]["limit"], 20);
  state.health = absl::UnavailableError("recovering");
  state.checkpoints_health = absl::UnavailableError("read-only");
  status = Parsed(state);
  EXPECT_EQ(status["is_serving"], false);
  EXPECT_EQ(status["problem"], "recovering");
  EXPECT_EQ(status["checkpoints_problem"], "read-only");
}

TEST(StatusJsonTest, HasTheStateOfEachModel) {
  ServerState state = StateWithModel();
  ModelOverview& overview = state.models[0].overview;
  EXPECT_EQ(Parsed(state)["models"][0]["durable_step"], nullptr);
  EXPECT_EQ(Parsed(state)["models"][0]["run"], nullptr);
  overview.begun_step = 45;
  overview.durable_step = 30;
  overview.durable_version = {3, 1};
  overview.run = {.epoch = 7, .world_size = 4, .missing_ranks = {2, 3}};
  overview.session = {.step = 45, .age = absl::Seconds(2), .missing_ranks = {1}};
  overview.tracks.push_back({.name = "ema",
                             .config = "half_life=4ba",
                             .is_paused = true,
                             .update_weight = 0.5,
                             .statistics = TrackStatistics{"ema", 2.0, 1.0}});
  const json model = Parsed(state)["models"][0];
  EXPECT_EQ(model["name"], "digits");
  EXPECT_EQ(model["step"], 40);
  EXPECT_EQ(model["version"], 4);
  EXPECT_EQ(model["commit_time"], 1995);
  EXPECT_EQ(model["lag_steps"], 5);
  EXPECT_EQ(model["durable_step"], 30);
  EXPECT_EQ(
      model["run"],
      json({{"epoch", 7}, {"world_size", 4}, {"is_ready", false}, {"missing_ranks", {2, 3}}}));
  EXPECT_EQ(model["session"],
            json({{"step", 45}, {"age_seconds", 2.0}, {"missing_ranks", json::array({1})}}));
  EXPECT_EQ(model["tracks"][0], json({{"name", "ema"},
                                      {"schedule", "half_life=4ba"},
                                      {"is_paused", true},
                                      {"update_weight", 0.5},
                                      {"norm", 2.0},
                                      {"distance", 1.0}}));
}

TEST(StatusJsonTest, HasTheGroup) {
  ServerState state = StateWithModel();
  EXPECT_EQ(Parsed(state)["group"], nullptr);
  GroupInfo& group = state.group.emplace();
  group.group = "g";
  group.member = "ema-0";
  group.registry.error = "no answer";
  group.registry.since_contact = absl::Seconds(3);
  group.members = {{.name = "ema-0", .address = "a:1", .device = "cpu", .memory_budget_bytes = 9},
                   {.name = "ema-1", .missing = absl::Seconds(5)}};
  group.models = {{.name = "m",
                   .state = "degraded",
                   .incarnation = 7,
                   .members = {"ema-1", "ema-0"},
                   .checkpoint = VersionId{4, 7},
                   .checkpoint_step = 40,
                   .checkpoint_return_count = 2}};
  group.problems = {"member \"ema-1\" is missing"};
  const json shown = Parsed(state)["group"];
  EXPECT_EQ(shown["name"], "g");
  EXPECT_EQ(shown["member"], "ema-0");
  EXPECT_EQ(shown["registry_seconds"], 3);
  EXPECT_EQ(shown["registry_problem"], "no answer");
  EXPECT_EQ(shown["members"][0], json({{"name", "ema-0"},
                                       {"address", "a:1"},
                                       {"device", "cpu"},
                                       {"memory_budget_bytes", 9},
                                       {"missing_seconds", nullptr}}));
  EXPECT_EQ(shown["members"][1]["missing_seconds"], 5);
  EXPECT_EQ(shown["models"], json::array({{{"name", "m"},
                                           {"state", "degraded"},
                                           {"home", "ema-1"},
                                           {"incarnation", 7},
                                           {"checkpoint_step", 40},
                                           {"checkpoint_return_count", 2}}}));
  EXPECT_EQ(shown["problems"], json::array({"member \"ema-1\" is missing"}));
}

TEST(StatusJsonTest, HasDistancesByStepWithNullForNonFiniteOnes) {
  ServerState state = StateWithModel();
  state.models[0].history = {{10, {{"ema", 1, 4.0}, {"raw", 1, std::nullopt}}},
                             {20, {{"ema", INFINITY, INFINITY}}}};
  EXPECT_EQ(Parsed(state)["models"][0]["history"],
            json::array({{{"step", 10}, {"distances", {{"ema", 4.0}}}},
                         {{"step", 20}, {"distances", {{"ema", nullptr}}}}}));
}

TEST(StatusJsonTest, IsValidWhateverNamesAndMessagesContain) {
  const std::string hostile = "</script>\"\\\n\x01\xff";
  ServerState state = StateWithModel();
  state.models[0].name = hostile;
  state.models[0].history = {{10, {{hostile, 1, 4.0}}}};
  const json status = Parsed(state, {{absl::FromUnixSeconds(1999), 3, "Push", hostile}});
  const std::string replaced = "</script>\"\\\n\x01\xef\xbf\xbd";
  EXPECT_EQ(status["models"][0]["name"], replaced);
  EXPECT_EQ(status["problems"][0],
            json({{"time", 1999.0}, {"what", "Push"}, {"count", 3}, {"text", replaced}}));
}

}  // namespace
}  // namespace ema
