// SPDX-License-Identifier: Apache-2.0
#include "server/group/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kFree = int64_t{1} << 50;

Candidates Members(size_t count, int64_t free_bytes = kFree) {
  Candidates members;
  for (size_t i = 0; i < count; ++i) {
    members[absl::StrCat("ema-", i)] = {.boot = absl::StrCat("boot-", i),
                                        .memory_budget_bytes = kFree,
                                        .free_memory_bytes = free_bytes};
  }
  return members;
}

// The bytes of each run of a placement on so many members. Expects that the runs have all tensors,
// that none is empty, and that there are as many as can be.
std::vector<int64_t> RunBytes(const std::vector<int64_t>& tensor_bytes, size_t member_count) {
  const auto partitions = PlaceTensors("model", tensor_bytes, Members(member_count));
  EXPECT_THAT(partitions, IsOk());
  if (!partitions.ok()) return {};
  EXPECT_EQ(partitions->size(), std::min(member_count, tensor_bytes.size()));
  std::vector<int64_t> runs;
  auto begin = tensor_bytes.begin();
  for (const Partition& partition : *partitions) {
    EXPECT_EQ(partition.first_tensor, begin - tensor_bytes.begin());
    EXPECT_GE(partition.tensor_count, 1);
    const auto end = begin + partition.tensor_count;
    runs.push_back(std::accumulate(begin, end, int64_t{0}));
    begin = end;
  }
  EXPECT_EQ(begin, tensor_bytes.end());
  return runs;
}

int64_t LargestRun(const std::vector<int64_t>& tensor_bytes, size_t member_count) {
  const std::vector<int64_t> runs = RunBytes(tensor_bytes, member_count);
  return runs.empty() ? -1 : *std::max_element(runs.begin(), runs.end());
}

// The same by trying all cuts: least[r][n] is of the first n tensors in r runs.
int64_t LargestRunOfBestCut(const std::vector<int64_t>& tensor_bytes, size_t run_count) {
  const size_t n = tensor_bytes.size();
  std::vector<std::vector<int64_t>> least(run_count + 1, std::vector<int64_t>(n + 1, INT64_MAX));
  least[0][0] = 0;
  for (size_t run = 1; run <= run_count; ++run) {
    for (size_t end = 1; end <= n; ++end) {
      int64_t last_run = 0;
      for (size_t begin = end; begin-- > 0;) {
        last_run += tensor_bytes[begin];
        least[run][end] = std::min(least[run][end], std::max(least[run - 1][begin], last_run));
      }
    }
  }
  return least[run_count][n];
}

TEST(PlacementTest, LargestRunIsTheSmallestPossible) {
  std::mt19937 random(47);
  for (int i = 0; i < 2000; ++i) {
    const size_t tensor_count = 1 + random() % 12;
    const size_t member_count = 1 + random() % 6;
    const uint32_t largest = 1 + random() % 40;  // Of 1: most tensors are empty.
    std::vector<int64_t> tensor_bytes(tensor_count);
    for (int64_t& bytes : tensor_bytes) bytes = random() % 3 == 0 ? 0 : random() % largest;
    ASSERT_EQ(LargestRun(tensor_bytes, member_count),
              LargestRunOfBestCut(tensor_bytes, std::min(tensor_count, member_count)))
        << member_count << " members, tensors " << testing::PrintToString(tensor_bytes);
  }
}

// The large tensor alone would permit one run of all others, and an empty one.
TEST(PlacementTest, OtherRunsAreEven) {
  EXPECT_THAT(RunBytes({90, 10, 10, 10, 10, 10, 10}, 4), ElementsAre(90, 20, 20, 20));
  EXPECT_THAT(RunBytes({10, 10, 10, 10, 10, 10, 90}, 4), ElementsAre(20, 20, 20, 90));
  EXPECT_THAT(RunBytes({0, 0, 7}, 5), ElementsAre(0, 0, 7));
}

// The bytes of the tensors of Llama 3 in float32, in the order of a state dict.
std::vector<int64_t> Llama(int64_t hidden, int64_t layer_count, int64_t intermediate) {
  const int64_t vocabulary = 128'256;
  const int64_t key_value = 1024;
  std::vector<int64_t> elements = {vocabulary * hidden};
  for (int64_t i = 0; i < layer_count; ++i) {
    elements.insert(elements.end(), {hidden * hidden, key_value * hidden, key_value * hidden,
                                     hidden * hidden, intermediate * hidden, intermediate * hidden,
                                     hidden * intermediate, hidden, hidden});
  }
  elements.insert(elements.end(), {hidden, vocabulary * hidden});
  for (int64_t& count : elements) count *= 4;
  return elements;
}

// The same of DeepSeek-V3, without the module that predicts further tokens. `are_stacked`: the
// experts of a layer are one tensor for each of their three matrices, as some trainers keep them.
std::vector<int64_t> DeepSeekV3(bool are_stacked) {
  const int64_t hidden = 7168;
  const int64_t vocabulary = 129'280;
  const int64_t head_count = 128;
  const int64_t query_rank = 1536;
  const int64_t key_value_rank = 512;
  const int64_t position_size = 64;  // Of a head's queries and keys; their other part has 128.
  const int64_t layer_count = 61;
  const int64_t dense_layer_count = 3;
  const int64_t expert_count = 256;  // Of a layer; and one that is always used.
  const int64_t dense_matrix = 18'432 * hidden;
  const int64_t expert_matrix = 2048 * hidden;
  std::vector<int64_t> elements = {vocabulary * hidden};
  for (int64_t i = 0; i < layer_count; ++i) {
    elements.insert(
        elements.end(),
        {query_rank * hidden, query_rank, head_count * (128 + position_size) * query_rank,
         (key_value_rank + position_size) * hidden, key_value_rank,
         head_count * (128 + 128) * key_value_rank, hidden * head_count * 128});
    if (i < dense_layer_count) {
      elements.insert(elements.end(), 3, dense_matrix);
    } else {
      const int64_t tensor_count = are_stacked ? 3 : 3 * expert_count;
      elements.insert(elements.end(), static_cast<size_t>(tensor_count),
                      3 * expert_count / tensor_count * expert_matrix);
      elements.insert(elements.end(), {expert_count * hidden, expert_count});  // The router.
      elements.insert(elements.end(), 3, expert_matrix);
    }
    elements.insert(elements.end(), {hidden, hidden});
  }
  elements.insert(elements.end(), {hidden, vocabulary * hidden});
  for (int64_t& count : elements) count *= 4;
  return elements;
}

int64_t Sum(const std::vector<int64_t>& tensor_bytes) {
  return std::accumulate(tensor_bytes.begin(), tensor_bytes.end(), int64_t{0});
}

// The bytes of the largest run, divided by those of a mean run.
double Imbalance(const std::vector<int64_t>& tensor_bytes, size_t member_count) {
  return static_cast<double>(LargestRun(tensor_bytes, member_count)) *
         static_cast<double>(member_count) / static_cast<double>(Sum(tensor_bytes));
}

TEST(PlacementTest, LlamaIsBalanced) {
  const std::vector<int64_t> llama_70b = Llama(8192, 80, 28'672);
  const std::vector<int64_t> llama_405b = Llama(16'384, 126, 53'248);
  ASSERT_EQ(Sum(llama_70b), 4 * int64_t{70'553'706'496});  // As published.
  EXPECT_NEAR(Imbalance(llama_70b, 2), 1.000, 0.001);
  EXPECT_NEAR(Imbalance(llama_70b, 8), 1.005, 0.001);
  EXPECT_NEAR(Imbalance(llama_70b, 16), 1.023, 0.001);
  EXPECT_NEAR(Imbalance(llama_70b, 64), 1.058, 0.001);
  EXPECT_NEAR(Imbalance(llama_70b, 100), 1.489, 0.001);  // The embedding.
  EXPECT_NEAR(Imbalance(llama_70b, 128), 1.906, 0.001);
  for (const size_t member_count : {8, 16, 32, 64, 128}) {
    EXPECT_NEAR(Imbalance(llama_405b, member_count), 1.005, 0.001) << member_count;
  }
}

TEST(PlacementTest, DeepSeekIsBalanced) {
  const std::vector<int64_t> experts_apart = DeepSeekV3(/*are_stacked=*/false);
  const std::vector<int64_t> experts_stacked = DeepSeekV3(/*are_stacked=*/true);
  ASSERT_EQ(Sum(experts_apart), 4 * int64_t{671'026'419'200});  // As published: 671 billion.
  ASSERT_EQ(Sum(experts_stacked), Sum(experts_apart));
  for (const size_t member_count : {2, 8, 16, 100}) {
    EXPECT_NEAR(Imbalance(experts_apart, member_count), 1.001, 0.001) << member_count;
  }
  EXPECT_NEAR(Imbalance(experts_stacked, 2), 1.003, 0.001);
  EXPECT_NEAR(Imbalance(experts_stacked, 8), 1.007, 0.001);
  EXPECT_NEAR(Imbalance(experts_stacked, 16), 1.008, 0.001);
  EXPECT_NEAR(Imbalance(experts_stacked, 100), 1.155, 0.001);
}

TEST(PlacementTest, NameOfTheModelChoosesTheHome) {
  // The CRC32C of "123456789" is 0xe3069283, which is 3 modulo 4.
  const auto partitions = PlaceTensors("123456789", {1, 1, 1}, Members(4));
  ASSERT_THAT(partitions, IsOk());
  EXPECT_THAT(*partitions, ElementsAre(Partition{"ema-3", "boot-3", 0, 1, 1},
                                       Partition{"ema-0", "boot-0", 1, 1, 1},
                                       Partition{"ema-1", "boot-1", 2, 1, 1}));

  std::map<std::string, int> homes;
  for (int i = 0; i < 400; ++i) {
    const auto placed = PlaceTensors(absl::StrCat("model-", i), {1, 1, 1, 1}, Members(4));
    ASSERT_THAT(placed, IsOk());
    ++homes[placed->front().member];
  }
  ASSERT_EQ(homes.size(), 4);
  for (const auto& [member, count] : homes) EXPECT_GT(count, 60) << member;
}

TEST(PlacementTest, MemberWithoutEnoughMemoryIsNamed) {
  const std::vector<int64_t> tensor_bytes = {100, 200, 100, 200, 100, 200, 100, 200};
  Candidates members = Members(4, /*free_bytes=*/300);
  ASSERT_THAT(PlaceTensors("123456789", tensor_bytes, members), IsOk());
  members["ema-0"].free_memory_bytes = 299;
  members["ema-0"].memory_budget_bytes = 400;
  EXPECT_THAT(
      PlaceTensors("123456789", tensor_bytes, members).status(),
      AllOf(StatusIs(absl::StatusCode::kResourceExhausted,
                     "model \"123456789\": partition 1, tensors 2 to 3, needs 300 bytes of member "
                     "\"ema-0\", 1 too many; 299 of its 400 are free"),
            ReasonIs(ErrorReason::kMemoryBudget)));
}

TEST(PlacementTest, PlacedModelsReduceFreeMemory) {
  const auto member = [](const std::string& boot) {
    return MemberRecord{.boot = boot, .memory_budget_bytes = 100};
  };
  ModelRecord first{.partitions = {{"a", "a1", 0, 1}, {"b", "b1", 1, 2}}};
  SetMemoryBytes({10, 20, 30}, first.partitions);
  EXPECT_EQ(TotalMemoryBytes(first.partitions), 60);
  // Counted also after a restart of the process. Members that have left are ignored.
  ModelRecord second{.partitions = {{"b", "b0", 0, 1}, {"gone", "g", 1, 1}}};
  SetMemoryBytes({70, 1}, second.partitions);
  const Candidates candidates =
      CandidatesFor("new", {{"a", member("a1")}, {"b", member("b1")}, {"c", member("c1")}},
                    {{"first", first}, {"second", second}});
  ASSERT_EQ(candidates.size(), 3);
  EXPECT_EQ(candidates.at("a").free_memory_bytes, 90);
  EXPECT_EQ(candidates.at("b").free_memory_bytes, 0);  // The models need 120 bytes.
  EXPECT_EQ(candidates.at("c").free_memory_bytes, 100);
  const Candidates for_second =
      CandidatesFor("second", {{"b", member("b1")}}, {{"first", first}, {"second", second}});
  EXPECT_EQ(for_second.at("b").free_memory_bytes, 50);
  EXPECT_EQ(candidates.at("b").boot, "b1");
  EXPECT_EQ(candidates.at("b").memory_budget_bytes, 100);
}

TEST(PlacementTest, GroupWithoutMembersIsUnavailable) {
  EXPECT_THAT(PlaceTensors("gpt", {1}, {}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no members")));
}

}  // namespace
}  // namespace ema::group
