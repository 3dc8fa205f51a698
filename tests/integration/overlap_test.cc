// SPDX-License-Identifier: Apache-2.0
//
// The next step begins to arrive while this one still waits for a rank: it waits at its sender, not
// in the server's memory, and goes through afterwards.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "ema/client.h"
#include "ema/v1/ema_service.grpc.pb.h"
#include "ema/v1/error.pb.h"
#include "server/base/crc32c.h"
#include "tests/testutil/server_process.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

constexpr int64_t kElements = 1'000'000;
constexpr int64_t kHalf = kElements / 2;
constexpr int64_t kChunkBytes = int64_t{1} << 20;
constexpr int64_t kMaxChunks = 500;
// Much less than these, and more than a stream's window.
constexpr int64_t kMemoryBytes = int64_t{100} << 20;
constexpr absl::Duration kTimeout = absl::Seconds(60);

class OverlapTest : public testing::Test {
 protected:
  void SetUp() override {
    EMA_ASSERT_OK_AND_ASSIGN(server_, ServerProcess::Start(EMA_SERVER_BINARY, {}));
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_->address()));
    ASSERT_THAT(client_->CreateModel("m", *Manifest::Create({{.name = "w", .shape = {kElements}}}),
                                     {{{.name = "ema", .schedule = *Schedule::Parse("1ba")}}}),
                IsOk());
    first_ = Open(0);
    second_ = Open(1);
    ASSERT_TRUE(first_ != nullptr && second_ != nullptr);
    ASSERT_THAT(first_->WaitReady(), IsOk());
  }

  std::unique_ptr<ema::Run> Open(int64_t rank) {
    auto run = client_->OpenRun("m", {.launch_id = "life",
                                      .rank = rank,
                                      .world_size = 2,
                                      .shards = std::vector<Shard>{{0, {rank * kHalf}, {kHalf}}}});
    EXPECT_THAT(run, IsOk());
    return run.ok() ? *std::move(run) : nullptr;
  }

  std::unique_ptr<PendingPush> Start(ema::Run& run, int64_t step) {
    auto push = run.StartPush(step, TrainingTime::AtBatch(step),
                              {std::as_bytes(std::span(weights_))}, kTimeout);
    EXPECT_THAT(push, IsOk());
    return push.ok() ? *std::move(push) : nullptr;
  }

  // The first rank's push of a step, of which the server has got everything.
  std::unique_ptr<PendingPush> StartAndAwaitCommitted(int64_t step) {
    std::unique_ptr<PendingPush> push = Start(*first_, step);
    const absl::Time deadline = absl::Now() + kTimeout;
    while (absl::Now() < deadline) {
      const auto progress = first_->QueryPush(step, /*abandon_if_unfinished=*/false);
      EXPECT_THAT(progress, IsOk());
      if (!progress.ok() || progress->rank_committed) return push;
    }
    ADD_FAILURE() << "step " << step << " has not arrived";
    return push;
  }

  const std::vector<float> weights_ = std::vector<float>(kHalf, 1.0f);
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<ema::Run> first_;
  std::unique_ptr<ema::Run> second_;
};

TEST_F(OverlapTest, AnEarlyNextStepIsToldToComeBackAndTakesNoMemory) {
  const std::unique_ptr<PendingPush> waiting = StartAndAwaitCommitted(1);
  const int64_t resident_before = server_->resident_bytes();

  const auto stub = v1::EmaService::NewStub(
      grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::PushResponse response;
  const auto writer = stub->Push(&context, &response);
  v1::PushRequest header;
  header.mutable_header()->set_model("m");
  header.mutable_header()->set_run_epoch(first_->run_epoch());
  header.mutable_header()->set_layout_digest(first_->layout().digest());
  header.mutable_header()->set_step(2);
  header.mutable_header()->mutable_time()->set_batch(2);
  v1::PushRequest chunk;
  const std::string data(kChunkBytes, '\0');
  chunk.mutable_chunk()->set_crc32c(Crc32c(0, std::as_bytes(std::span(data))));
  chunk.mutable_chunk()->set_data(data);
  int64_t chunk_count = 0;
  if (writer->Write(header)) {
    while (chunk_count < kMaxChunks && writer->Write(chunk)) ++chunk_count;
  }
  EXPECT_LT(chunk_count, kMaxChunks) << "nothing stops it";
  const grpc::Status status = writer->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  v1::ErrorDetail detail;
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find("ema-error-detail-bin");
  ASSERT_NE(found, trailers.end());
  ASSERT_TRUE(detail.ParseFromArray(found->second.data(), static_cast<int>(found->second.size())));
  EXPECT_EQ(detail.reason(), v1::ERROR_REASON_MODEL_BUSY);
  EXPECT_GT(detail.retry_delay_ms(), 0);
  EXPECT_LT(server_->resident_bytes(), resident_before + kMemoryBytes);

  EXPECT_FALSE(waiting->done());
  EXPECT_THAT(Start(*second_, 1)->Wait(), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, waiting->Wait());
  EXPECT_EQ(version.number, 1);
}

// As a trainer that does not wait for its replies would do it.
TEST_F(OverlapTest, AClientHoldsAnEarlyNextStepUntilThisOneHasCommitted) {
  const std::unique_ptr<PendingPush> waiting = StartAndAwaitCommitted(1);
  const std::unique_ptr<ema::Run> twin = Open(0);
  ASSERT_NE(twin, nullptr);
  const std::unique_ptr<PendingPush> early = Start(*twin, 2);
  // It has been refused once, at least, and has ended nothing.
  const absl::Time deadline = absl::Now() + kTimeout;
  while (early->stats().stream_count < 2 && absl::Now() < deadline) {
    ASSERT_FALSE(early->WaitDone(absl::Milliseconds(5)));
  }
  EXPECT_FALSE(waiting->done());
  EXPECT_THAT(Start(*second_, 1)->Wait(), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const Version first, waiting->Wait());
  EXPECT_EQ(first.number, 1);
  EXPECT_THAT(Start(*second_, 2)->Wait(), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const Version next, early->Wait());
  EXPECT_EQ(next.number, 2);
  EXPECT_EQ(next.step, 2);
}

}  // namespace
}  // namespace ema
