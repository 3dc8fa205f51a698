// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ema/client.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class PullTest : public testing::Test {
 protected:
  void SetUp() override {
    server_.pulled_bytes.resize(5'500);
    for (size_t i = 0; i < server_.pulled_bytes.size(); ++i) {
      server_.pulled_bytes[i] = static_cast<char>(i * 13 + i / 256);
    }
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_.address()));
  }

  absl::StatusOr<PullInfo> Pull(absl::Duration timeout = absl::Seconds(20)) {
    return client_->Pull("m", "ema", {}, target_, timeout,
                         [this](int64_t bytes) { progress_.push_back(bytes); });
  }

  FakeServer server_{*Manifest::Create({{.name = "w", .shape = {4}}})};
  std::unique_ptr<Client> client_;
  std::string bytes_;
  std::vector<int64_t> progress_;
  int target_calls_ = 0;
  Client::PullTarget target_ =
      [this](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
    ++target_calls_;
    bytes_.assign(info.total_bytes, '?');
    return std::as_writable_bytes(std::span(bytes_.data(), bytes_.size()));
  };
};

TEST_F(PullTest, GivesTheBytesAndTheVersion) {
  const absl::StatusOr<PullInfo> info = Pull();
  ASSERT_THAT(info, IsOk());
  EXPECT_EQ(info->version.number, 42);
  ASSERT_THAT(info->tensors, SizeIs(1));
  EXPECT_EQ(info->tensors[0].spec.TypeString(), "uint8[5500]");
  EXPECT_EQ(bytes_, server_.pulled_bytes);
  EXPECT_THAT(progress_, ElementsAre(1000, 2000, 3000, 4000, 5000, 5500));
}

TEST_F(PullTest, GivesLargeBytes) {
  server_.pulled_bytes.resize(9'000'001, 'z');
  server_.pull_chunk_bytes = 4 << 20;
  ASSERT_THAT(Pull(), IsOk());
  EXPECT_EQ(bytes_, server_.pulled_bytes);
}

TEST_F(PullTest, GivesNothing) {
  server_.pulled_bytes.clear();
  ASSERT_THAT(Pull(), IsOk());
  EXPECT_EQ(target_calls_, 1);
}

TEST_F(PullTest, ReadsChunksInAnyFieldOrder) {
  server_.pull_scripts = {{.other_field_order = true}};
  ASSERT_THAT(Pull(), IsOk());
  EXPECT_EQ(bytes_, server_.pulled_bytes);
}

TEST_F(PullTest, FindsACorruptChunk) {
  server_.pull_scripts = {{.corrupt_chunk = 2}};
  const absl::StatusOr<PullInfo> info = Pull();
  EXPECT_THAT(info, StatusIs(absl::StatusCode::kDataLoss, HasSubstr("2000")));
  EXPECT_THAT(info, ReasonIs(ErrorReason::kChunkCorrupt));
  EXPECT_THAT(server_.pulls(), SizeIs(1));
}

TEST_F(PullTest, FindsAWrongDigest) {
  server_.pull_scripts = {{.wrong_digest = true}};
  EXPECT_THAT(Pull(), ReasonIs(ErrorReason::kDigestMismatch));
}

TEST_F(PullTest, FindsAWrongCount) {
  server_.pull_scripts = {{.wrong_count = true}};
  EXPECT_THAT(Pull(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("7 with 5500")));
}

TEST_F(PullTest, FindsAMissingChunk) {
  server_.pull_scripts = {{.skip_chunk = true}};
  EXPECT_THAT(Pull(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("expected one at 1000")));
}

TEST_F(PullTest, IsNotCompleteWithoutTheTrailer) {
  server_.pull_scripts = {{.no_trailer = true}};
  EXPECT_THAT(Pull(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("trailer")));
}

TEST_F(PullTest, GoesOnWithTheSameVersionWhereTheStreamBroke) {
  server_.pull_scripts = {{.refuse = MakeError(absl::StatusCode::kResourceExhausted,
                                               ErrorReason::kTooManyStreams, "full")},
                          {.break_after_chunks = 3}};
  ASSERT_THAT(Pull(), IsOk());
  EXPECT_EQ(bytes_, server_.pulled_bytes);
  EXPECT_EQ(target_calls_, 1);
  ASSERT_THAT(server_.pulls(), SizeIs(3));
  EXPECT_EQ(server_.pulls()[1].version(), 0);
  EXPECT_EQ(server_.pulls()[2].version(), 42);
  EXPECT_EQ(server_.pulls()[2].incarnation(), 3);
  EXPECT_EQ(server_.pulls()[2].offset(), 3000);
  EXPECT_THAT(progress_, ElementsAre(1000, 2000, 3000, 4000, 5000, 5500));
}

TEST_F(PullTest, StartsOverWhenTheVersionHasGoneMeanwhile) {
  const absl::Status gone =
      MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept, "gone");
  server_.pull_scripts = {{.break_after_chunks = 3}, {.refuse = gone}};
  const absl::StatusOr<PullInfo> info = Pull();
  ASSERT_THAT(info, IsOk());
  EXPECT_EQ(info->received_bytes, 5'500);
  EXPECT_EQ(bytes_, server_.pulled_bytes);
  EXPECT_EQ(target_calls_, 2);
  ASSERT_THAT(server_.pulls(), SizeIs(3));
  EXPECT_EQ(server_.pulls()[2].version(), 0);
  EXPECT_EQ(server_.pulls()[2].offset(), 0);

  // Who has asked for that very version gets no other.
  server_.pull_scripts = {{}, {}, {}, {.break_after_chunks = 3}, {.refuse = gone}};
  EXPECT_THAT(client_->Pull("m", "ema", {.version = 42}, target_, absl::Seconds(20)),
              ReasonIs(ErrorReason::kVersionNotKept));
}

TEST_F(PullTest, StartsOverWhenTheAverageHasBeenBuiltAnewMeanwhile) {
  server_.pull_scripts = {
      {.break_after_chunks = 3, .commit_time_us = 1}, {.commit_time_us = 2}, {.commit_time_us = 2}};
  const absl::StatusOr<PullInfo> info = Pull();
  ASSERT_THAT(info, IsOk());
  EXPECT_EQ(absl::ToUnixMicros(info->version.commit_time), 2);
  EXPECT_EQ(info->received_bytes, 5'500);
  EXPECT_EQ(target_calls_, 2);
  ASSERT_THAT(server_.pulls(), SizeIs(3));
  EXPECT_EQ(server_.pulls()[2].version(), 0);
  EXPECT_EQ(server_.pulls()[2].offset(), 0);
}

TEST_F(PullTest, AStepIsAskedForAgainWhenItsVersionHasGoneMeanwhile) {
  const absl::Status gone =
      MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept, "gone");
  server_.pull_scripts = {{.break_after_chunks = 3}, {.refuse = gone}};
  ASSERT_THAT(client_->Pull("m", "ema", {.step = 0}, target_, absl::Seconds(20)), IsOk());
  EXPECT_EQ(bytes_, server_.pulled_bytes);
  EXPECT_EQ(target_calls_, 2);
  ASSERT_THAT(server_.pulls(), SizeIs(3));
  EXPECT_TRUE(server_.pulls()[0].has_step());
  EXPECT_EQ(server_.pulls()[1].version(), 42);
  EXPECT_FALSE(server_.pulls()[1].has_step());
  EXPECT_EQ(server_.pulls()[2].version(), 0);
  EXPECT_TRUE(server_.pulls()[2].has_step());
}

TEST_F(PullTest, AServerThatPassesOverTheStepIsNotBelieved) {
  const absl::StatusOr<PullInfo> info =
      client_->Pull("m", "ema", {.step = 7}, target_, absl::Seconds(20));
  EXPECT_THAT(info, StatusIs(absl::StatusCode::kInternal, HasSubstr("another step")));
  EXPECT_EQ(target_calls_, 0);
}

TEST_F(PullTest, SurvivesACutConnection) {
  server_.pulled_bytes.resize(3'000'000, 'q');
  TcpProxy proxy(server_.port());
  EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(proxy.address()));
  bool is_cut = false;
  ASSERT_THAT(client_->Pull("m", "ema", {}, target_, absl::Seconds(20),
                            [&](int64_t) {
                              if (!std::exchange(is_cut, true)) proxy.CutAll();
                            }),
              IsOk());
  EXPECT_EQ(bytes_, server_.pulled_bytes);
}

TEST_F(PullTest, ServerErrorsComeThrough) {
  server_.pull_scripts = {
      {.refuse = MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept, "gone")},
      {.refuse = MakeError(absl::StatusCode::kAborted, ErrorReason::kStalled, "slow")}};
  EXPECT_THAT(Pull(), ReasonIs(ErrorReason::kVersionNotKept));
  EXPECT_THAT(Pull(), ReasonIs(ErrorReason::kStalled));
}

TEST_F(PullTest, TheTargetsErrorEndsThePull) {
  target_ = [&](const PullInfo&) {
    ++target_calls_;
    return absl::UnavailableError("no memory today");
  };
  EXPECT_THAT(Pull(), StatusIs(absl::StatusCode::kUnavailable, "no memory today"));
  EXPECT_EQ(target_calls_, 1);
}

TEST_F(PullTest, TheTargetMustHaveTheRightSize) {
  target_ = [&](const PullInfo&) { return std::as_writable_bytes(std::span(bytes_)); };
  EXPECT_THAT(Pull(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("5500")));
}

TEST_F(PullTest, AStalledServerEndsWithTheDeadline) {
  TcpProxy proxy(server_.port());
  EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(proxy.address()));
  proxy.SetStalled(true);
  const absl::Time start = absl::Now();
  EXPECT_THAT(Pull(absl::Milliseconds(200)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("")));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
}

}  // namespace
}  // namespace ema
