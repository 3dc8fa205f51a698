// SPDX-License-Identifier: Apache-2.0
//
// A client whose large pushes go by several connections or same-host lanes, also while these break.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "ema/client.h"
#include "tests/testutil/server_process.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

// Enough that a push's speed counts.
constexpr int64_t kElements = 17'000'000;
// With one connection, before two are tried.
constexpr int64_t kPushesByOne = 5;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kRounds = 2;
#else
constexpr int kRounds = 6;
#endif
constexpr absl::Duration kTimeout = absl::Seconds(60);
// A push does not wait long for more connections, and its run stays with one for many pushes then:
// on a busy machine it takes more than one run until they are tried.
constexpr int kMaxRuns = 10;

// The parameter: whether the client may use same-host lanes.
class SeveralConnectionsTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    EMA_ASSERT_OK_AND_ASSIGN(server_, ServerProcess::Start(EMA_SERVER_BINARY, {}));
    proxy_ = std::make_unique<TcpProxy>(server_->port());
  }

  void Open(const std::string& address, int64_t max_connections) {
    EMA_ASSERT_OK_AND_ASSIGN(
        client_, Client::Create(
                     address, {.same_host_lane = GetParam(), .max_connections = max_connections}));
    ASSERT_THAT(client_->CreateModel("m", *Manifest::Create({{.name = "w", .shape = {kElements}}}),
                                     {{{.name = "raw", .schedule = *Schedule::Parse("copy")}}}),
                IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(run_, client_->OpenRun("m", {}));
  }

  // Other weights at each step.
  absl::StatusOr<PendingPush::Stats> Push(int64_t step) {
    constexpr int64_t kPeriod = 4099;
    for (int64_t i = 0; i < kPeriod; ++i) weights_[i] = static_cast<float>(i + step);
    for (int64_t i = kPeriod; i < kElements; i += kPeriod) {
      std::copy_n(weights_.begin(), std::min(kPeriod, kElements - i), weights_.begin() + i);
    }
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<PendingPush> push,
                         run_->StartPush(step, TrainingTime::AtBatch(step),
                                         {std::as_bytes(std::span(weights_))}, kTimeout));
    EMA_RETURN_IF_ERROR(push->Wait().status());
    EXPECT_EQ(push->stats().lane, GetParam() ? Lane::kSharedMemory : Lane::kGrpc);
    return push->stats();
  }
  void ExpectPulled() {
    std::vector<float> pulled(kElements);
    const auto target = [&](const PullInfo&) -> absl::StatusOr<std::span<std::byte>> {
      return std::as_writable_bytes(std::span(pulled));
    };
    ASSERT_THAT(client_->Pull("m", "raw", {}, target, kTimeout), IsOk());
    EXPECT_TRUE(pulled == weights_);
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<TcpProxy> proxy_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<ema::Run> run_;
  std::vector<float> weights_ = std::vector<float>(kElements);
};

INSTANTIATE_TEST_SUITE_P(Transport, SeveralConnectionsTest, testing::Bool(),
                         [](const auto& tested) { return tested.param ? "SameHostLane" : "Grpc"; });

TEST_P(SeveralConnectionsTest, LargePushesTryMore) {
  int64_t step = 0;
  int64_t last_count = 1;
  for (int run = 0; last_count == 1 && run < kMaxRuns; ++run) {
    ASSERT_NO_FATAL_FAILURE(Open(server_->address(), 2));
    for (int64_t i = 1; i <= kPushesByOne + 1; ++i) {
      EMA_ASSERT_OK_AND_ASSIGN(const PendingPush::Stats stats, Push(++step));
      last_count = stats.connection_count;
      if (i <= kPushesByOne) {
        EXPECT_EQ(last_count, 1);
      }
      EXPECT_EQ(stats.stream_count, 1);  // Nothing broke.
      EXPECT_EQ(stats.sent_bytes, kElements * 4);
      ExpectPulled();
    }
  }
  EXPECT_EQ(last_count, 2);
}

TEST_P(SeveralConnectionsTest, OneIsOneWhereNoMoreAreAllowed) {
  ASSERT_NO_FATAL_FAILURE(Open(server_->address(), 1));
  for (int64_t step = 1; step <= kPushesByOne + 2; ++step) {
    EMA_ASSERT_OK_AND_ASSIGN(const PendingPush::Stats stats, Push(step));
    EXPECT_EQ(stats.connection_count, 1);
  }
}

// The proxy cuts connections only; window_test.cc breaks lanes.
class CutConnectionsTest : public SeveralConnectionsTest {};

INSTANTIATE_TEST_SUITE_P(Grpc, CutConnectionsTest, testing::Values(false));

TEST_P(CutConnectionsTest, PushesSurviveTheLossOfTheirConnections) {
  std::mt19937 random(1);
  int64_t broken_pushes = 0;
  int64_t step = 0;
  // After a failure a run goes back to one connection.
  for (int round = 0; round < kRounds; ++round) {
    ASSERT_NO_FATAL_FAILURE(Open(proxy_->address(), 4));
    absl::Duration one_push;
    for (int64_t i = 0; i < kPushesByOne; ++i) {
      const absl::Time begin = absl::Now();
      ASSERT_THAT(Push(++step), IsOk());
      one_push = absl::Now() - begin;
    }
    // At any moment of a push, however long this machine takes for one.
    std::jthread cutter([&, delay = one_push * (random() % 100) / 100] {
      absl::SleepFor(delay);
      proxy_->CutAll();
      proxy_->AwaitCut();
    });
    EMA_ASSERT_OK_AND_ASSIGN(const PendingPush::Stats stats, Push(++step));
    if (stats.stream_count > 1) ++broken_pushes;
    cutter.join();
    ExpectPulled();
    ASSERT_THAT(Push(++step), IsOk());
    run_.reset();
  }
  EXPECT_GT(broken_pushes, 0);
}

TEST_P(SeveralConnectionsTest, APushThatGetsFewerPlacesGoesByOne) {
  EMA_ASSERT_OK_AND_ASSIGN(server_,
                           ServerProcess::Start(EMA_SERVER_BINARY, {"--max-push-streams", "1"}));
  int64_t step = 0;
  int64_t tried_streams = 0;  // Streams of the push that tries two connections.
  for (int run = 0; tried_streams != 2 && run < kMaxRuns; ++run) {
    ASSERT_NO_FATAL_FAILURE(Open(server_->address(), 2));
    for (int64_t i = 1; i <= kPushesByOne + 2; ++i) {
      EMA_ASSERT_OK_AND_ASSIGN(const PendingPush::Stats stats, Push(++step));
      EXPECT_EQ(stats.connection_count, 1);
      if (i == kPushesByOne + 1) {
        tried_streams = stats.stream_count;
      } else {
        EXPECT_EQ(stats.stream_count, 1);
      }
      ExpectPulled();
    }
  }
  EXPECT_EQ(tried_streams, 2);
}

}  // namespace
}  // namespace ema
