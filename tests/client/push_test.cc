// SPDX-License-Identifier: Apache-2.0
//
// Pushes against a server that misbehaves: what is sent again, and when the weights are let go.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ema/client.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

constexpr int64_t kChunkBytes = 64 << 10;

TensorSpec Spec(std::string name, Dtype dtype, std::vector<int64_t> shape) {
  return {.name = std::move(name), .dtype = dtype, .shape = std::move(shape)};
}

// Chunks of 64 KiB: 0 to 2 in "big", 3 with its end, the small ones and the beginning of "last", 4
// with the rest.
Manifest TestManifest() {
  std::vector<TensorSpec> tensors = {Spec("big", Dtype::kFloat32, {60'000})};
  for (int i = 0; i < 20; ++i) {
    tensors.push_back(Spec(absl::StrCat("small", i), Dtype::kBFloat16, {i}));
  }
  tensors.push_back(Spec("last", Dtype::kFloat64, {7'000}));
  return *Manifest::Create(std::move(tensors));
}

// One buffer with random-looking bytes, and the spans of a layout's shards in it.
class Weights {
 public:
  explicit Weights(const RankLayout& layout, int seed = 0) : bytes_(layout.total_bytes(), '\0') {
    for (size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<char>(i * 31 + i / 7 + seed);
    for (size_t i = 0; i < layout.shards().size(); ++i) {
      const int64_t start = layout.shard_start(static_cast<int64_t>(i));
      const int64_t end = layout.shard_start(static_cast<int64_t>(i) + 1);
      shards_.push_back(std::as_bytes(std::span(bytes_.data() + start, end - start)));
    }
  }
  const std::string& bytes() const { return bytes_; }
  std::string& bytes() { return bytes_; }
  const std::vector<std::span<const std::byte>>& shards() const { return shards_; }

 private:
  std::string bytes_;
  std::vector<std::span<const std::byte>> shards_;
};

class PushTest : public testing::Test {
 protected:
  void Open(const std::string& address, Client::Options options = {}) {
    options.chunk_bytes = kChunkBytes;
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(address, options));
    EMA_ASSERT_OK_AND_ASSIGN(run_, client_->OpenRun("m", {.launch_id = "life"}));
    weights_.emplace(run_->layout());
  }
  void Open() { Open(server_.address()); }

  std::unique_ptr<PendingPush> Start(int64_t step, absl::Duration timeout = absl::Seconds(20)) {
    auto push = run_->StartPush(step, TrainingTime::AtBatch(step), weights_->shards(), timeout);
    EXPECT_THAT(push, IsOk());
    return push.ok() ? *std::move(push) : nullptr;
  }

  absl::StatusOr<Version> Push(int64_t step, absl::Duration timeout = absl::Seconds(20)) {
    return run_->Push(step, TrainingTime::AtBatch(step), weights_->shards(), timeout);
  }

  // Until the first push's has come.
  void AwaitCommitMessage() {
    while (server_.pushes().empty() || !server_.pushes()[0].has_commit) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  }

  FakeServer server_{TestManifest()};
  std::unique_ptr<Client> client_;
  std::unique_ptr<ema::Run> run_;  // testing::Test has a Run, too.
  std::optional<Weights> weights_;
};

TEST_F(PushTest, SendsAllBytesOnceAndReturnsTheVersion) {
  Open();
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(10));
  EXPECT_EQ(version.number, 1);
  EXPECT_EQ(version.step, 10);
  EXPECT_EQ(version.time, TrainingTime::AtBatch(10));
  EXPECT_EQ(server_.StepBytes(10, 0), weights_->bytes());
  ASSERT_THAT(server_.pushes(), SizeIs(1));
  const FakeServer::SeenPush seen = server_.pushes()[0];
  EXPECT_EQ(seen.header.layout_digest(), run_->layout().digest());
  EXPECT_EQ(seen.commit.chunk_count(), 5);
  EXPECT_EQ(seen.commit.total_bytes(), run_->layout().total_bytes());
  EXPECT_EQ(run_->latest()->number, 1);
}

TEST_F(PushTest, CutsChunksBetweenElements) {
  Open();
  ASSERT_THAT(Push(1), IsOk());
  const FakeServer::SeenPush seen = server_.pushes()[0];
  for (const auto& [offset, length] : seen.chunks) {
    EXPECT_TRUE(run_->layout().IsElementBoundary(offset));
    EXPECT_TRUE(run_->layout().IsElementBoundary(offset + length));
    EXPECT_LE(length, kChunkBytes);
  }
}

TEST_F(PushTest, ReportsStats) {
  Open();
  const auto push = Start(1);
  ASSERT_THAT(push->Wait(), IsOk());
  const PendingPush::Stats stats = push->stats();
  EXPECT_EQ(stats.total_bytes, run_->layout().total_bytes());
  EXPECT_EQ(stats.sent_bytes, stats.total_bytes);
  EXPECT_EQ(stats.stream_count, 1);
  EXPECT_GT(stats.send_time, absl::ZeroDuration());
  EXPECT_LT(stats.send_time, absl::Seconds(10));
}

TEST_F(PushTest, AnEmptyRankSendsHeaderAndCommit) {
  EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_.address()));
  EMA_ASSERT_OK_AND_ASSIGN(run_, client_->OpenRun("m", {.shards = std::vector<Shard>()}));
  EMA_ASSERT_OK_AND_ASSIGN(const Version version,
                           run_->Push(1, TrainingTime::AtBatch(1), {}, absl::Seconds(20)));
  EXPECT_EQ(version.number, 1);
  EXPECT_THAT(server_.pushes()[0].chunks, IsEmpty());
  EXPECT_EQ(server_.pushes()[0].commit.digest(), 0);
}

TEST_F(PushTest, WaitsUntilTheOtherRanksHaveJoined) {
  server_.not_ready_count = 3;
  Open();
  ASSERT_THAT(Push(1), IsOk());
  EXPECT_EQ(server_.open_run_count(), 4);
  EXPECT_THAT(server_.pushes(), SizeIs(1));
}

TEST_F(PushTest, NamesTheRanksThatDoNotJoin) {
  server_.not_ready_count = 1'000'000;
  Open();
  EXPECT_THAT(Push(1, absl::Seconds(2)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("7")));
  EXPECT_THAT(server_.pushes(), IsEmpty());
}

TEST_F(PushTest, ResendsOnlyWhatIsMissing) {
  server_.push_scripts = {{.break_after_chunks = 2}};
  Open();
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(1));
  EXPECT_EQ(version.number, 1);
  EXPECT_EQ(server_.StepBytes(1, 0), weights_->bytes());
  ASSERT_THAT(server_.pushes(), SizeIs(2));
  const FakeServer::SeenPush again = server_.pushes()[1];
  EXPECT_EQ(again.chunks.front().first, 2 * kChunkBytes);
  EXPECT_THAT(again.chunks, SizeIs(3));
  EXPECT_EQ(again.commit.chunk_count(), 3);
  EXPECT_EQ(again.commit.total_bytes(), run_->layout().total_bytes() - 2 * kChunkBytes);
}

TEST_F(PushTest, ResendsACorruptChunk) {
  server_.push_scripts = {{.corrupt_chunk = 1}};
  Open();
  ASSERT_THAT(Push(1), IsOk());
  EXPECT_EQ(server_.StepBytes(1, 0), weights_->bytes());
  EXPECT_EQ(server_.pushes()[1].chunks.front().first, kChunkBytes);
}

TEST_F(PushTest, GivesUpWhenAChunkStaysCorrupt) {
  server_.push_scripts.assign(20, {.corrupt_chunk = 0});
  Open();
  EXPECT_THAT(Push(1), ReasonIs(ErrorReason::kChunkCorrupt));
  EXPECT_LT(server_.pushes().size(), 10U);
  EXPECT_TRUE(server_.queries().back().abandon_if_unfinished());
}

TEST_F(PushTest, TakesTheVersionFromQueryPushIfTheReplyWasLost) {
  server_.push_scripts = {{.lose_reply = true}};
  Open();
  EMA_ASSERT_OK_AND_ASSIGN(const Version version, Push(1));
  EXPECT_EQ(version.step, 1);
  EXPECT_THAT(server_.pushes(), SizeIs(1));
}

TEST_F(PushTest, AStepThatWasCommittedWithOtherContentIsNoSuccess) {
  server_.push_scripts = {{.lose_reply = true}};
  server_.committed_digest = 12345;
  Open();
  EXPECT_THAT(Push(1), StatusIs(absl::StatusCode::kAborted, HasSubstr("with other content")));
}

TEST_F(PushTest, SendsOnlyTheCommitAgainIfThatWasLost) {
  server_.push_scripts = {{.lose_commit = true}};
  Open();
  ASSERT_THAT(Push(1), IsOk());
  ASSERT_THAT(server_.pushes(), SizeIs(2));
  EXPECT_THAT(server_.pushes()[1].chunks, IsEmpty());
  EXPECT_EQ(server_.pushes()[1].commit.chunk_count(), 0);
  EXPECT_EQ(server_.pushes()[1].commit.digest(), server_.pushes()[0].commit.digest());
}

TEST_F(PushTest, AttachesAgainWithoutBytesWhileItWaitsForOtherRanks) {
  server_.world_size = 2;
  server_.push_scripts = {{.lose_reply = true}};
  Open();
  const auto push = Start(1);
  ASSERT_TRUE(server_.AwaitPushes(2));
  EXPECT_TRUE(push->WaitReleased(absl::Seconds(10)));
  // The other rank.
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto other, client_->OpenRun("m", {.launch_id = "life", .rank = 1, .world_size = 2}));
  ASSERT_THAT(other->Push(1, TrainingTime::AtBatch(1), weights_->shards(), absl::Seconds(20)),
              IsOk());
  EXPECT_THAT(push->Wait(), IsOk());
  EXPECT_THAT(server_.pushes()[1].chunks, IsEmpty());
}

TEST_F(PushTest, AttachesAgainAlsoAfterTheRelease) {
  server_.world_size = 2;
  TcpProxy proxy(server_.port());
  Open(proxy.address());
  const auto push = Start(1);
  ASSERT_TRUE(push->WaitReleased(absl::Seconds(10)));
  AwaitCommitMessage();
  std::fill(weights_->bytes().begin(), weights_->bytes().end(), 'x');  // As the trainer does.
  proxy.CutAll();
  ASSERT_TRUE(server_.AwaitPushes(2));
  EXPECT_FALSE(push->done());
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto other, client_->OpenRun("m", {.launch_id = "life", .rank = 1, .world_size = 2}));
  ASSERT_THAT(other->Push(1, TrainingTime::AtBatch(1), weights_->shards(), absl::Seconds(20)),
              IsOk());
  EXPECT_THAT(push->Wait(), IsOk());
  EXPECT_THAT(server_.pushes()[1].chunks, IsEmpty());
}

TEST_F(PushTest, NobodyIsToldThatItWaits) {
  server_.push_scripts = {{.hold_reply = true}};
  auto proxy = std::make_unique<TcpProxy>(server_.port());
  std::atomic<int> told = 0;
  Client::Options options;
  options.on_wait = [&](const absl::Status&) { ++told; };
  Open(proxy->address(), options);
  const auto push = Start(1);
  AwaitCommitMessage();
  proxy = nullptr;
  // It asks in vain what the server has of it; a call would tell after two seconds.
  absl::SleepFor(absl::Seconds(4));
  EXPECT_EQ(told, 0);
  push->Abandon();
  server_.Release();
}

TEST_F(PushTest, NeverResendsAfterTheRelease) {
  // All bytes leave, but the last chunk does not arrive.
  server_.push_scripts = {{.corrupt_chunk = 4, .hold_chunks = true}};
  Open();
  const auto push = Start(1);
  ASSERT_TRUE(server_.AwaitPushes(1));
  ASSERT_TRUE(push->WaitReleased(absl::Seconds(10)));
  const std::string sent = weights_->bytes();
  std::fill(weights_->bytes().begin(), weights_->bytes().end(), 'x');
  server_.Release();
  EXPECT_THAT(push->Wait(), ReasonIs(ErrorReason::kStepAbandoned));
  EXPECT_THAT(server_.pushes(), SizeIs(1));
  EXPECT_TRUE(server_.queries().back().abandon_if_unfinished());
  EXPECT_FALSE(server_.IsCommitted(1));
  EXPECT_EQ(server_.StepBytes(1, 0), sent.substr(0, server_.StepBytes(1, 0).size()));
}

TEST_F(PushTest, StartsAnewIfTheServerKnowsNothing) {
  server_.push_scripts = {
      {.refuse = MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy, "busy")},
      {.refuse = MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDraining, "drain")}};
  Open();
  ASSERT_THAT(Push(1), IsOk());
  ASSERT_THAT(server_.pushes(), SizeIs(3));
  EXPECT_THAT(server_.pushes()[2].chunks, SizeIs(5));
}

TEST_F(PushTest, BacksOffAsTheServerAsks) {
  absl::Status busy =
      MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyStreams, "streams");
  SetRetryDelay(busy, absl::Milliseconds(300));
  server_.push_scripts = {{.refuse = busy}};
  Open();
  const absl::Time start = absl::Now();
  ASSERT_THAT(Push(1), IsOk());
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(240));
}

struct FinalErrorCase {
  const char* name;
  absl::StatusCode code;
  ErrorReason reason;
};
class FinalErrorTest : public PushTest, public testing::WithParamInterface<FinalErrorCase> {};
TEST_P(FinalErrorTest, EndsThePush) {
  server_.push_scripts.assign(3,
                              {.refuse = MakeError(GetParam().code, GetParam().reason, "why not")});
  Open();
  const auto push = Start(1);
  const absl::StatusOr<Version> version = push->Wait();
  EXPECT_THAT(version, StatusIs(GetParam().code, HasSubstr("why not")));
  EXPECT_THAT(version, ReasonIs(GetParam().reason));
  EXPECT_THAT(server_.pushes(), SizeIs(1));
  EXPECT_TRUE(push->WaitReleased(absl::ZeroDuration()));
}
INSTANTIATE_TEST_SUITE_P(
    All, FinalErrorTest,
    testing::Values(
        FinalErrorCase{"StaleStep", absl::StatusCode::kAborted, ErrorReason::kStaleStep},
        FinalErrorCase{"Abandoned", absl::StatusCode::kAborted, ErrorReason::kStepAbandoned},
        FinalErrorCase{"NonFinite", absl::StatusCode::kInvalidArgument, ErrorReason::kNonFinite},
        FinalErrorCase{"Memory", absl::StatusCode::kResourceExhausted, ErrorReason::kMemoryBudget},
        FinalErrorCase{"Device", absl::StatusCode::kInternal, ErrorReason::kDevice}),
    [](const auto& test) { return test.param.name; });

TEST_F(PushTest, SurvivesACutConnectionAnywhere) {
  TcpProxy proxy(server_.port());
  Open(proxy.address());
  int64_t step = 1;
  for (const int64_t cut : {200, 5'000, 70'000, 150'000, 250'000, 298'000}) {
    SCOPED_TRACE(cut);
    ASSERT_THAT(Push(step), IsOk());
    ++step;
    proxy.CutAfter(cut);
    ASSERT_THAT(Push(step), IsOk());
    EXPECT_EQ(server_.StepBytes(step, 0), weights_->bytes());
    ++step;
  }
  EXPECT_GE(proxy.connection_count(), 5);
}

TEST_F(PushTest, JoinsAgainWhenTheServerHasForgottenTheRun) {
  Open();
  ASSERT_THAT(Push(1), IsOk());
  server_.Stop();
  server_.ForgetRuns();
  server_.Start();
  ASSERT_THAT(Push(2), IsOk());
  EXPECT_EQ(run_->run_epoch(), 2);
  EXPECT_EQ(server_.StepBytes(2, 0), weights_->bytes());
}

TEST_F(PushTest, StaysFencedByANewerRun) {
  Open();
  server_.ForgetRuns();
  server_.fenced = true;
  EXPECT_THAT(Push(1), ReasonIs(ErrorReason::kFenced));
  server_.fenced = false;
  EXPECT_THAT(Push(2), ReasonIs(ErrorReason::kFenced));
}

TEST_F(PushTest, WaitsForAServerThatComesBack) {
  Open();
  server_.Stop();
  const auto push = Start(1);
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_FALSE(push->done());
  server_.Start();
  EXPECT_THAT(push->Wait(), IsOk());
}

TEST_F(PushTest, EndsWithDeadlineExceededIfTheServerStaysAway) {
  Open();
  server_.Stop();
  EXPECT_THAT(Push(1, absl::Seconds(2)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("refused")));
}

TEST_F(PushTest, AServerThatIsGoneDoesNotHoldTheTrainer) {
  Open();
  server_.Stop();
  const auto push = Start(1, absl::Minutes(5));
  const absl::Time start = absl::Now();
  EXPECT_FALSE(push->WaitReleased(absl::Minutes(5)));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
}

TEST_F(PushTest, AReplyIsNotWaitedForFromAServerThatIsGone) {
  server_.push_scripts = {{.hold_reply = true}};
  Open();
  const auto push = Start(1, absl::Minutes(5));
  ASSERT_TRUE(push->WaitReleased(absl::Seconds(20)));
  EXPECT_FALSE(push->WaitDone(absl::Milliseconds(10)));
  server_.Stop();
  const absl::Time start = absl::Now();
  EXPECT_FALSE(push->WaitDone(absl::Minutes(5)));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  server_.Start();
  EXPECT_THAT(push->Wait(), IsOk());
  EXPECT_TRUE(push->WaitDone(absl::ZeroDuration()));
}

TEST_F(PushTest, AReplyIsNotWaitedForFromAServerThatHangs) {
  server_.push_scripts = {{.hold_reply = true}};
  TcpProxy proxy(server_.port());
  Open(proxy.address());
  const auto push = Start(1, absl::Minutes(5));
  ASSERT_TRUE(push->WaitReleased(absl::Seconds(20)));
  proxy.SetStalled(true);
  const absl::Time start = absl::Now();
  EXPECT_FALSE(push->WaitDone(absl::Minutes(5)));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  proxy.SetStalled(false);
  server_.Release();
  EXPECT_THAT(push->Wait(), IsOk());
}

TEST_F(PushTest, AReplyIsWaitedForWhileTheServerAnswers) {
  server_.push_scripts = {{.hold_reply = true}};
  Open();
  const auto push = Start(1, absl::Minutes(5));
  ASSERT_TRUE(push->WaitReleased(absl::Seconds(20)));
  std::jthread release([&] {
    // It has been asked whether it is there.
    while (server_.queries().empty()) absl::SleepFor(absl::Milliseconds(10));
    EXPECT_FALSE(server_.queries().front().abandon_if_unfinished());
    server_.Release();
  });
  EXPECT_TRUE(push->WaitDone(absl::Minutes(5)));
  EXPECT_THAT(push->Wait(), IsOk());
}

TEST_F(PushTest, EndsFencedIfItMayNotJoinAgain) {
  EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_.address()));
  EMA_ASSERT_OK_AND_ASSIGN(run_, client_->OpenRun("m", {.launch_id = "life", .rejoins = false}));
  weights_.emplace(run_->layout());
  server_.ForgetRuns();
  EXPECT_THAT(Push(1), ReasonIs(ErrorReason::kFenced));
  EXPECT_EQ(server_.open_run_count(), 1);
}

TEST_F(PushTest, WaitReadyWaitsForTheOtherRanks) {
  server_.not_ready_count = 3;
  Open();
  EXPECT_THAT(run_->WaitReady(absl::Seconds(20)), IsOk());
  EXPECT_EQ(server_.open_run_count(), 4);
  server_.not_ready_count = 1'000'000;
  EMA_ASSERT_OK_AND_ASSIGN(run_, client_->OpenRun("m", {.launch_id = "next"}));
  const absl::Status status = run_->WaitReady(absl::Seconds(1));
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("7")));
  EXPECT_THAT(status, ReasonIs(ErrorReason::kRunIncomplete));
}

TEST_F(PushTest, TimeOutNamesTheRanksItWaitedFor) {
  server_.world_size = 2;
  Open();
  const absl::StatusOr<Version> version = Push(1, absl::Seconds(2));
  EXPECT_THAT(version,
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("not committed: 1")));
  EXPECT_THAT(version, ReasonIs(ErrorReason::kSessionExpired));
  EXPECT_TRUE(server_.queries().back().abandon_if_unfinished());
}

TEST_F(PushTest, ReleasesBeforeTheReply) {
  server_.push_scripts = {{.hold_reply = true}};
  Open();
  const auto push = Start(1);
  EXPECT_TRUE(push->WaitReleased(absl::Seconds(10)));
  EXPECT_FALSE(push->done());
  server_.Release();
  EXPECT_THAT(push->Wait(), IsOk());
}

TEST_F(PushTest, AbandonsTheStepWhenTheReleaseTakesTooLong) {
  server_.not_ready_count = 1'000'000;
  Open();
  const auto push = Start(1, absl::Minutes(5));
  const absl::Time start = absl::Now();
  EXPECT_FALSE(push->WaitReleased(absl::Milliseconds(50)));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  EXPECT_THAT(push->Wait(), ReasonIs(ErrorReason::kStepAbandoned));
  ASSERT_FALSE(server_.queries().empty());
  EXPECT_TRUE(server_.queries().back().abandon_if_unfinished());
}

TEST_F(PushTest, AfterATimeOutTheNextPushWorks) {
  TcpProxy proxy(server_.port());
  Open(proxy.address());
  ASSERT_THAT(Push(1), IsOk());
  proxy.SetStalled(true);
  const auto push = Start(2);
  // What does not fit into the sockets' buffers stays here.
  (void)push->WaitReleased(absl::Milliseconds(100));
  push->Abandon();
  proxy.SetStalled(false);
  EXPECT_THAT(Push(3), IsOk());
}

// Larger than all buffers between the client and a server that reads nothing.
Manifest HugeManifest() { return *Manifest::Create({Spec("huge", Dtype::kUInt8, {64 << 20})}); }

TEST(StalledServerTest, OneThatAsksToWaitHoldsTheTrainer) {
  FakeServer server(HugeManifest());
  absl::Status busy =
      MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyStreams, "streams");
  SetRetryDelay(busy, absl::Milliseconds(500));
  server.push_scripts.assign(5, {.refuse = busy});
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(server.address()));
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, client->OpenRun("m", {}));
  const Weights weights(run->layout());
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, run->StartPush(1, TrainingTime::AtBatch(1),
                                                           weights.shards(), absl::Minutes(1)));
  EXPECT_TRUE(push->WaitReleased(absl::Minutes(1)));
  EXPECT_THAT(push->Wait(), IsOk());
  EXPECT_THAT(server.pushes(), SizeIs(6));
}

TEST(StalledServerTest, AnInterruptCountsAsTheEndOfMaxWait) {
  FakeServer server(HugeManifest());
  server.push_scripts = {{.hold_chunks = true}};
  std::atomic<bool> interrupted = false;
  Client::Options options;
  options.is_interrupted = [&] { return interrupted.load(); };
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(server.address(), options));
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, client->OpenRun("m", {}));
  const Weights weights(run->layout());
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, run->StartPush(1, TrainingTime::AtBatch(1),
                                                           weights.shards(), absl::Minutes(5)));
  ASSERT_TRUE(server.AwaitPushes(1));
  interrupted = true;
  const absl::Time start = absl::Now();
  EXPECT_FALSE(push->WaitReleased(absl::Minutes(5)));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
}

TEST(StalledServerTest, WeightsAreReleasedInTime) {
  FakeServer server(HugeManifest());
  TcpProxy proxy(server.port());
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(proxy.address()));
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, client->OpenRun("m", {}));
  const Weights weights(run->layout());
  // Opens gRPC's windows, so that its own flow control is not what stops the push below.
  for (int64_t step = 1; step <= 4; ++step) {
    ASSERT_THAT(run->Push(step, TrainingTime::AtBatch(step), weights.shards(), absl::Seconds(60)),
                IsOk());
  }
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, run->StartPush(9, TrainingTime::AtBatch(9),
                                                           weights.shards(), absl::Seconds(60)));
  proxy.SetStalled(true);
  const absl::Time start = absl::Now();
  EXPECT_FALSE(push->WaitReleased(absl::Milliseconds(300)));
  // Without its own limit it would end after 5 s: 4 s without progress, 1 s for the server's
  // answer.
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));
  EXPECT_THAT(push->Wait(), ReasonIs(ErrorReason::kStepAbandoned));
  proxy.SetStalled(false);
  EXPECT_THAT(run->Push(10, TrainingTime::AtBatch(10), weights.shards(), absl::Seconds(60)),
              IsOk());
}

TEST(StalledServerTest, OneThatHangsDoesNotHoldTheTrainer) {
  FakeServer server(HugeManifest());
  TcpProxy proxy(server.port());
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(proxy.address()));
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, client->OpenRun("m", {}));
  const Weights weights(run->layout());
  proxy.SetStalled(true);
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, run->StartPush(1, TrainingTime::AtBatch(1),
                                                           weights.shards(), absl::Minutes(5)));
  const absl::Time start = absl::Now();
  EXPECT_FALSE(push->WaitReleased(absl::Minutes(5)));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  EXPECT_THAT(push->Wait(), ReasonIs(ErrorReason::kStepAbandoned));
  proxy.SetStalled(false);
  EXPECT_THAT(run->Push(2, TrainingTime::AtBatch(2), weights.shards(), absl::Seconds(60)), IsOk());
}

TEST(StalledServerTest, OneThatAnswersHoldsTheTrainer) {
  FakeServer server(HugeManifest());
  server.push_scripts = {{.hold_chunks = true}};
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(server.address()));
  EMA_ASSERT_OK_AND_ASSIGN(const auto run, client->OpenRun("m", {}));
  const Weights weights(run->layout());
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, run->StartPush(1, TrainingTime::AtBatch(1),
                                                           weights.shards(), absl::Minutes(5)));
  std::jthread release([&] {
    while (server.queries().empty()) absl::SleepFor(absl::Milliseconds(10));
    server.Release();
  });
  EXPECT_TRUE(push->WaitReleased(absl::Minutes(5)));
  EXPECT_THAT(push->Wait(), IsOk());
}

TEST_F(PushTest, OtherCallsGoOnWhenTheConnectionIsGivenUp) {
  TcpProxy proxy(server_.port());
  Open(proxy.address());
  proxy.SetStalled(true);
  std::atomic<bool> ok = false;
  std::thread other([&] { ok = client_->GetModel("m").ok(); });
  const auto push = Start(1);
  (void)push->WaitReleased(absl::Milliseconds(50));
  push->Abandon();
  proxy.SetStalled(false);
  other.join();
  EXPECT_TRUE(ok);
}

TEST_F(PushTest, DestroyingAPushAbandonsIt) {
  server_.world_size = 2;
  Open();
  {
    const auto push = Start(1);
    ASSERT_TRUE(server_.AwaitPushes(1));
  }
  ASSERT_FALSE(server_.queries().empty());
  EXPECT_TRUE(server_.queries().back().abandon_if_unfinished());
  EXPECT_FALSE(server_.IsCommitted(1));
}

TEST_F(PushTest, DestroyingTheRunEndsItsPush) {
  server_.world_size = 2;
  Open();
  const auto push = Start(1);
  ASSERT_TRUE(server_.AwaitPushes(1));
  run_.reset();
  EXPECT_TRUE(push->done());
  EXPECT_THAT(push->Wait(), ReasonIs(ErrorReason::kStepAbandoned));
}

TEST_F(PushTest, AnAbandonedPushThatHadCommittedReturnsItsVersion) {
  server_.push_scripts = {{.hold_reply = true}};
  Open();
  const auto push = Start(1);
  while (!server_.IsCommitted(1)) absl::SleepFor(absl::Milliseconds(1));
  push->Abandon();
  EXPECT_THAT(push->Wait(), IsOk());
}

TEST_F(PushTest, RefusesASecondPushMeanwhile) {
  server_.push_scripts = {{.hold_reply = true}};
  Open();
  const auto push = Start(1);
  const auto second =
      run_->StartPush(2, TrainingTime::AtBatch(2), weights_->shards(), absl::Seconds(1));
  EXPECT_THAT(second, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("still pushing")));
  EXPECT_THAT(second, ReasonIs(ErrorReason::kModelBusy));
  server_.Release();
  ASSERT_THAT(push->Wait(), IsOk());
  EXPECT_THAT(Push(2), IsOk());
}

TEST_F(PushTest, RefusesShardsOfOtherSizes) {
  Open();
  std::vector<std::span<const std::byte>> shards = weights_->shards();
  shards[0] = shards[0].first(8);
  EXPECT_THAT(run_->StartPush(1, TrainingTime::AtBatch(1), shards, absl::Seconds(1)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"big\"")));
  shards.pop_back();
  EXPECT_THAT(run_->StartPush(1, TrainingTime::AtBatch(1), shards, absl::Seconds(1)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("22 shards, but 21")));
}

TEST_F(PushTest, AnInterruptEndsTheWaitsNotThePush) {
  server_.push_scripts = {{.hold_reply = true}};
  std::atomic<bool> interrupted = false;
  Client::Options options;
  options.is_interrupted = [&] { return interrupted.load(); };
  Open(server_.address(), options);
  const auto push = Start(1);
  ASSERT_TRUE(push->WaitReleased(absl::Seconds(10)));
  interrupted = true;
  EXPECT_THAT(push->Wait(), StatusIs(absl::StatusCode::kCancelled, HasSubstr("interrupted")));
  interrupted = false;
  server_.Release();
  EXPECT_THAT(push->Wait(), IsOk());
}

TEST_F(PushTest, IsDueFollowsTheIntervalsOfTheLastVersion) {
  Open();
  EXPECT_THAT(run_->IsDue(TrainingTime::AtBatch(3)), IsOkAndHolds(true));  // The first one.
  ASSERT_THAT(Push(3), IsOk());
  EXPECT_THAT(run_->IsDue(TrainingTime::AtBatch(9)), IsOkAndHolds(false));
  EXPECT_THAT(run_->IsDue(TrainingTime::AtBatch(10)), IsOkAndHolds(true));
  EXPECT_THAT(run_->IsDue(TrainingTime()), ReasonIs(ErrorReason::kBadTime));
}

TEST_F(PushTest, ASlowReplyToJoiningTakesNothingBack) {
  Open();
  ASSERT_THAT(Push(1), IsOk());
  server_.hold_join = true;
  absl::Status refreshed;
  std::thread refreshing([&] { refreshed = run_->RefreshPlan(absl::Seconds(20)); });
  while (server_.open_run_count() < 2) absl::SleepFor(absl::Milliseconds(1));
  server_.plan.emplace();
  server_.plan->set_revision(2);
  ASSERT_THAT(Push(20), IsOk());
  server_.Release();
  refreshing.join();
  EXPECT_THAT(refreshed, IsOk());
  EXPECT_EQ(run_->latest()->number, 2);
  EXPECT_EQ(run_->plan().revision, 2);
}

TEST_F(PushTest, AServerThatStandsAtAnOlderVersionIsBelieved) {
  Open();
  EMA_ASSERT_OK_AND_ASSIGN(const Version first, Push(1));
  server_.plan.emplace();
  server_.plan->set_revision(2);
  ASSERT_THAT(Push(20), IsOk());
  server_.ForgetRuns();
  server_.plan.reset();
  v1::VersionRecord record;
  record.set_version(first.number);
  record.set_incarnation(first.incarnation);
  server_.SetLatest(record);
  ASSERT_THAT(run_->RefreshPlan(absl::Seconds(20)), IsOk());
  EXPECT_EQ(run_->latest()->number, 1);
  EXPECT_EQ(run_->plan().revision, 1);
}

TEST_F(PushTest, IsDueFollowsThePlanOfTheLastReply) {
  Open();
  v1::PushPlan& plan = server_.plan.emplace();
  plan.set_revision(2);
  v1::PushPlan::Entry* const entry = plan.add_tracks();
  entry->mutable_track()->set_name("slow");
  (*entry->mutable_track()->mutable_schedule())["half_life"] = "100ba";
  (*entry->mutable_track()->mutable_schedule())["update_interval"] = "20ba";
  v1::ScheduleState* const state = entry->add_states();
  state->set_update_count(4);
  state->mutable_last_update()->set_batch(30);
  state->mutable_started()->set_batch(30);
  EXPECT_EQ(run_->plan().tracks[0].track.name, "ema");
  ASSERT_THAT(Push(36), IsOk());
  EXPECT_EQ(run_->plan().revision, 2);
  EXPECT_EQ(run_->plan().tracks[0].track.name, "slow");
  EXPECT_THAT(run_->IsDue(TrainingTime::AtBatch(39)), IsOkAndHolds(false));
  EXPECT_THAT(run_->IsDue(TrainingTime::AtBatch(40)), IsOkAndHolds(true));

  plan.mutable_tracks(0)->mutable_track()->set_paused(true);
  ASSERT_THAT(Push(40), IsOk());
  EXPECT_THAT(run_->IsDue(TrainingTime::AtBatch(60)), IsOkAndHolds(false));
}

TEST_F(PushTest, QueryPushReportsProgress) {
  server_.world_size = 2;
  Open();
  const auto push = Start(1);
  AwaitCommitMessage();
  absl::StatusOr<PushProgress> progress = run_->QueryPush(1, false);
  ASSERT_THAT(progress, IsOk());
  EXPECT_EQ(progress->state, PushProgress::State::kOpen);
  EXPECT_THAT(progress->missing, IsEmpty());
  EXPECT_THAT(progress->missing_ranks, ElementsAre(1));
  progress = run_->QueryPush(1, true);
  ASSERT_THAT(progress, IsOk());
  EXPECT_EQ(progress->state, PushProgress::State::kAbandoned);
  EXPECT_THAT(push->Wait(), ReasonIs(ErrorReason::kStepAbandoned));
}

TEST_F(PushTest, GivesAStepUpWithTheFirstKibibyteOfTheReason) {
  Open();
  std::string why = "x";
  while (why.size() < 2000) why += "\u00e4";  // Byte 1024 is in the middle of one.
  EXPECT_EQ(run_->SkipStep(7, why, absl::Seconds(10))->state, PushProgress::State::kUnknown);
  const v1::QueryPushRequest query = server_.queries().back();
  EXPECT_EQ(query.step(), 7);
  EXPECT_TRUE(query.abandon_if_unfinished());
  EXPECT_EQ(query.skip_reason(), std::string_view(why).substr(0, 1023));
}

TEST_F(PushTest, LaunchIdIsNeededForSeveralRanks) {
  Open();
  EXPECT_THAT(client_->OpenRun("m", {.world_size = 2}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("launch_id")));
}

}  // namespace
}  // namespace ema
