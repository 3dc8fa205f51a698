// SPDX-License-Identifier: Apache-2.0
//
// What health says of workers that do not get on.
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

using ::testing::HasSubstr;
using ::testing::Value;

// Holds up the thread that tells it of a ListModels.
class BlockingObserver final : public ServerObserver {
 public:
  void OnRpcEnded(std::string_view rpc, const absl::Status&) override {
    if (rpc == "ListModels") release.WaitForNotification();
  }
  absl::Notification release;
};

class HealthyDisk final : public Checkpoints {
 public:
  absl::Status health() const override { return absl::OkStatus(); }
};

class HealthTest : public RpcFixture {
 protected:
  HealthTest() {
    options_.worker_timeout = absl::Milliseconds(300);
    options_.disk_timeout = absl::Milliseconds(300);
    options_.observer = &observer_;
  }

  // Before the observer and the disk.
  void TearDown() override { server_.reset(); }

  // Names `worker` as the one that is stuck.
  static auto IsStuck(const std::string& worker) {
    return StatusIs(absl::StatusCode::kUnavailable,
                    HasSubstr(absl::StrCat("worker \"", worker, "\"")));
  }

  // The watchdog looks now and then. If it comes late, it is itself named for a moment.
  template <typename Condition>
  static bool Eventually(const Condition& condition) {
    const absl::Time wait_end = absl::Now() + absl::Seconds(60);
    while (!condition()) {
      if (absl::Now() > wait_end) return false;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return true;
  }

  RpcServer::Options options_;
  BlockingObserver observer_;
  HealthyDisk disk_;
};

TEST_F(HealthTest, AQueueThatIsStuckTurnsHealthUntilItGetsOn) {
  ASSERT_NO_FATAL_FAILURE(StartServer(options_));
  std::thread caller([this] {
    grpc::ClientContext context;
    v1::ListModelsResponse response;
    EXPECT_TRUE(stub_->ListModels(&context, {}, &response).ok());
  });
  EXPECT_TRUE(Eventually([this] { return Value(server_->health(), IsStuck("rpc-0")); }))
      << server_->health();
  observer_.release.Notify();
  EXPECT_TRUE(Eventually([this] { return server_->health().ok(); })) << server_->health();
  caller.join();
}

TEST_F(HealthTest, AWorkerAtTheDiskThatIsStuckIsTheCheckpointsConcern) {
  observer_.release.Notify();
  Heartbeat* const stuck =
      options_.heartbeats->Add("at the disk", Heartbeats::NeededFor::kCheckpoints);
  checkpoints_ = &disk_;
  ASSERT_NO_FATAL_FAILURE(StartServer(options_));
  EXPECT_TRUE(Eventually([this] { return server_->checkpoints_health().ok(); }));
  stuck->Begin();
  EXPECT_TRUE(Eventually([this] {
    return Value(server_->checkpoints_health(), IsStuck("at the disk"));
  })) << server_->checkpoints_health();
  EXPECT_TRUE(Eventually([this] { return server_->health().ok(); })) << server_->health();
  stuck->End();
  EXPECT_TRUE(Eventually([this] { return server_->checkpoints_health().ok(); }));
}

TEST_F(HealthTest, AServerThatDrainsIsNotHealthy) {
  observer_.release.Notify();
  ASSERT_NO_FATAL_FAILURE(StartServer(options_));
  server_->SetServing(false);
  EXPECT_THAT(server_->health(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("shutting")));
}

}  // namespace
}  // namespace ema
