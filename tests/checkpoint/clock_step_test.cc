// SPDX-License-Identifier: Apache-2.0
//
// Saves while somebody sets the system's clock. A program of its own, since that clock is.
#include <memory>
#include <utility>

#include "server/base/steady_wait.h"
#include "server/checkpoint/pacer.h"
#include "tests/checkpoint/test_manager.h"
#include "tests/testutil/fake_file_system.h"
#include "tests/testutil/stepped_clock.h"

namespace ema {
namespace {

constexpr int64_t kHourSeconds = 3600;

class ClockStepTest : public testing::Test {
 protected:
  ~ClockStepTest() override { step_seconds = 0; }

  static void Step(int64_t seconds) {
    const absl::Time before = absl::Now();
    step_seconds += seconds;
    ASSERT_GT(absl::AbsDuration(absl::Now() - before), absl::Minutes(59));
  }

  FakeFileSystem files_;
};

TEST_F(ClockStepTest, ASaveDoesNotRestForTheTimeThatItWasSetForward) {
  TestServer server(files_);
  server.PushTo(1);
  TestRank rank(server.shared_model(), "other launch");
  ASSERT_THAT(rank.Join(), IsOk());
  const auto push = rank.Open(20, std::make_shared<PushOutcome>());
  ASSERT_THAT(push, IsOk());
  Pacer pacer(server.model());
  Step(kHourSeconds);
  const SteadyTime begin = SteadyNow();
  EXPECT_THAT(pacer.Pause(), IsOk());
  EXPECT_LT(SteadyNow() - begin, std::chrono::minutes(1));
}

TEST_F(ClockStepTest, WhatIsDueByATimeIsSavedAfterItWasSetBack) {
  struct Ends : ServerObserver {
    void OnSaveEnded(const SaveEnd&) override {
      absl::MutexLock lock(&mu);
      ++count;
    }
    void Await(int64_t least) {
      const auto is_so = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu) { return count >= least; };
      absl::MutexLock lock(&mu);
      mu.Await(absl::Condition(&is_so));
    }
    absl::Mutex mu;
    int64_t count ABSL_GUARDED_BY(mu) = 0;
  } ends;
  CheckpointManager::Options options;
  options.policy.every = absl::Milliseconds(1);
  options.observer = &ends;
  TestServer server(files_, std::move(options));
  server.PushTo(1);
  ends.Await(1);
  server.manager().AwaitIdle();
  Step(-kHourSeconds);
  server.PushTo(2);
  ends.Await(2);
  server.manager().AwaitIdle();
  EXPECT_EQ(server.model().durable().step(), 20);
}

}  // namespace
}  // namespace ema
