// SPDX-License-Identifier: Apache-2.0
#include "tests/group/group_simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/testutil/campaign.h"

namespace ema::group {
namespace {

struct Violation {
  int64_t schedules = 0;  // That were tried until it was found.
  std::string what;       // Empty: none was found.
  std::string trace;
};

// Tries schedules until one violates something. Of those that do among it and the next thousand,
// returns the one with the fewest events, as the easiest to read.
Violation FindViolation(uint64_t seed, int64_t count, Mutation mutation,
                        GroupSimulation::Counts& counts) {
  constexpr int64_t kMore = 1000;
  Violation found;
  uint64_t shortest_seed = 0;
  int64_t shortest = INT64_MAX;
  for (int64_t i = 0; i < count; ++i) {
    GroupSimulation simulation(seed + static_cast<uint64_t>(i), mutation, false);
    const std::string& what = simulation.Run();
    counts += simulation.counts();
    if (what.empty()) continue;
    if (found.what.empty()) {
      found.schedules = i + 1;
      count = std::min(count, i + kMore);
    }
    if (simulation.counts().events >= shortest) continue;
    shortest = simulation.counts().events;
    shortest_seed = seed + static_cast<uint64_t>(i);
    found.what = what;
  }
  if (found.what.empty()) return found;
  GroupSimulation simulation(shortest_seed, mutation, true);
  simulation.Run();
  found.trace = absl::StrCat("seed ", shortest_seed, "\n", simulation.trace());
  return found;
}

uint64_t Seed() { return static_cast<uint64_t>(CampaignSeed()) << 32; }

TEST(GroupSimulationTest, NoScheduleViolatesAProperty) {
  const int64_t count = IsCampaign() ? 1000000 : 40000;
  GroupSimulation::Counts counts;
  const Violation found = FindViolation(Seed(), count, Mutation::kNone, counts);
  EXPECT_EQ(found.what, "") << found.trace;

  const auto mean = [&](int64_t total) {
    return static_cast<double>(total) / static_cast<double>(count);
  };
  std::cout << count << " schedules; in one on average " << mean(counts.events) << " events, "
            << mean(counts.commits) << " commits, " << mean(counts.publications)
            << " publications, " << mean(counts.aborts) << " aborts, " << mean(counts.crashes)
            << " crashes, " << mean(counts.zombies) << " zombies, " << mean(counts.reads)
            << " reads\n";
  EXPECT_GT(mean(counts.commits), 2);
  EXPECT_GT(mean(counts.aborts), 1);
  EXPECT_GT(mean(counts.crashes), 1);
  EXPECT_GT(mean(counts.reads), 1);
}

class MutationTest : public testing::TestWithParam<Mutation> {};

TEST_P(MutationTest, IsFound) {
  GroupSimulation::Counts counts;
  const Violation found = FindViolation(Seed(), 20000, GetParam(), counts);
  EXPECT_NE(found.what, "");
  std::cout << found.what << ": found in schedule " << found.schedules << "\n";
}

INSTANTIATE_TEST_SUITE_P(Group, MutationTest,
                         testing::Values(Mutation::kPreparedDropsStep, Mutation::kNoRounds,
                                         Mutation::kNoNewIncarnation, Mutation::kRejoinKeepsRound));

}  // namespace
}  // namespace ema::group
