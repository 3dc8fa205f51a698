// SPDX-License-Identifier: Apache-2.0
//
// Whole servers that join a group through etcd.
#include "server/server_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
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
    for (const group::GroupTrainer::Pushed& pushed : trainer.PushAll(step, 5)) {
      ASSERT_TRUE(pushed.result.ok()) << pushed.result.status.error_message();
      EXPECT_EQ(pushed.response.version().version(), step);
    }
  }
  for (const std::unique_ptr<Server>& server : servers) EXPECT_THAT(server->Drain(), IsOk());
}

TEST_F(ServerGroupTest, ADataDirectoryIsRejected) {
  ServerOptions options = OptionsOf("ema-0");
  options.data_dir = testing::TempDir();
  EXPECT_THAT(Server::Start(options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not supported yet")));
}

}  // namespace
}  // namespace ema
