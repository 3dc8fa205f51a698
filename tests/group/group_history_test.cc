// SPDX-License-Identifier: Apache-2.0
#include "server/group/group_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace ema::group {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// A group of two members that have the model "m".
class GroupHistoryTest : public testing::Test {
 protected:
  GroupHistoryTest() {
    for (const char* const member : {"ema-0", "ema-1"}) {
      members_[member].boot = absl::StrCat(member, "-boot");
      record().partitions.push_back({.member = member, .boot = members_[member].boot});
    }
    record().state = ModelRecord::State::kActive;
    record().incarnation = absl::ToUnixMicros(now_);
    record().checkpoints = {{.id = {12, record().incarnation}, .step = 30}};
    Observe();
  }

  ModelRecord& record() { return models_["m"]; }
  void Observe() { history_.Observe(members_, models_, now_); }
  // The member restarts, and the model begins its next incarnation.
  void Restart(const std::string& member) {
    const std::string boot = absl::StrCat(members_[member].boot, "'");
    members_[member].boot = boot;
    Observe();
    record().partitions = record().PartitionsWithBoot(member, boot);
    record().incarnation = absl::ToUnixMicros(now_);
    record().base = record().checkpoints[0].id;
    Observe();
  }
  std::string Incident() {
    const auto incident = history_.last_incident();
    return incident.has_value() ? incident->text : "";
  }

  GroupHistory history_;
  GroupHistory::Members members_;
  GroupHistory::Models models_;
  absl::Time now_ = absl::FromUnixSeconds(1'700'000'000);
};

TEST_F(GroupHistoryTest, AGroupThatBeginsHasNoIncident) {
  EXPECT_THAT(Incident(), IsEmpty());
  EXPECT_THAT(history_.missing(), IsEmpty());
  EXPECT_EQ(history_.CheckpointReturnCount("m"), 0);
}

TEST_F(GroupHistoryTest, AMissingProcessIsRememberedUntilItIsBack) {
  const MemberRecord member = members_["ema-1"];
  members_.erase("ema-1");
  now_ += absl::Seconds(10);
  const absl::Time since = now_;
  Observe();
  now_ += absl::Seconds(5);
  Observe();
  ASSERT_THAT(history_.missing(), SizeIs(1));
  EXPECT_EQ(history_.missing()[0].member, "ema-1");
  EXPECT_EQ(history_.missing()[0].since, since);
  EXPECT_EQ(history_.MissingSince(record().partitions[1]), since);
  EXPECT_FALSE(history_.MissingSince(record().partitions[0]).has_value());
  EXPECT_THAT(Incident(), HasSubstr("member \"ema-1\" is not in the registry any more"));
  EXPECT_EQ(history_.last_incident()->time, since);

  members_["ema-1"] = member;
  Observe();
  EXPECT_THAT(history_.missing(), IsEmpty());
  EXPECT_THAT(Incident(), HasSubstr("member \"ema-1\" is back after 5s"));
  EXPECT_EQ(history_.CheckpointReturnCount("m"), 0);
}

TEST_F(GroupHistoryTest, ARestartIsCounted) {
  now_ += absl::Minutes(5);
  Restart("ema-1");
  EXPECT_EQ(history_.CheckpointReturnCount("m"), 1);
  EXPECT_EQ(Incident(),
            "model \"m\" returned to version 12 (step 30): member \"ema-1\" has restarted");
  EXPECT_EQ(history_.last_incident()->time, now_);
  EXPECT_THAT(history_.missing(), IsEmpty());
}

TEST_F(GroupHistoryTest, RestartsOfAllServersTogetherCountOnce) {
  now_ += absl::Minutes(5);
  Restart("ema-0");
  now_ += absl::Seconds(20);
  Restart("ema-1");
  EXPECT_EQ(history_.CheckpointReturnCount("m"), 1);
}

TEST_F(GroupHistoryTest, ARollbackIsAnIncident) {
  now_ += absl::Minutes(5);
  record().incarnation = absl::ToUnixMicros(now_);
  record().base = record().checkpoints[0].id;
  Observe();
  EXPECT_EQ(Incident(), "model \"m\" returned to version 12 (step 30): it was rolled back");
}

TEST_F(GroupHistoryTest, AMoveIsAnIncidentThatNamesTheServerThatWasReplaced) {
  members_.erase("ema-1");
  Observe();
  now_ += absl::Minutes(5);
  record().incarnation = absl::ToUnixMicros(now_);
  record().base = record().checkpoints[0].id;
  record().partitions = {{.member = "ema-0", .boot = "ema-0-boot"}};
  Observe();
  EXPECT_EQ(
      Incident(),
      "model \"m\" returned to version 12 (step 30): member \"ema-1\" was replaced, which was "
      "missing for 5m");
  now_ += absl::Minutes(5);
  record().incarnation = absl::ToUnixMicros(now_);
  record().partitions[0].member = "ema-2";
  Observe();
  EXPECT_THAT(Incident(), HasSubstr("its tensors were moved to other servers"));
}

TEST_F(GroupHistoryTest, AModelThatIsLostIsAnIncidentAndADeletedOneIsNot) {
  models_["deleted"] = record();
  Observe();
  models_["deleted"].state = ModelRecord::State::kDeleting;
  Observe();
  models_.erase("deleted");
  Observe();
  EXPECT_THAT(Incident(), IsEmpty());
  members_["ema-1"].boot = "other";
  models_.erase("m");
  Observe();
  EXPECT_THAT(Incident(), HasSubstr("model \"m\" was lost"));
}

TEST_F(GroupHistoryTest, AServerThatJoinsLaterKnowsWhenTheIncarnationBegan) {
  record().base = record().checkpoints[0].id;
  GroupHistory other;
  other.Observe(members_, models_, now_ + absl::Hours(1));
  ASSERT_TRUE(other.last_incident().has_value());
  EXPECT_EQ(other.last_incident()->time, now_);
  EXPECT_THAT(other.last_incident()->text, HasSubstr("returned to version 12 (step 30)"));
}

}  // namespace
}  // namespace ema::group
