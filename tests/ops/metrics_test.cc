// SPDX-License-Identifier: Apache-2.0
#include "server/ops/metrics.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

absl::Status Rejected() {
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kStaleStep, "step 3 is not after 4");
}

TEST(MetricsTest, AModelHasAllItsSeriesFromTheStart) {
  Metrics metrics;
  metrics.OnModelCreated("m");
  const std::string text = metrics.Text({});
  for (const char* const line :
       {"ema_pushes_total{model=\"m\",result=\"committed\"} 0",
        "ema_pushes_total{model=\"m\",result=\"dropped\"} 0",
        "ema_push_received_bytes_total{model=\"m\"} 0", "ema_skipped_tensors_total{model=\"m\"} 0",
        "ema_pulls_total{model=\"m\",result=\"ok\"} 0",
        "ema_pulls_total{model=\"m\",result=\"no_version\"} 0",
        "ema_pulls_total{model=\"m\",result=\"failed\"} 0",
        "ema_pull_sent_bytes_total{model=\"m\"} 0",
        "ema_checkpoint_saves_total{model=\"m\",result=\"ok\"} 0",
        "ema_push_duration_seconds_count{model=\"m\"} 0",
        "ema_push_phase_seconds_count{model=\"m\",phase=\"fold\"} 0",
        "ema_pull_duration_seconds_count{model=\"m\"} 0",
        "ema_checkpoint_save_duration_seconds_count{model=\"m\"} 0",
        "ema_connections_refused_total{reason=\"limit\"} 0",
        "ema_connections_refused_total{reason=\"lanes\"} 0"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat(line, "\n")));
  }
}

TEST(MetricsTest, EventsAreCounted) {
  Metrics metrics;
  metrics.OnModelCreated("m");
  metrics.OnStepEnded(
      {.model = "m", .step = 1, .duration = absl::Seconds(2), .skipped_tensor_count = 3});
  metrics.OnStepEnded({.model = "m", .step = 2, .status = Rejected()});
  metrics.OnPushEnded({.model = "m",
                       .received_bytes = 100,
                       .phases = PushPhases{absl::Seconds(1), absl::Seconds(2), absl::Seconds(3),
                                            absl::Seconds(4)}});
  metrics.OnPushEnded({.model = "m", .received_bytes = 20});
  metrics.OnPullEnded({.model = "m", .sent_bytes = 50, .duration = absl::Seconds(1)});
  metrics.OnPullEnded({.model = "m", .status = Rejected(), .sent_bytes = 1});
  for (const ErrorReason reason : {ErrorReason::kVersionNotKept, ErrorReason::kNoVersion}) {
    metrics.OnPullEnded(
        {.model = "m", .status = MakeError(absl::StatusCode::kOutOfRange, reason, "version 3")});
  }
  metrics.OnSaveEnded({.model = "m", .duration = absl::Seconds(1)});
  metrics.OnSaveEnded({.model = "m", .status = absl::UnavailableError("the disk")});
  metrics.OnRpcEnded("Push", Rejected());
  metrics.OnRpcEnded("Push", absl::OkStatus());
  metrics.OnConnectionRefused(ServerObserver::Refusal::kLimit);
  const std::string text = metrics.Text({});
  for (const char* const line :
       {"ema_pushes_total{model=\"m\",result=\"committed\"} 1",
        "ema_pushes_total{model=\"m\",result=\"dropped\"} 1",
        "ema_push_received_bytes_total{model=\"m\"} 120",
        "ema_skipped_tensors_total{model=\"m\"} 3", "ema_push_duration_seconds_sum{model=\"m\"} 2",
        "ema_push_phase_seconds_sum{model=\"m\",phase=\"receive\"} 1",
        "ema_push_phase_seconds_sum{model=\"m\",phase=\"commit\"} 4",
        "ema_push_phase_seconds_count{model=\"m\",phase=\"wait\"} 1",
        "ema_pulls_total{model=\"m\",result=\"ok\"} 1",
        "ema_pulls_total{model=\"m\",result=\"no_version\"} 2",
        "ema_pulls_total{model=\"m\",result=\"failed\"} 1",
        "ema_pull_sent_bytes_total{model=\"m\"} 51",
        "ema_pull_duration_seconds_count{model=\"m\"} 1",
        "ema_checkpoint_saves_total{model=\"m\",result=\"failed\"} 1",
        "ema_checkpoint_save_duration_seconds_count{model=\"m\"} 1",
        "ema_rpcs_total{rpc=\"Push\",code=\"ABORTED\"} 1",
        "ema_rpcs_total{rpc=\"Push\",code=\"OK\"} 1",
        "ema_rejects_total{rpc=\"Push\",reason=\"STALE_STEP\"} 1",
        "ema_connections_refused_total{reason=\"limit\"} 1"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat(line, "\n")));
  }
}

TEST(MetricsTest, ADeletedModelHasNoSeriesAndGetsNone) {
  Metrics metrics;
  metrics.OnModelCreated("m");
  metrics.OnModelDeleted("m");
  metrics.OnStepEnded({.model = "m", .status = Rejected()});
  metrics.OnPushEnded({.model = "m", .received_bytes = 20});
  metrics.OnPullEnded({.model = "nonsense", .status = Rejected()});
  metrics.OnSaveEnded({.model = "m", .duration = absl::Seconds(1)});
  EXPECT_THAT(metrics.Text({}), AllOf(Not(HasSubstr("model=")), Not(HasSubstr("nonsense"))));
  metrics.OnModelCreated("m");
  EXPECT_THAT(metrics.Text({}), HasSubstr("ema_push_received_bytes_total{model=\"m\"} 0\n"));
}

TEST(MetricsTest, AStateIsShownAsItIs) {
  Metrics metrics;
  metrics.OnModelCreated("m");
  ServerState state{.health = absl::UnavailableError("recovering"), .device = "cpu"};
  ServerState::Model& model = state.models.emplace_back();
  model.name = "m";
  model.overview.step = 40;
  model.overview.version = {4, 1};
  model.overview.commit_time = absl::FromUnixSeconds(1000);
  model.overview.durable_step = 30;
  model.overview.durable_commit_time = absl::FromUnixSeconds(900);
  model.overview.begun_step = 45;
  model.overview.tracks.push_back(
      {.name = "ema", .update_weight = 0.25, .statistics = TrackStatistics{"ema", 3, 0.5}});
  state.workers.push_back({"rpc-0", Heartbeats::NeededFor::kServing, std::chrono::seconds(2)});
  const std::string text = metrics.Text(state);
  for (const char* const line :
       {"ema_model_step{model=\"m\"} 40", "ema_model_version{model=\"m\"} 4",
        "ema_model_durable_step{model=\"m\"} 30", "ema_model_unsaved_steps{model=\"m\"} 10",
        "ema_model_lag_steps{model=\"m\"} 5",
        "ema_model_last_commit_timestamp_seconds{model=\"m\"} 1000",
        "ema_checkpoint_last_success_timestamp_seconds{model=\"m\"} 900",
        "ema_track_norm{model=\"m\",track=\"ema\"} 3",
        "ema_track_distance{model=\"m\",track=\"ema\"} 0.5",
        "ema_track_update_weight{model=\"m\",track=\"ema\"} 0.25",
        "ema_worker_heartbeat_age_seconds{worker=\"rpc-0\",need=\"serving\"} 2",
        "ema_health_serving 0", "ema_device_usable 1", "ema_models 1"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat(line, "\n")));
  }
}

TEST(MetricsTest, AGroupIsShownAsItIs) {
  Metrics metrics;
  ServerState state{.save_interval = absl::Minutes(10)};
  EXPECT_THAT(metrics.Text(state), AllOf(HasSubstr("ema_save_interval_seconds 600\n"),
                                         Not(HasSubstr("ema_group_members"))));
  GroupInfo& group = state.group.emplace();
  group.registry.since_contact = absl::Seconds(3);
  group.members = {{.name = "ema-0"}, {.name = "ema-1", .missing = absl::Seconds(5)}};
  group.models = {{.name = "m",
                   .incarnation = 1'700'000'000'000'001,
                   .copy_step = 52,
                   .progress = GroupInfo::Progress{.round = 42, .checkpoint_age = absl::Minutes(1)},
                   .degraded = absl::Seconds(5),
                   .checkpoint_return_count = 2,
                   .commit_wait = absl::Seconds(1.5)},
                  {.name = "elsewhere"}};
  const std::string text = metrics.Text(state);
  for (const char* const line :
       {"ema_group_members 1", "ema_group_registry_contact_age_seconds 3",
        "ema_group_incarnation{model=\"m\"} 1700000000000001",
        "ema_group_degraded_seconds{model=\"m\"} 5",
        "ema_group_degraded_seconds{model=\"elsewhere\"} 0",
        "ema_group_checkpoint_returns_total{model=\"m\"} 2",
        "ema_group_commit_wait_seconds_total{model=\"m\"} 1.5", "ema_group_round{model=\"m\"} 42",
        "ema_group_checkpoint_age_seconds{model=\"m\"} 60",
        "ema_group_copy_step{model=\"m\"} 52"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat(line, "\n")));
  }
  EXPECT_THAT(text, Not(HasSubstr("ema_group_round{model=\"elsewhere\"}")));
}

TEST(MetricsTest, AFollowerShowsItsLag) {
  Metrics metrics;
  ServerState state{.now = absl::FromUnixSeconds(1000)};
  EXPECT_THAT(metrics.Text(state), Not(HasSubstr("ema_follow_")));
  state.follow_contact = absl::FromUnixSeconds(993);
  EXPECT_THAT(metrics.Text(state), HasSubstr("ema_follow_contact_age_seconds 7\n"));
}

TEST(MetricsTest, ASaveOfWhatNoRestartLoadsIsNoLastSuccess) {
  Metrics metrics;
  metrics.OnModelCreated("m");
  ServerState state;
  state.models.emplace_back().name = "m";
  const auto has_time = [&] {
    return metrics.Text(state).find("ema_checkpoint_last_success_timestamp_seconds{") !=
           std::string::npos;
  };
  metrics.OnSaveEnded({.model = "m"});
  EXPECT_FALSE(has_time());
  EXPECT_THAT(metrics.Text(state), HasSubstr("ema_checkpoint_saves_total"));
  metrics.OnSaveEnded({.model = "m", .is_newest = true});
  EXPECT_TRUE(has_time());
}

TEST(MetricsTest, AModelWithoutAVersionHasNoTimes) {
  Metrics metrics;
  metrics.OnModelCreated("m");
  ServerState state;
  state.models.emplace_back().name = "m";
  EXPECT_THAT(metrics.Text(state),
              AllOf(HasSubstr("ema_model_step{model=\"m\"} 0\n"),
                    Not(HasSubstr("ema_model_last_commit_timestamp_seconds{")),
                    Not(HasSubstr("ema_checkpoint_last_success_timestamp_seconds{"))));
}

TEST(MetricsTest, ProblemsAreNewestFirstAndBounded) {
  Metrics metrics;
  for (int i = 0; i < 100; ++i) metrics.OnProblem(absl::StrCat("problem ", i));
  const auto problems = metrics.Problems();
  ASSERT_THAT(problems, SizeIs(Metrics::kMaxProblems));
  EXPECT_EQ(problems[0].text, "problem 99");
  EXPECT_EQ(problems[1].text, "problem 98");
}

TEST(MetricsTest, TheSameProblemOfAStepAndItsCallsIsOne) {
  Metrics metrics;
  metrics.OnModelCreated("m");
  metrics.OnStepEnded({.model = "m", .status = Rejected()});
  metrics.OnRpcEnded("Push", Rejected());
  metrics.OnRpcEnded("Push", Rejected());
  const auto is_of = [](int64_t count) {
    return ElementsAre(
        AllOf(Field(&Metrics::Problem::count, count), Field(&Metrics::Problem::what, "step")));
  };
  EXPECT_THAT(metrics.Problems(), is_of(1));
  metrics.OnStepEnded({.model = "m", .status = Rejected()});
  metrics.OnRpcEnded("Push", Rejected());
  EXPECT_THAT(metrics.Problems(), is_of(2));
}

TEST(MetricsTest, TheSameProblemOfSeveralCallsIsCounted) {
  Metrics metrics;
  metrics.OnRpcEnded("Pull", Rejected());
  metrics.OnRpcEnded("GetModel", Rejected());
  metrics.OnRpcEnded("GetModel", Rejected());
  EXPECT_THAT(metrics.Problems(), ElementsAre(Field(&Metrics::Problem::count, 3)));
}

TEST(MetricsTest, WhatClientsMeetInTheOrdinaryCourseIsNoProblem) {
  Metrics metrics;
  metrics.OnRpcEnded("Push", MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                                       "come back", absl::Milliseconds(20)));
  metrics.OnRpcEnded("Pull", absl::CancelledError("client cancelled the call"));
  EXPECT_THAT(metrics.Problems(), IsEmpty());
}

TEST(MetricsTest, WhatAnybodyMayCallIsCountedAndNoProblem) {
  Metrics metrics;
  metrics.OnProbeEnded("Check", Rejected());
  EXPECT_THAT(metrics.Text({}), HasSubstr("ema_rpcs_total{rpc=\"Check\",code=\"ABORTED\"} 1\n"));
  EXPECT_THAT(metrics.Problems(), IsEmpty());
}

}  // namespace
}  // namespace ema
