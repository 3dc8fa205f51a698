// SPDX-License-Identifier: Apache-2.0
//
// Whole servers that join a group through etcd.
#include "server/server_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/server.h"
#include "tests/group/group_fixture.h"
#include "tests/testutil/etcd_cluster.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

class ServerGroupTest : public testing::Test {
 protected:
  ServerOptions OptionsOf(const std::string& member) const {
    ServerOptions options;
    options.listen = {"127.0.0.1:0"};
    options.thread_count = 1;
    options.memory_bytes = int64_t{1} << 28;
    options.group = "g";
    options.member = member;
    options.advertise = "127.0.0.1:0";
    options.etcd = absl::StrSplit(etcd_->endpoints(), ',');
    options.drain_grace = absl::Seconds(5);
    return options;
  }

  const std::unique_ptr<EtcdCluster> etcd_ = *EtcdCluster::Start({});
};

TEST_F(ServerGroupTest, ServersOfAGroupCommitTogether) {
  std::vector<std::unique_ptr<Server>> servers;
  for (const char* const member : {"ema-0", "ema-1"}) {
    EMA_ASSERT_OK_AND_ASSIGN(auto server, Server::Start(OptionsOf(member)));
    servers.push_back(std::move(server));
  }
  // The last one knows all of them.
  const std::string address = absl::StrCat("127.0.0.1:", servers[1]->port());
  v1::CreateModelResponse created;
  const group::GroupCall result = group::RetryBusy([&] {
    return group::GroupTrainer::Create(address, group::GroupTrainer::CreateRequest("m"), &created);
  });
  ASSERT_TRUE(result.ok()) << result.status.error_message();
  ASSERT_EQ(created.model().partitions_size(), 2);

  group::GroupTrainer trainer("m", "launch");
  trainer.OpenRun(created.model());
  for (int64_t step = 1; step <= 3; ++step) {
    group::ExpectCommitted(trainer.PushAll(step, 5), step, step);
  }
  for (const std::unique_ptr<Server>& server : servers) EXPECT_THAT(server->Drain(), IsOk());
}

TEST_F(ServerGroupTest, AServerIsNotHealthyBeforeItHasJoined) {
  EMA_ASSERT_OK_AND_ASSIGN(auto first, Server::Start(OptionsOf("ema-0")));
  // It waits until its name is free.
  ServerOptions options = OptionsOf("ema-0");
  const std::string socket = absl::StrCat("unix:", testing::TempDir(), "/ema-", getpid(), ".sock");
  options.listen.push_back(socket);
  auto starting = std::async(std::launch::async, [&] { return Server::Start(options); });
  const auto channel = grpc::CreateChannel(socket, grpc::InsecureChannelCredentials());
  const auto health = grpc::health::v1::Health::NewStub(channel);
  using Response = grpc::health::v1::HealthCheckResponse;
  const auto check = [&] {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    Response response;
    EXPECT_TRUE(health->Check(&context, {}, &response).ok());
    return response.status();
  };
  EXPECT_EQ(check(), Response::NOT_SERVING);
  EXPECT_THAT(first->Drain(), IsOk());
  first.reset();
  EMA_ASSERT_OK_AND_ASSIGN(const auto second, starting.get());
  EXPECT_EQ(check(), Response::SERVING);
  EXPECT_THAT(second->Drain(), IsOk());
}

TEST_F(ServerGroupTest, AServerWithADirectoryDoesNotJoinAGroupWithoutOne) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto first, Server::Start(OptionsOf("ema-0")));
  std::string directory = testing::TempDir() + "/ema_group_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  ServerOptions options = OptionsOf("ema-1");
  options.data_dir = directory;
  EXPECT_THAT(Server::Start(options),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("the other members of group \"g\" have no data directory")));
  options.data_dir = "";
  EMA_ASSERT_OK_AND_ASSIGN(const auto second, Server::Start(options));
  EXPECT_THAT(second->Drain(), IsOk());
  EXPECT_THAT(first->Drain(), IsOk());
  PosixFileSystem().RemoveTree(directory).IgnoreError();
}

TEST_F(ServerGroupTest, AStoppedServerLosesNoStep) {
  std::string directory = testing::TempDir() + "/ema_group_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  const auto start = [&](const std::string& member) {
    ServerOptions options = OptionsOf(member);
    options.data_dir = directory;
    return Server::Start(options);
  };
  std::vector<std::unique_ptr<Server>> servers;
  for (const char* const member : {"ema-0", "ema-1"}) {
    EMA_ASSERT_OK_AND_ASSIGN(auto server, start(member));
    servers.push_back(std::move(server));
  }
  const auto address = [&](size_t i) { return absl::StrCat("127.0.0.1:", servers[i]->port()); };
  v1::CreateModelResponse created;
  const group::GroupCall result = group::RetryBusy([&] {
    return group::GroupTrainer::Create(address(1), group::GroupTrainer::CreateRequest("m"),
                                       &created);
  });
  ASSERT_TRUE(result.ok()) << result.status.error_message();
  int64_t step = 0;
  // Each of them stops once: the model's home, and the other one.
  for (size_t stopped = 0; stopped < 2; ++stopped) {
    group::GroupTrainer trainer("m", absl::StrCat("launch-", stopped));
    v1::Model model;
    for (size_t i = 0; i < 2; ++i) {
      if (group::GroupTrainer::Get(address(i), "m", &model).ok()) break;
    }
    trainer.OpenRun(model);
    ++step;
    group::ExpectCommitted(trainer.PushAll(step, 5), step, step);
    EXPECT_THAT(servers[stopped]->Drain(), IsOk());
    servers[stopped] = nullptr;
    EMA_ASSERT_OK_AND_ASSIGN(servers[stopped], start(stopped == 0 ? "ema-0" : "ema-1"));
    const auto deadline = After(SteadyNow(), absl::Seconds(60));
    bool is_back = false;
    while (!is_back && SteadyNow() < deadline) {
      for (size_t i = 0; i < 2; ++i) {
        is_back |= group::GroupTrainer::Get(address(i), "m", &model).ok() && model.has_latest() &&
                   model.latest().step() == step;
      }
    }
    EXPECT_TRUE(is_back) << "after the stop of " << stopped;
  }
  for (const std::unique_ptr<Server>& server : servers) EXPECT_THAT(server->Drain(), IsOk());
  servers.clear();
  // Another directory.
  ServerOptions options = OptionsOf("ema-0");
  options.data_dir = directory + "-other";
  EXPECT_THAT(Server::Start(options),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("must share one")));
  EXPECT_THAT(PosixFileSystem().Exists(options.data_dir), IsOkAndHolds(false));
  options.data_dir = "";
  EXPECT_THAT(Server::Start(options),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("share a data directory")));
  PosixFileSystem().RemoveTree(directory).IgnoreError();
}

}  // namespace
}  // namespace ema
