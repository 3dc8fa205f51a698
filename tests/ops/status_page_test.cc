// SPDX-License-Identifier: Apache-2.0
#include "server/ops/status_page.h"

#include <cmath>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kScript[] = "<script>alert('\"&')</script>";

ServerState StateWithModel() {
  ServerState state{.now = absl::FromUnixSeconds(2000), .start_time = absl::FromUnixSeconds(1000)};
  ServerState::Model& model = state.models.emplace_back();
  model.name = "digits";
  model.overview.step = 40;
  model.overview.version = {4, 1};
  model.overview.commit_time = absl::FromUnixSeconds(1995);
  return state;
}

std::vector<StatisticsPoint> HistoryOf(const std::string& track) {
  return {{10, {{track, 1, 4.0}}}, {20, {{track, 1, 2.0}}}, {30, {{track, 1, std::nullopt}}}};
}

TEST(StatusPageTest, EscapesEverythingThatHasAMeaningInHtml) {
  EXPECT_EQ(EscapeHtml("a<b>&\"'c"), "a&lt;b&gt;&amp;&quot;&#39;c");
}

TEST(StatusPageTest, NothingFromOutsideIsHtml) {
  ServerState state = StateWithModel();
  state.health = absl::UnavailableError(kScript);
  state.device = kScript;
  ServerState::Model& model = state.models[0];
  model.name = kScript;
  model.overview.tracks.push_back({.name = kScript, .config = kScript});
  model.history = HistoryOf(kScript);
  const std::string page = StatusPage(state, {{absl::FromUnixSeconds(1999), 1, kScript, kScript}});
  EXPECT_THAT(page, AllOf(HasSubstr("&lt;script&gt;"), Not(HasSubstr("<script"))));
}

TEST(StatusPageTest, ShowsHowAModelStands) {
  ServerState state = StateWithModel();
  state.has_data_dir = true;
  ModelOverview& overview = state.models[0].overview;
  overview.begun_step = 45;
  overview.durable_step = 30;
  overview.durable_version = {3, 1};
  overview.run = {.epoch = 7, .world_size = 4, .missing_ranks = {2, 3}};
  const std::string page = StatusPage(state, {});
  EXPECT_THAT(page, AllOf(HasSubstr("step 40, version 4"), HasSubstr("5 s ago"),
                          HasSubstr("<dd>5 steps</dd>"), HasSubstr("<dd>step 30</dd>"),
                          HasSubstr("run epoch 7, 4 ranks"), HasSubstr("not yet joined: 2, 3")));
}

TEST(StatusPageTest, SaysHowToGetDistances) {
  ServerState state = StateWithModel();
  EXPECT_THAT(StatusPage(state, {}), HasSubstr("--statistics-every-commits"));
  state.models[0].history = HistoryOf("ema");
  EXPECT_THAT(StatusPage(state, {}),
              AllOf(HasSubstr("<polyline"), Not(HasSubstr("--statistics-every-commits"))));
}

TEST(StatusPageTest, NeedsNothingFromElsewhere) {
  ServerState state = StateWithModel();
  state.models[0].history = HistoryOf("ema");
  EXPECT_THAT(StatusPage(state, {}),
              AllOf(Not(HasSubstr("http://")), Not(HasSubstr("https://")), Not(HasSubstr("src="))));
}

TEST(DistancePlotTest, PlotsWhatIsFinite) {
  EXPECT_EQ(DistancePlot({}), "");
  EXPECT_EQ(DistancePlot({{10, {{"ema", 1, std::nullopt}}}}), "");
  std::vector<StatisticsPoint> history = HistoryOf("ema");
  history.push_back({40, {{"ema", INFINITY, INFINITY}}});
  EXPECT_THAT(DistancePlot(history), AllOf(Not(HasSubstr("inf")), Not(HasSubstr("nan"))));
  EXPECT_THAT(DistancePlot({{10, {{"ema", 1, 0.0}}}}),
              AllOf(HasSubstr("<circle"), Not(HasSubstr("nan"))));
}

TEST(DistancePlotTest, HasABoundedNumberOfTracks) {
  std::vector<StatisticsPoint> history = {{1, {}}};
  for (int i = 0; i < 64; ++i) {
    history[0].tracks.push_back({"track" + std::to_string(i), 1, 1.0});
  }
  const std::string plot = DistancePlot(history);
  EXPECT_THAT(plot, AllOf(HasSubstr("track7<"), Not(HasSubstr("track8<"))));
}

}  // namespace
}  // namespace ema
