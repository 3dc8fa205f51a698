// SPDX-License-Identifier: Apache-2.0
//
// What the servers of a group say about it. tests/python/group has the same with real processes.
#include "server/group/group_overview.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "tests/group/group_fixture.h"

namespace ema::group {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class GroupOverviewTest : public GroupFixture {
 protected:
  static v1::GetGroupResponse GetGroup(const std::string& address) {
    grpc::ClientContext context;
    v1::GetGroupResponse response;
    const grpc::Status status =
        GroupTrainer::StubOf(address)->GetGroup(&context, v1::GetGroupRequest(), &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  // The first answer that is as expected: on a busy machine another server may not answer in the
  // second that it has.
  static v1::GetGroupResponse AwaitGroup(
      const std::string& address,
      const std::function<bool(const v1::GetGroupResponse&)>& is_expected) {
    v1::GetGroupResponse response;
    Await([&] {
      response = GetGroup(address);
      return is_expected(response);
    });
    return response;
  }
  // Whether nothing is wrong with the group, nor with its only model.
  static bool IsWell(const v1::GetGroupResponse& response) {
    return response.problems().empty() && response.models_size() == 1 &&
           response.models(0).problem().empty() &&
           response.models(0).state() == v1::GROUP_MODEL_STATE_SERVING;
  }
  // The server with partition `index` of the model.
  GroupServer& ServerOf(const v1::Model& model, int index) {
    return ServerAt(model.partitions(index).address());
  }
};

TEST_F(GroupOverviewTest, EachServerDescribesTheWholeGroup) {
  StartServers(3);
  const v1::Model model = Create();
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(model);
  for (const GroupTrainer::Pushed& pushed : trainer.PushAll(5, 1)) ASSERT_TRUE(pushed.result.ok());
  for (const auto& server : servers_) {
    const v1::GetGroupResponse response = AwaitGroup(server->address(), IsWell);
    EXPECT_EQ(response.group(), "g");
    EXPECT_EQ(response.member(), server->name());
    EXPECT_THAT(response.registry().error(), IsEmpty());
    ASSERT_EQ(response.members_size(), 3);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(response.members(i).name(), servers_[i]->name());
      EXPECT_EQ(response.members(i).address(), servers_[i]->address());
      EXPECT_GT(response.members(i).memory_reserved_bytes(), 0);
    }
    const v1::GetGroupResponse::Model& described = response.models(0);
    EXPECT_EQ(described.name(), "m");
    EXPECT_EQ(described.incarnation(), model.incarnation());
    EXPECT_THAT(described.members(),
                ElementsAre(model.partitions(0).member(), model.partitions(1).member(),
                            model.partitions(2).member()));
    EXPECT_EQ(described.progress().step(), 5);
    EXPECT_EQ(described.progress().round(), trainer.round());
    EXPECT_FALSE(described.has_checkpoint());
  }
}

TEST_F(GroupOverviewTest, APartitionThatWaitsForARankIsNamed) {
  StartServers(2);
  const v1::Model model = Create();
  GroupTrainer trainer("m", "launch");
  trainer.OpenRun(model);
  auto first = trainer.Push(0, 5, 1);
  const std::string address = ServerOf(model, 0).address();
  Await([&] { return !GetGroup(address).models(0).progress().slowest_member().empty(); });
  const v1::GroupModelProgress progress = GetGroup(address).models(0).progress();
  EXPECT_EQ(progress.slowest_partition(), 1);
  EXPECT_EQ(progress.slowest_member(), model.partitions(1).member());
  EXPECT_EQ(progress.slowest_activity(), "has received 0 bytes");
  EXPECT_TRUE(trainer.Push(1, 5, 1).get().result.ok());
  EXPECT_TRUE(first.get().result.ok());
  EXPECT_THAT(GetGroup(address).models(0).progress().slowest_member(), IsEmpty());
}

TEST_F(GroupOverviewTest, AnUnavailableRegistryIsAProblem) {
  StartServers(2);
  Create();
  registry_.SetUnavailable(true);
  const v1::GetGroupResponse response =
      AwaitGroup(servers_[0]->address(), [](const v1::GetGroupResponse& answer) {
        return answer.problems_size() == 1 && !answer.registry().error().empty();
      });
  EXPECT_THAT(response.registry().error(), HasSubstr("unavailable"));
  ASSERT_EQ(response.problems_size(), 1);
  EXPECT_THAT(response.problems(0), HasSubstr("the registry has been unusable for"));
  EXPECT_EQ(response.members_size(), 2);
  EXPECT_EQ(response.models_size(), 1);
  registry_.SetUnavailable(false);
  AwaitGroup(servers_[0]->address(), IsWell);
}

TEST_F(GroupOverviewTest, AMissingMemberDegradesItsModels) {
  StartServers(2);
  const v1::Model model = Create();
  GroupServer& home = ServerOf(model, 0);
  GroupServer& other = ServerOf(model, 1);
  other.Stop();
  // The home learns that the member does not answer before it learns that its key is gone.
  const v1::GetGroupResponse response =
      AwaitGroup(home.address(), [](const v1::GetGroupResponse& answer) {
        const bool is_missing =
            std::any_of(answer.members().begin(), answer.members().end(),
                        [](const auto& member) { return member.has_missing_seconds(); });
        return is_missing && !answer.last_incident().empty() && answer.models_size() == 1 &&
               answer.models(0).state() == v1::GROUP_MODEL_STATE_DEGRADED;
      });
  ASSERT_EQ(response.members_size(), 2);
  ASSERT_FALSE(response.problems().empty());
  EXPECT_THAT(response.problems(0), HasSubstr("\"" + other.name() + "\""));
  EXPECT_EQ(response.models(0).state(), v1::GROUP_MODEL_STATE_DEGRADED);
  EXPECT_THAT(response.models(0).problem(), HasSubstr("\"" + other.name() + "\", is missing"));
  EXPECT_TRUE(response.models(0).has_progress());
  EXPECT_THAT(response.last_incident(),
              HasSubstr("\"" + other.name() + "\" is not in the registry"));
  const auto& missing = response.members(other.name() < home.name() ? 0 : 1);
  EXPECT_EQ(missing.name(), other.name());
  EXPECT_TRUE(missing.has_missing_seconds());
}

TEST_F(GroupOverviewTest, AServerThatHasNotJoinedCannotDescribeTheGroup) {
  StartServers(1);
  servers_[0]->models().Stop();
  grpc::ClientContext context;
  v1::GetGroupResponse response;
  const grpc::Status status = GroupTrainer::StubOf(servers_[0]->address())
                                  ->GetGroup(&context, v1::GetGroupRequest(), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace ema::group
