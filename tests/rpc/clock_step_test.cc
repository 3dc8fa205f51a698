// SPDX-License-Identifier: Apache-2.0
//
// A server's own threads while somebody sets the system's clock. A program of its own, since that
// clock is.
#include <thread>

#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "server/base/steady_wait.h"
#include "tests/core/test_model.h"
#include "tests/rpc/rpc_fixture.h"
#include "tests/testutil/stepped_clock.h"

namespace ema {
namespace {

class ClockStepTest : public RpcFixture {
 protected:
  ClockStepTest() { options_.worker_timeout = absl::Seconds(5); }
  ~ClockStepTest() override { step_seconds = 0; }

  // Waits until the watchdog looks again.
  bool AwaitLook() const {
    const SteadyTime begin = SteadyNow();
    const SteadyTime wait_end = After(begin, absl::Seconds(10));
    while (SteadyNow() < wait_end) {
      absl::SleepFor(absl::Milliseconds(5));
      const SteadyTime now = SteadyNow();
      const auto ages = options_.heartbeats->Ages(now);
      if (!ages.empty() && now - ages[0].silent_time > begin) return true;
    }
    return false;
  }

  RpcServer::Options options_;
};

TEST_F(ClockStepTest, TheServerGetsOnAfterItWasSetBack) {
  ASSERT_NO_FATAL_FAILURE(StartServer(options_));
  ASSERT_TRUE(AwaitLook());
  step_seconds = 3600;
  ASSERT_TRUE(AwaitLook());
  // By the system's clock, a wait that has begun now ends in an hour.
  step_seconds = 0;
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(AwaitLook());
    EXPECT_THAT(server_->health(), IsOk());
  }
}

TEST_F(ClockStepTest, ADrainEndsAtItsTimeAfterItWasSetBack) {
  ASSERT_NO_FATAL_FAILURE(StartServer(options_));
  CreateAndOpen();
  TestRank rank(*store_->Get("m"), "another");
  ASSERT_THAT(rank.Join(), IsOk());
  const auto outcome = std::make_shared<PushOutcome>();
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, rank.Open(1, outcome));
  step_seconds = 3600;
  const SteadyTime deadline = After(SteadyNow(), absl::Milliseconds(300));
  std::thread draining([&] { store_->Drain(deadline); });
  while (GetErrorReason(rank.Join()) != ErrorReason::kDraining) {
    std::this_thread::yield();
  }
  step_seconds = 0;
  draining.join();
  EXPECT_THAT(outcome->result, ReasonIs(ErrorReason::kDraining));
  store_->Close();
  server_->Shutdown(deadline);
  EXPECT_LT(SteadyNow(), After(deadline, absl::Minutes(1)));
}

}  // namespace
}  // namespace ema
