// SPDX-License-Identifier: Apache-2.0
//
// Statistics of a model on a group of real servers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "ema/client.h"
#include "ema/error_reason.h"
#include "tests/group/trained_group.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::vector<float> FloatsOf(const std::string& bytes) {
  std::vector<float> floats(bytes.size() / sizeof(float));
  std::memcpy(floats.data(), bytes.data(), bytes.size());
  return floats;
}

// Of the tensors that "ema" averages: all but "t0".
TrackStatistics StatisticsOf(const TrainedGroup::Pulled& ema, const TrainedGroup::Pulled& raw) {
  double norm = 0;
  double distance = 0;
  for (const auto& [name, bytes] : ema.tensors) {
    if (name == "t0") continue;
    const std::vector<float> averages = FloatsOf(bytes);
    const std::vector<float> weights = FloatsOf(raw.tensors.at(name));
    for (size_t i = 0; i < averages.size(); ++i) {
      norm += double{averages[i]} * averages[i];
      const double difference = double{weights[i]} - averages[i];
      distance += difference * difference;
    }
  }
  return {.track = "ema", .norm = std::sqrt(norm), .distance = std::sqrt(distance)};
}

MATCHER_P(IsNear, expected, "") {
  constexpr double kLimit = 1e-14;  // Of the value.
  const auto is_near = [](double a, double b) { return std::abs(a - b) <= kLimit * b; };
  return arg.track == expected.track && is_near(arg.norm, expected.norm) &&
         arg.distance.has_value() && is_near(*arg.distance, *expected.distance);
}

TEST(GroupStatisticsTest, AreThoseOfAllTensors) {
  for (const int server_count : {1, 2, 3, 7}) {
    SCOPED_TRACE(server_count);
    TrainedGroup group(server_count, /*tensor_count=*/9);
    const auto run = group.Open();
    ASSERT_NE(run, nullptr);
    for (int64_t step = 1; step <= 3; ++step) ASSERT_THAT(Push(*run, step), IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled ema, group.Pull("ema"));
    EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled raw, group.Pull("raw"));
    EMA_ASSERT_OK_AND_ASSIGN(const Version record,
                             group.client().GetStatistics("m", {}, kPatience));
    EXPECT_EQ(record.number, 3);
    EXPECT_GT(*StatisticsOf(ema, raw).distance, 0);
    EXPECT_THAT(record.statistics, ElementsAre(IsNear(StatisticsOf(ema, raw))));
  }
}

TEST(GroupStatisticsTest, AreKeptInTheRecordOfTheHome) {
  TrainedGroup group(3, /*tensor_count=*/6);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  const auto remembered = [&] {
    const auto versions = group.client().ListVersions("m", 0, kPatience);
    EXPECT_THAT(versions, IsOk());
    return versions->at(0).version.statistics;
  };
  EXPECT_THAT(remembered(), IsEmpty());
  EMA_ASSERT_OK_AND_ASSIGN(const Version record, group.client().GetStatistics("m", {}, kPatience));
  ASSERT_THAT(record.statistics, SizeIs(1));
  EXPECT_THAT(remembered(), ElementsAre(IsNear(record.statistics[0])));
  // The second call needs no other server.
  const std::string home = group.Describe("m").partitions(0).address();
  for (const auto& server : group.servers_) {
    if (server->address() != home) server->Stop();
  }
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(home));
  EMA_ASSERT_OK_AND_ASSIGN(const Version same, client->GetStatistics("m", {}, kPatience));
  EXPECT_THAT(same.statistics, ElementsAre(IsNear(record.statistics[0])));
}

TEST(GroupStatisticsTest, APartitionMayAverageNothing) {
  // The home has only "t0", which "ema" copies.
  TrainedGroup group(2, /*tensor_count=*/2);
  const auto run = group.Open();
  ASSERT_NE(run, nullptr);
  ASSERT_THAT(Push(*run, 1), IsOk());
  ASSERT_THAT(Push(*run, 2), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled ema, group.Pull("ema", {.version = 1}));
  EMA_ASSERT_OK_AND_ASSIGN(const TrainedGroup::Pulled raw, group.Pull("raw", {.version = 1}));
  EMA_ASSERT_OK_AND_ASSIGN(
      const Version record,
      group.client().GetStatistics("m", {.id = {1}, .tracks = {"ema"}}, kPatience));
  EXPECT_EQ(record.number, 1);
  EXPECT_THAT(record.statistics, ElementsAre(IsNear(StatisticsOf(ema, raw))));
  EXPECT_THAT(group.client().GetStatistics("m", {.tracks = {"raw"}}, kPatience),
              ReasonIs(ErrorReason::kBadRequest));
  EXPECT_THAT(group.client().GetStatistics("m", {.tracks = {"none"}}, kPatience),
              ReasonIs(ErrorReason::kTrackNotFound));
  EXPECT_THAT(group.client().GetStatistics("m", {.id = {9}}, kPatience),
              ReasonIs(ErrorReason::kVersionNotYet));
}

}  // namespace
}  // namespace ema::group
