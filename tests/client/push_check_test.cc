// SPDX-License-Identifier: Apache-2.0
//
// Pushes that check whether what they send is what they were given.
#include <span>
#include <string>
#include <vector>

#include "ema/client.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

using testing::HasSubstr;

// A rank whose first push is under way, and does not get on until the test says so.
class PushCheckTest : public testing::Test {
 protected:
  void SetUp() override {
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(proxy_.address()));
    EMA_ASSERT_OK_AND_ASSIGN(run_, client_->OpenRun("m", {.launch_id = "life"}));
    proxy_.SetStalled(true);
  }

  std::unique_ptr<PendingPush> Start(bool check) {
    auto push = run_->StartPush(1, TrainingTime::AtBatch(1), {std::as_bytes(std::span(weights_))},
                                absl::Seconds(20), {.check = check});
    EXPECT_THAT(push, IsOk());
    return push.ok() ? *std::move(push) : nullptr;
  }

  // More than the sockets to a stalled proxy take: the last ones are not read before it goes on.
  static constexpr int64_t kCount = 8'000'000;

  FakeServer server_{*Manifest::Create({{"w", Dtype::kFloat32, {kCount}}})};
  TcpProxy proxy_{server_.port()};
  std::vector<float> weights_ = std::vector<float>(kCount, 1.0f);
  std::unique_ptr<Client> client_;
  std::unique_ptr<ema::Run> run_;  // testing::Test has a Run, too.
};

TEST_F(PushCheckTest, WhatIsWrittenWhileItIsSentIsNotCommitted) {
  const auto push = Start(/*check=*/true);
  weights_.back() = 3;
  proxy_.SetStalled(false);
  EXPECT_THAT(push->Wait(), AllOf(StatusIs(absl::StatusCode::kDataLoss, HasSubstr("were written")),
                                  ReasonIs(ErrorReason::kDigestMismatch)));
  ASSERT_TRUE(server_.AwaitPushes(1));
  EXPECT_FALSE(server_.pushes()[0].has_commit);
}

TEST_F(PushCheckTest, WhatIsNotWrittenIs) {
  const auto push = Start(/*check=*/true);
  proxy_.SetStalled(false);
  EXPECT_THAT(push->Wait(), IsOk());
}

TEST_F(PushCheckTest, OtherPushesDoNotCheck) {
  const auto push = Start(/*check=*/false);
  weights_.back() = 3;
  proxy_.SetStalled(false);
  EXPECT_THAT(push->Wait(), IsOk());
}

}  // namespace
}  // namespace ema
