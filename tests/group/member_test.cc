// SPDX-License-Identifier: Apache-2.0
#include "server/group/member.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "tests/testutil/memory_registry.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::Pair;

constexpr int64_t kIncarnation = 1'760'000'000;

MemberRecord RecordOf(const std::string& boot) {
  return {.boot = boot,
          .address = "host-of-" + boot + ":50051",
          .device = "cpu",
          .memory_budget_bytes = 1000,
          .program_version = "1",
          .protocol = 1};
}

ModelRecord ModelOn(const std::string& member, const std::string& boot) {
  return {.state = ModelRecord::State::kActive,
          .incarnation = kIncarnation,
          .partitions = {{member, boot, 0, 3}}};
}

class MemberTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Member>> Join(const std::string& name, const std::string& boot,
                                               absl::Duration ttl = absl::Seconds(10)) {
    return Member::Join({.group = "g",
                         .name = name,
                         .record = RecordOf(boot),
                         .registry = &registry_,
                         .ttl = ttl,
                         .log = [this](const LogEvent& event) {
                           if (on_log_) on_log_();
                           absl::MutexLock lock(&mu_);
                           log_.push_back(ToText(event));
                           changed_.WakeAll();
                         }});
  }
  // Returns when `predicate`, which reads `member`, is true, or after a long time. To be called
  // once for each member.
  template <typename Predicate>
  bool AwaitChange(Member& member, const Predicate& predicate) {
    member.SetOnChange([this] {
      absl::MutexLock lock(&mu_);
      changed_.WakeAll();
    });
    absl::MutexLock lock(&mu_);
    return changed_.AwaitUntil(mu_, After(SteadyNow(), absl::Seconds(20)), predicate);
  }
  std::vector<std::string> log() {
    absl::MutexLock lock(&mu_);
    return log_;
  }

  absl::Mutex mu_;
  SteadyWait changed_;
  std::vector<std::string> log_ ABSL_GUARDED_BY(mu_);
  std::function<void()> on_log_;  // Set while no other thread logs.
  MemoryRegistry registry_;
};

TEST_F(MemberTest, JoinedMembersKnowEachOther) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Join("a", "b1"));
  EXPECT_THAT(a->members(), ElementsAre(Pair("a", RecordOf("b1"))));
  EXPECT_THAT(a->models(), IsEmpty());
  EMA_ASSERT_OK_AND_ASSIGN(auto b, Join("b", "b2"));
  EXPECT_THAT(b->members(), ElementsAre(Pair("a", RecordOf("b1")), Pair("b", RecordOf("b2"))));
  EXPECT_EQ(b->AddressOf("a", "b1"), "host-of-b1:50051");
  EXPECT_EQ(b->AddressOf("a", "b0"), std::nullopt);
  EXPECT_EQ(b->AddressOf("c", "b1"), std::nullopt);

  EXPECT_THAT(b->Leave(), IsOk());
  EXPECT_TRUE(AwaitChange(*a, [&] { return a->members().size() == 1; }));
  EXPECT_EQ(a->AddressOf("b", "b2"), std::nullopt);
  EXPECT_THAT(log(), IsEmpty());
}

TEST_F(MemberTest, GroupsAndPrefixesOfNamesAreApart) {
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto other,
      registry_.Join("/ema/g2/members/a", FormatMemberRecord(RecordOf("b0")), absl::Seconds(10)));
  EMA_ASSERT_OK_AND_ASSIGN(const auto a1, Join("a1", "b1"));
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Join("a", "b2"));
  EXPECT_THAT(a->members(), ElementsAre(Key("a"), Key("a1")));
}

TEST_F(MemberTest, NameOfARunningProcessIsRefused) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Join("a", "b1"));
  // A negative TTL, so that Join() waits for a moment only.
  EXPECT_THAT(Join("a", "b2", -absl::Seconds(5)),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       AllOf(HasSubstr("group \"g\": the process at host-of-b1:50051 is member "
                                       "\"a\""),
                             HasSubstr("--member"))));
  EXPECT_THAT(log(), ElementsAre(HasSubstr("member name in use member=a")));
  EXPECT_THAT(a->members(), ElementsAre(Pair("a", RecordOf("b1"))));
}

TEST_F(MemberTest, KeyOfAnEarlierLifeIsWaitedFor) {
  EMA_ASSERT_OK_AND_ASSIGN(auto crashed, Join("a", "b1"));
  on_log_ = [&] { crashed.reset(); };  // Its key expires during the wait.
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Join("a", "b2", absl::Minutes(1)));
  EXPECT_THAT(log(), ElementsAre(HasSubstr("member name in use")));
  EXPECT_THAT(a->members(), ElementsAre(Pair("a", RecordOf("b2"))));
}

TEST_F(MemberTest, JoinSaysThatTheRegistryDoesNotAnswer) {
  registry_.SetUnavailable(true);
  EXPECT_THAT(Join("a", "b1"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("is unavailable")));
}

TEST_F(MemberTest, RecordIsReplacedOnlyByWhoHasReadIt) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Join("a", "b1"));
  EMA_ASSERT_OK_AND_ASSIGN(const auto b, Join("b", "b2"));
  const ModelRecord first = ModelOn("a", "b1");
  EXPECT_THAT(a->Read("m"), IsOkAndHolds(Eq(std::nullopt)));
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t created, a->Write("m", first, 0));
  EXPECT_THAT(b->Write("m", first, 0), StatusIs(absl::StatusCode::kAborted, HasSubstr("models/m")));

  EMA_ASSERT_OK_AND_ASSIGN(const auto read, b->Read("m"));
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->record, first);
  EXPECT_EQ(read->revision, created);
  ModelRecord second = first;
  ++second.incarnation;
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t changed, b->Write("m", second, created));
  EXPECT_THAT(a->Write("m", first, created), StatusIs(absl::StatusCode::kAborted, testing::_));
  EXPECT_TRUE(AwaitChange(*a, [&] { return a->model("m") == second; }));
  EXPECT_THAT(a->models(), ElementsAre(Pair("m", second)));

  EXPECT_THAT(a->Erase("m", created), StatusIs(absl::StatusCode::kAborted, testing::_));
  EXPECT_THAT(a->Erase("m", changed), IsOk());
  EXPECT_TRUE(AwaitChange(*b, [&] { return b->models().empty(); }));
  EXPECT_EQ(b->model("m"), std::nullopt);
}

TEST_F(MemberTest, InvalidRecordIsNotWritten) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Join("a", "b1"));
  EXPECT_THAT(a->Write("m", ModelRecord(), 0),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("/ema/g/models/m")));
  EXPECT_THAT(a->Read("m"), IsOkAndHolds(Eq(std::nullopt)));
}

TEST_F(MemberTest, DamagedRecordIsLoggedOnceAndLeftOut) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Join("a", "b1"));
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t good, a->Write("m", ModelOn("a", "b1"), 0));
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t bad,
                           registry_.CompareAndPut("/ema/g/models/m", good, "{"));
  EXPECT_TRUE(AwaitChange(*a, [&] { return a->models().empty() && log_.size() == 1; }));
  // All keys are reported again.
  registry_.SetUnavailable(true);
  registry_.SetUnavailable(false);
  EMA_ASSERT_OK_AND_ASSIGN(const auto b, Join("b", "b2"));
  EXPECT_THAT(b->models(), IsEmpty());
  while (a->members().size() < 2) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_THAT(a->Read("m"), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("/ema/g/models/m")));
  EXPECT_THAT(a->Write("m", ModelOn("a", "b1"), bad), IsOk());
  while (!a->model("m").has_value()) absl::SleepFor(absl::Milliseconds(1));
  // One line of each member.
  EXPECT_THAT(log(), Each(HasSubstr("registry record damaged key=/ema/g/models/m")));
  EXPECT_EQ(log().size(), 2);
}

TEST_F(MemberTest, OutageKeepsTheCache) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Join("a", "b1"));
  EMA_ASSERT_OK_AND_ASSIGN(const auto b, Join("b", "b2"));
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t revision, b->Write("m", ModelOn("b", "b2"), 0));
  ASSERT_TRUE(AwaitChange(*a, [&] { return a->models().size() == 1; }));
  registry_.SetUnavailable(true);
  EXPECT_THAT(a->members(), ElementsAre(Key("a"), Key("b")));
  EXPECT_EQ(a->model("m"), ModelOn("b", "b2"));
  EXPECT_THAT(a->Read("m"), StatusIs(absl::StatusCode::kUnavailable, testing::_));
  EXPECT_THAT(a->Write("m", ModelOn("a", "b1"), revision),
              StatusIs(absl::StatusCode::kUnavailable, testing::_));
  EXPECT_THAT(a->Erase("m", revision), StatusIs(absl::StatusCode::kUnavailable, testing::_));
}

}  // namespace
}  // namespace ema::group
