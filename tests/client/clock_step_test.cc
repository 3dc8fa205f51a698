// SPDX-License-Identifier: Apache-2.0
//
// A client while somebody sets the system's clock. A program of its own, since that clock is.
#include <gtest/gtest.h>

#include "ema/client.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/stepped_clock.h"

namespace ema {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(20);

class ClockStepTest : public testing::Test {
 protected:
  void SetUp() override { EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_.address())); }
  ~ClockStepTest() override { step_seconds = 0; }

  FakeServer server_{*Manifest::Create({{.name = "w", .shape = {1000}}})};
  std::unique_ptr<Client> client_;
  std::vector<float> weights_ = std::vector<float>(1000);
};

TEST_F(ClockStepTest, ALaterPushIsNoEarlierTryAfterItWasSetBack) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, client_->OpenRun("m", {}));
  const std::vector<std::span<const std::byte>> shards = {std::as_bytes(std::span(weights_))};
  ASSERT_THAT(run->Push(1, TrainingTime::AtBatch(1), shards, kTimeout), IsOk());
  step_seconds = -3600;
  ASSERT_THAT(run->Push(2, TrainingTime::AtBatch(2), shards, kTimeout), IsOk());
  EXPECT_GT(server_.pushes()[1].header.stream_group(), server_.pushes()[0].header.stream_group());
}

}  // namespace
}  // namespace ema
