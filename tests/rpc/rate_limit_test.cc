// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/rate_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ema/client.h"
#include "ema/error_reason.h"
#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

const RateLimit::Time kStart = RateLimit::Time() + std::chrono::hours(1);

TEST(RateLimitTest, ASecondsWorthMayComeAtOnceAndThenAtThatRate) {
  RateLimit limit(10);
  for (int i = 0; i < 10; ++i) ASSERT_THAT(limit.Take("ipv4:10.0.0.1:1", kStart), IsOk());
  const absl::Status refused = limit.Take("ipv4:10.0.0.1:2", kStart);
  EXPECT_THAT(refused, AllOf(StatusIs(absl::StatusCode::kResourceExhausted,
                                      HasSubstr("more than 10 calls a second")),
                             ReasonIs(ErrorReason::kTooManyCalls)));
  EXPECT_GE(GetRetryDelay(refused), absl::Milliseconds(100));
  EXPECT_LE(GetRetryDelay(refused), absl::Milliseconds(110));
  EXPECT_FALSE(limit.Take("ipv4:10.0.0.1:1", kStart + milliseconds(99)).ok());
  EXPECT_THAT(limit.Take("ipv4:10.0.0.1:1", kStart + milliseconds(101)), IsOk());
  EXPECT_FALSE(limit.Take("ipv4:10.0.0.1:1", kStart + milliseconds(102)).ok());
  // Others are not held up, and a pause does not give more than a second's worth.
  EXPECT_THAT(limit.Take("ipv6:[::1]:1", kStart), IsOk());
  const RateLimit::Time later = kStart + std::chrono::hours(1);
  for (int i = 0; i < 10; ++i) ASSERT_THAT(limit.Take("ipv4:10.0.0.1:3", later), IsOk());
  EXPECT_FALSE(limit.Take("ipv4:10.0.0.1:3", later).ok());
}

TEST(RateLimitTest, ANetworkOfIpV6IsOnePeer) {
  RateLimit limit(2);
  ASSERT_THAT(limit.Take("ipv6:%5B2001:db8:0:1::1%5D:1", kStart), IsOk());
  ASSERT_THAT(limit.Take("ipv6:%5B2001:db8:0:1::2%5D:1", kStart), IsOk());
  EXPECT_FALSE(limit.Take("ipv6:%5B2001:db8:0:1:2:3:4:5%5D:1", kStart).ok());
  EXPECT_THAT(limit.Take("ipv6:%5B2001:db8:0:2::1%5D:1", kStart), IsOk());
}

TEST(RateLimitTest, ZeroIsNoLimit) {
  RateLimit limit(0);
  for (int i = 0; i < 1000; ++i) ASSERT_THAT(limit.Take("ipv4:10.0.0.1:1", kStart), IsOk());
  EXPECT_EQ(limit.peer_count(), 0);
}

TEST(RateLimitTest, ForgetsPeersThatAreSilent) {
  RateLimit limit(10);
  for (int i = 0; i < 5000; ++i) {
    const std::string peer = absl::StrCat("ipv4:10.0.", i / 256, ".", i % 256, ":1");
    ASSERT_THAT(limit.Take(peer, kStart + milliseconds(i)), IsOk());
    // One call is made good in a tenth of a second.
    ASSERT_LE(limit.peer_count(), 1024 + 100);
  }
}

class RateLimitedServerTest : public RpcFixture {};

TEST_F(RateLimitedServerTest, RefusesMoreButProbesAndOurClientWaits) {
  StartServer({.limits = {.max_calls_per_second = 20}});
  int refused = 0;
  for (int i = 0; i < 60; ++i) {
    grpc::ClientContext context;
    v1::ListModelsResponse response;
    const CallResult result = Result(stub_->ListModels(&context, {}, &response), context);
    if (result.status.ok()) continue;
    ++refused;
    EXPECT_EQ(result.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_TOO_MANY_CALLS);
    EXPECT_GT(result.detail.retry_delay_ms(), 0);
  }
  EXPECT_GT(refused, 0);
  const auto health = grpc::health::v1::Health::NewStub(channel_);
  // They have no rate: whoever shares the prober's address must not be able to use it up.
  for (int i = 0; i < 100; ++i) {
    grpc::ClientContext context;
    grpc::health::v1::HealthCheckResponse response;
    EXPECT_TRUE(health->Check(&context, {}, &response).ok());
  }
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(address_));
  for (int i = 0; i < 30; ++i) EXPECT_THAT(client->ListModels(absl::Seconds(20)), IsOk());
}

}  // namespace
}  // namespace ema
