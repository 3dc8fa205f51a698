// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/operator_service.h"

#include <gmock/gmock.h>

#include <atomic>
#include <map>

#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Pair;

class OperatorServiceTest : public RpcFixture {
 protected:
  v1::GetServerInfoResponse Info() {
    grpc::ClientContext context;
    v1::GetServerInfoResponse response;
    EXPECT_TRUE(stub_->GetServerInfo(&context, {}, &response).ok());
    return response;
  }
  std::map<std::string, std::pair<int64_t, int64_t>> Limits() {
    std::map<std::string, std::pair<int64_t, int64_t>> limits;
    const v1::GetServerInfoResponse info = Info();
    for (const auto& limit : info.limits()) {
      limits[limit.name()] = {limit.has_in_use() ? limit.in_use() : -1, limit.limit()};
    }
    return limits;
  }
  CallResult SetLevel(const std::string& level, v1::SetLogLevelResponse* response) {
    grpc::ClientContext context;
    v1::SetLogLevelRequest request;
    request.set_level(level);
    return Result(stub_->SetLogLevel(&context, request, response), context);
  }
  CallResult Drain(v1::DrainResponse* response) {
    grpc::ClientContext context;
    return Result(stub_->Drain(&context, {}, response), context);
  }
};

TEST_F(OperatorServiceTest, InfoSaysWhatTheServerIsAndHowItStands) {
  const absl::Time start = absl::FromUnixSeconds(1'700'000'000);
  ASSERT_NO_FATAL_FAILURE(
      StartServer({.limits = {.max_push_streams = 5, .max_pull_streams = 6, .max_watch_streams = 7},
                   .process = {.version = "1.2.3", .incarnation = 7, .start_time = start}}));
  CreateAndOpen();
  v1::PushResponse pushed;
  ASSERT_TRUE(PushFilled(1, 1.0F, &pushed).status.ok());
  const v1::GetServerInfoResponse info = Info();
  EXPECT_EQ(info.version(), "1.2.3");
  EXPECT_EQ(info.device(), store_->device().name());
  EXPECT_EQ(info.incarnation(), 7);
  EXPECT_EQ(info.start_time_us(), absl::ToUnixMicros(start));
  EXPECT_EQ(info.not_serving(), "");
  EXPECT_EQ(info.memory_budget_bytes(), int64_t{1} << 30);
  EXPECT_EQ(info.memory_reserved_bytes(), store_->budget().reserved_bytes());
  EXPECT_GT(info.memory_used_bytes(), 0);
  EXPECT_THAT(Limits(), IsSupersetOf({Pair("push_streams", std::pair<int64_t, int64_t>(0, 5)),
                                      Pair("pull_streams", std::pair<int64_t, int64_t>(0, 6)),
                                      Pair("watch_streams", std::pair<int64_t, int64_t>(0, 7)),
                                      Pair("sessions", std::pair<int64_t, int64_t>(0, 64)),
                                      Pair("models", std::pair<int64_t, int64_t>(1, 64))}));
  server_->SetServing(false);
  EXPECT_THAT(Info().not_serving(), HasSubstr("shutting down"));
}

TEST_F(OperatorServiceTest, TheLogLevelIsTheProcesssToSet) {
  std::string level = "info";
  ASSERT_NO_FATAL_FAILURE(StartServer(
      {.process = {.set_log_level =
                       [&](std::string_view asked) -> absl::StatusOr<ServingProcess::LogLevels> {
         if (asked == "loud") {
           return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadRequest, "no");
         }
         return ServingProcess::LogLevels{std::exchange(level, asked), level};
       }}}));
  v1::SetLogLevelResponse response;
  ASSERT_TRUE(SetLevel("debug", &response).status.ok());
  EXPECT_EQ(response.old_level(), "info");
  EXPECT_EQ(response.level(), "debug");
  const CallResult refused = SetLevel("loud", &response);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(refused.detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
}

TEST_F(OperatorServiceTest, ADrainIsTheProcesssToDo) {
  std::atomic<bool> has_begun = false;
  ASSERT_NO_FATAL_FAILURE(
      StartServer({.process = {.drain_delay = absl::Seconds(5),
                               .drain_grace = absl::Milliseconds(2500),
                               .drain = [&] { return !has_begun.exchange(true); }}}));
  v1::DrainResponse response;
  ASSERT_TRUE(Drain(&response).status.ok());
  EXPECT_TRUE(has_begun);
  EXPECT_TRUE(response.began());
  EXPECT_EQ(response.delay_seconds(), 5);
  EXPECT_EQ(response.grace_seconds(), 2.5);
  ASSERT_TRUE(Drain(&response).status.ok());
  EXPECT_FALSE(response.began());
}

TEST_F(OperatorServiceTest, AProcessThatCanDoNeitherSaysSo) {
  ASSERT_NO_FATAL_FAILURE(StartServer());
  v1::SetLogLevelResponse levels;
  v1::DrainResponse drained;
  for (const CallResult& result : {SetLevel("debug", &levels), Drain(&drained)}) {
    EXPECT_EQ(result.status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
  }
}

TEST_F(OperatorServiceTest, WorkThatIsRefusedHindersNobodyWhoLooksOrEndsAPush) {
  ASSERT_NO_FATAL_FAILURE(StartServer());
  CreateAndOpen();
  v1::PushResponse pushed;
  ASSERT_TRUE(PushFilled(1, 1.0F, &pushed).status.ok());
  EXPECT_TRUE(Pull("ema").complete);
  server_->StartDraining();
  const Pulled refused = Pull("ema");
  EXPECT_EQ(refused.result.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(refused.result.detail.reason(), v1::ERROR_REASON_DRAINING);
  grpc::ClientContext watch_context;
  v1::WatchRequest watch;
  watch.set_model("m");
  const auto reader = stub_->Watch(&watch_context, watch);
  v1::WatchResponse response;
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(Result(reader->Finish(), watch_context).detail.reason(), v1::ERROR_REASON_DRAINING);
  ASSERT_TRUE(PushFilled(2, 2.0F, &pushed).status.ok());
  grpc::ClientContext get_context;
  v1::GetModelRequest get;
  get.set_model("m");
  v1::Model got;
  EXPECT_TRUE(stub_->GetModel(&get_context, get, &got).ok());
  Info();
}

TEST_F(OperatorServiceTest, OneWatchMoreThanThereMayBeIsToldWhenToComeBack) {
  ASSERT_NO_FATAL_FAILURE(StartServer({.limits = {.max_watch_streams = 1}}));
  CreateAndOpen();
  v1::WatchRequest watch;
  watch.set_model("m");
  v1::WatchResponse response;
  {
    grpc::ClientContext first;
    const auto reader = stub_->Watch(&first, watch);
    reader->WaitForInitialMetadata();  // It is watching.
    EXPECT_EQ(Limits()["watch_streams"], (std::pair<int64_t, int64_t>(1, 1)));
    grpc::ClientContext second;
    const auto refused = stub_->Watch(&second, watch);
    EXPECT_FALSE(refused->Read(&response));
    const CallResult result = Result(refused->Finish(), second);
    EXPECT_EQ(result.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_TOO_MANY_STREAMS);
    EXPECT_GT(result.detail.retry_delay_ms(), 0);
    first.TryCancel();
    reader->Finish();
  }
  const absl::Time wait_end = absl::Now() + absl::Seconds(60);
  while (Limits()["watch_streams"].first != 0 && absl::Now() < wait_end) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  grpc::ClientContext third;
  const auto reader = stub_->Watch(&third, watch);
  reader->WaitForInitialMetadata();
  EXPECT_EQ(Limits()["watch_streams"].first, 1);
  third.TryCancel();
  reader->Finish();
}

}  // namespace
}  // namespace ema
