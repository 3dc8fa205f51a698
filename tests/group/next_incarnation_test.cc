// SPDX-License-Identifier: Apache-2.0
#include "server/group/next_incarnation.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "tests/testutil/memory_registry.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

class NextIncarnationTest : public testing::Test {
 protected:
  std::unique_ptr<Member> Join(const std::string& name, const std::string& boot) {
    return *Member::Join({.group = "g",
                          .name = name,
                          .record = {.boot = boot, .address = name + ":1", .protocol = 1},
                          .registry = &registry_});
  }
  // Waits until the cache of `member` has the record.
  static ModelRecord Await(const Member& member, const ModelRecord& record) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (member.model("m") != record && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(member.model("m"), record);
    return record;
  }

  MemoryRegistry registry_;
  ModelRecord record_{
      .state = ModelRecord::State::kActive,
      .incarnation = 5,
      .partitions = {{.member = "a", .boot = "a1", .tensor_count = 2},
                     {.member = "b", .boot = "b1", .first_tensor = 2, .tensor_count = 1}},
      .checkpoints = {{.id = {3, 5}, .step = 30}, {.id = {4, 5}, .step = 40}}};
};

TEST_F(NextIncarnationTest, ARestartedMemberBeginsAnIncarnationFromTheNewestCheckpoint) {
  const auto member = Join("b", "b2");
  ASSERT_THAT(member->Write("m", record_, 0), IsOk());
  Await(*member, record_);
  ASSERT_TRUE(NamesEarlierProcess(*member, record_));
  ASSERT_THAT(
      BeginIncarnationAfterRestart(*member, /*checkpoints=*/nullptr, "m", record_, /*log=*/nullptr),
      IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, member->Read("m"));
  EXPECT_GT(stored->record.incarnation, 5);
  EXPECT_EQ(stored->record.base, (VersionId{4, 5}));
  EXPECT_EQ(stored->record.partitions[0].boot, "a1");
  EXPECT_EQ(stored->record.partitions[1].boot, "b2");
  EXPECT_FALSE(NamesEarlierProcess(*member, stored->record));
  // A member that has seen the first record only does not change the second one.
  const ModelRecord next = stored->record;
  EXPECT_THAT(BeginIncarnationAfterRestart(*member, nullptr, "m", record_, nullptr), IsOk());
  EXPECT_EQ((*member->Read("m"))->record, next);
}

TEST_F(NextIncarnationTest, AModelWithoutACheckpointIsErased) {
  record_.checkpoints.clear();
  const auto member = Join("b", "b2");
  ASSERT_THAT(member->Write("m", record_, 0), IsOk());
  ASSERT_THAT(BeginIncarnationAfterRestart(*member, nullptr, "m", record_, nullptr), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, member->Read("m"));
  EXPECT_FALSE(stored.has_value());
}

TEST_F(NextIncarnationTest, AModelWithoutACheckpointReturnsToItsCopy) {
  record_.checkpoints.clear();
  record_.copy = {{4, 5}, 40};
  const auto member = Join("b", "b2");
  ASSERT_THAT(member->Write("m", record_, 0), IsOk());
  ASSERT_THAT(BeginIncarnationAfterRestart(*member, nullptr, "m", record_, nullptr), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, member->Read("m"));
  ASSERT_TRUE(stored.has_value());
  EXPECT_EQ(stored->record.base, (VersionId{4, 5}));
  EXPECT_TRUE(stored->record.BeginsWithCopy());
}

TEST_F(NextIncarnationTest, OnlyTheProcessThatTheRegistryHasMayBeginAnIncarnation) {
  const auto other = Join("a", "a1");
  ASSERT_THAT(other->Write("m", record_, 0), IsOk());
  EXPECT_FALSE(NamesEarlierProcess(*other, record_));
  record_.partitions[0].boot = "a0";
  EXPECT_TRUE(NamesEarlierProcess(*other, record_));
  record_.state = ModelRecord::State::kCreating;
  EXPECT_FALSE(NamesEarlierProcess(*other, record_));
  record_.state = ModelRecord::State::kActive;
  // The key has expired: another process may have the name by now.
  ASSERT_THAT(other->Leave(), IsOk());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (NamesEarlierProcess(*other, record_) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_FALSE(NamesEarlierProcess(*other, record_));
}

}  // namespace
}  // namespace ema::group
