// SPDX-License-Identifier: Apache-2.0
//
// A client while somebody sets the system's clock. A program of its own, since that clock is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "absl/time/clock.h"
#include "client/cpp/push/weights_gate.h"
#include "client/cpp/transport/interrupt.h"
#include "ema/client.h"
#include "ema/step_pusher.h"
#include "server/base/steady_wait.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/server_process.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/stepped_clock.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kTimeout = absl::Seconds(20);
// Of what is to last that long.
constexpr absl::Duration kShort = absl::Milliseconds(300);

Manifest TestManifest() { return *Manifest::Create({{.name = "w", .shape = {1000}}}); }

class ClockStepTest : public testing::Test {
 protected:
  ClockStepTest() { step_seconds = 0; }
  ~ClockStepTest() override { step_seconds = 0; }

  // What `wait` waits for takes kShort, and the clock is set back meanwhile.
  template <typename Wait>
  void ExpectShort(Wait wait) {
    step_seconds = 10;
    std::thread set_back([] {
      absl::SleepFor(kShort / 3);
      step_seconds = 0;
    });
    const SteadyTime begin = SteadyNow();
    wait();
    EXPECT_LT(Since(begin), absl::Seconds(8));
    set_back.join();
  }
  std::vector<std::span<const std::byte>> Shards() { return {std::as_bytes(std::span(weights_))}; }

  std::vector<float> weights_ = std::vector<float>(1000);
};

// With a server in another process, whose clock is right, behind a proxy.
class ServerClockStepTest : public ClockStepTest {
 protected:
  void SetUp() override {
    EMA_ASSERT_OK_AND_ASSIGN(server_, ServerProcess::Start(EMA_SERVER_BINARY, {}));
    proxy_.emplace(server_->port());
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(proxy_->address(), {.same_host_lane = false}));
    EMA_ASSERT_OK_AND_ASSIGN(
        pusher_,
        StepPusher::Create(*client_, "m", TestManifest(), {},
                           {.tracks = {{.name = "ema", .schedule = *Schedule::Parse("copy")}},
                            .on_error = StepPusher::OnError::kWait,
                            .max_outage = kShort}));
  }
  void TearDown() override { proxy_->HoldReplies(false); }

  std::unique_ptr<ServerProcess> server_;
  std::optional<TcpProxy> proxy_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<StepPusher> pusher_;
};

TEST_F(ServerClockStepTest, ACallEndsAtItsTimeWithoutAServer) {
  server_ = nullptr;
  ExpectShort([&] {
    EXPECT_THAT(client_->GetModel("m", kShort),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("")));
  });
}

TEST_F(ServerClockStepTest, CallsEndAtTheirTimeWithAServerThatHangs) {
  proxy_->HoldReplies(true);
  ExpectShort([&] {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        EXPECT_THAT(client_->GetModel("m", kShort),
                    StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("no answer in time")));
      });
    }
  });
}

TEST_F(ServerClockStepTest, AWatchEndsAtItsTime) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto watch, client_->Watch("m", VersionId{.version = 1}, kShort));
  ExpectShort([&] {
    EXPECT_THAT(watch->Next(),
                StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("no commit for")));
  });
}

TEST_F(ServerClockStepTest, APushEndsAtItsTime) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, client_->OpenRun("m", {}));
  proxy_->HoldReplies(true);
  ExpectShort([&] {
    EXPECT_THAT(run->Push(1, TrainingTime::AtBatch(1), Shards(), kShort),
                StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("no answer in time")));
  });
}

TEST_F(ServerClockStepTest, ATrainerWaitsNoLongerForAPush) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, client_->OpenRun("m", {}));
  proxy_->HoldReplies(true);
  EMA_ASSERT_OK_AND_ASSIGN(const auto push,
                           run->StartPush(1, TrainingTime::AtBatch(1), Shards(), kTimeout));
  ExpectShort([&] { EXPECT_FALSE(push->WaitDone(kShort)); });
  proxy_->HoldReplies(false);
  EXPECT_THAT(push->Wait(), IsOk());
}

TEST_F(ServerClockStepTest, AnOutageIsWaitedForNoLonger) {
  server_ = nullptr;
  pusher_->AfterStep([this](const StepPusher::Piece&) {
    return StepPusher::Weights{Shards()[0], nullptr};
  });
  ExpectShort([&] {
    pusher_->WaitReleased();
    pusher_ = nullptr;
  });
}

TEST_F(ClockStepTest, WeightsAreWaitedForNoLonger) {
  client_internal::WeightsGate gate;
  ExpectShort([&] { EXPECT_FALSE(gate.TryRelease(kShort)); });
}

TEST_F(ClockStepTest, APauseEndsAtItsTime) {
  client_internal::Interrupt never;
  ExpectShort([&] { EXPECT_TRUE(never.Sleep(kShort)); });
}

TEST_F(ClockStepTest, ALaterPushIsNoEarlierTryAfterItWasSetBack) {
  FakeServer server(TestManifest());
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(server.address()));
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, client->OpenRun("m", {}));
  ASSERT_THAT(run->Push(1, TrainingTime::AtBatch(1), Shards(), kTimeout), IsOk());
  step_seconds = -3600;
  ASSERT_THAT(run->Push(2, TrainingTime::AtBatch(2), Shards(), kTimeout), IsOk());
  EXPECT_GT(server.pushes()[1].header.stream_group(), server.pushes()[0].header.stream_group());
}

}  // namespace
}  // namespace ema
