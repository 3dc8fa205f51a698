// SPDX-License-Identifier: Apache-2.0
//
// The same-host lane: the client of the product and the server, through shared memory; and what a
// client of this host can do wrong there.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "ema/client.h"
#include "ema/v1/lane.pb.h"
#include "server/wire/lane_pipe.h"
#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

// A model "big" with one track of 3 MB, which takes the ring several times over.
class LaneTest : public RpcFixture {
 protected:
  static constexpr int64_t kCount = 750'001;

  void Start(RpcServer::Options options = {}, Client::Options client_options = {}) {
    StartServer(options);
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(address_, client_options));
    const Manifest manifest = *Manifest::Create({{"w", Dtype::kFloat32, {kCount}}});
    ASSERT_THAT(client_->CreateModel("big", manifest,
                                     {{.name = "ema", .schedule = *Schedule::Parse("1ba")}}),
                IsOk());
  }

  void OpenRun(Client::RunOptions options = {}) {
    EMA_ASSERT_OK_AND_ASSIGN(trainer_, client_->OpenRun("big", options));
  }

  absl::StatusOr<std::unique_ptr<PendingPush>> StartPush(int64_t step, float value) {
    weights_.assign(kCount, value);
    return trainer_->StartPush(step, TrainingTime::AtBatch(step),
                               {std::as_bytes(std::span(weights_))}, absl::Seconds(30));
  }
  absl::StatusOr<Version> Push(int64_t step, float value) {
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<PendingPush> push, StartPush(step, value));
    EMA_ASSIGN_OR_RETURN(Version version, push->Wait());
    stats_ = push->stats();
    return version;
  }

  // The value of every element; NaN if they differ.
  absl::StatusOr<float> Pull(const Client::PullOptions& options = {}) {
    std::vector<float> pulled;
    EMA_ASSIGN_OR_RETURN(info_, client_->Pull(
                                    "big", "ema", options,
                                    [&](const PullInfo& info) {
                                      pulled.assign(info.total_bytes / 4, -1);
                                      return std::as_writable_bytes(std::span(pulled));
                                    },
                                    absl::Seconds(30)));
    for (const float value : pulled) {
      if (value != pulled[0]) return std::nanf("");
    }
    return pulled.empty() ? 0 : pulled[0];
  }

  // A lane of a client that keeps to no rules.
  std::unique_ptr<LanePipe> RawLane(const SharedMemory* window = nullptr) {
    v1::GetLaneResponse offer;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->GetLane(&context, v1::GetLaneRequest(), &offer).ok());
    absl::StatusOr<std::unique_ptr<LanePipe>> lane = LanePipe::Connect(offer.socket_name(), window);
    EXPECT_THAT(lane, IsOk());
    return lane.ok() ? *std::move(lane) : nullptr;
  }
  static v1::LaneResponse Answer(LanePipe& lane) {
    v1::LaneResponse response;
    const absl::StatusOr<LanePipe::Frame> frame = lane.Receive(nullptr);
    EXPECT_THAT(frame, IsOk());
    EXPECT_TRUE(frame.ok() && response.ParseFromString(frame->message));
    return response;
  }
  v1::LaneRequest PushRequest(int64_t step) const {
    v1::LaneRequest request;
    v1::PushHeader& header = *request.mutable_push();
    header.set_model("big");
    header.set_run_epoch(trainer_->run_epoch());
    header.set_layout_digest(trainer_->layout().digest());
    header.set_step(step);
    header.mutable_time()->set_batch(step);
    return request;
  }
  // Sends a chunk of the window, as it is, at its own offset.
  static void SendFromWindow(LanePipe& lane, const SharedMemory& window, int64_t offset,
                             int64_t length_bytes) {
    ASSERT_THAT(lane.AwaitPlace(nullptr), IsOk());
    const std::span<const std::byte> bytes(window.data() + offset,
                                           static_cast<size_t>(length_bytes));
    lane.SendWindowChunk(offset, bytes, Crc32c(0, bytes));
  }
  static bool IsClosed(LanePipe& lane) { return !lane.Receive(nullptr).ok(); }

  std::unique_ptr<Client> client_;
  std::unique_ptr<ema::Run> trainer_;
  std::vector<float> weights_;
  PendingPush::Stats stats_;
  PullInfo info_;
};

TEST_F(LaneTest, PushesAndPullsGoThroughSharedMemory) {
  Start();
  OpenRun();
  ASSERT_THAT(Push(1, 8), IsOk());
  EXPECT_EQ(LaneName(stats_.lane), "shared memory");
  EXPECT_EQ(stats_.sent_bytes, kCount * 4);
  EXPECT_EQ(stats_.stream_count, 1);
  ASSERT_THAT(Push(2, 4), IsOk());
  EXPECT_THAT(Pull(), IsOkAndHolds(6));
  EXPECT_EQ(LaneName(info_.lane), "shared memory");
  EXPECT_EQ(info_.received_bytes, kCount * 4);
  EXPECT_THAT(Pull({.version = 1}), IsOkAndHolds(8));
}

TEST_F(LaneTest, SelectionsAndWhatIsNotNewerGoThroughItToo) {
  Start();
  OpenRun();
  ASSERT_THAT(Push(1, 8), IsOk());
  EXPECT_THAT(Pull({.selection = {.slices = {{"w", {5}, {10}}}}}), IsOkAndHolds(8));
  EXPECT_EQ(info_.total_bytes, 40);
  const VersionId known{info_.version.number, info_.version.incarnation};
  ASSERT_THAT(Pull({.if_newer_than = known}), IsOk());
  EXPECT_TRUE(info_.not_newer);
  EXPECT_EQ(info_.lane, Lane::kSharedMemory);
}

TEST_F(LaneTest, RanksPushAtOnceEachThroughItsOwn) {
  Start();
  constexpr int64_t kRanks = 4;
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([this, rank] {
      const std::unique_ptr<Client> client = *Client::Create(address_);
      const int64_t begin = kCount * rank / kRanks;
      const int64_t count = kCount * (rank + 1) / kRanks - begin;
      const auto run =
          client->OpenRun("big", {.launch_id = "four",
                                  .rank = rank,
                                  .world_size = kRanks,
                                  .shards = std::vector<Shard>{{0, {begin}, {count}}}});
      ASSERT_THAT(run, IsOk());
      for (int64_t step = 1; step <= 20; ++step) {
        const std::vector<float> values(count, static_cast<float>(step));
        const auto push = (*run)->StartPush(step, TrainingTime::AtBatch(step),
                                            {std::as_bytes(std::span(values))}, absl::Seconds(30));
        ASSERT_THAT(push, IsOk());
        ASSERT_THAT((*push)->Wait(), IsOk());
        EXPECT_EQ((*push)->stats().lane, Lane::kSharedMemory);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  const absl::StatusOr<float> value = Pull();
  ASSERT_THAT(value, IsOk());
  EXPECT_NEAR(*value, 19, 1e-4);
}

TEST_F(LaneTest, EitherSideCanDoWithout) {
  RpcServer::Options options;
  options.same_host_lane = false;
  Start(options);
  OpenRun();
  ASSERT_THAT(Push(1, 8), IsOk());
  EXPECT_EQ(LaneName(stats_.lane), "grpc");
  EXPECT_THAT(Pull(), IsOkAndHolds(8));
  EXPECT_EQ(info_.lane, Lane::kGrpc);

  server_.reset();
  Start({}, {.same_host_lane = false});
  OpenRun();
  ASSERT_THAT(Push(1, 8), IsOk());
  EXPECT_EQ(stats_.lane, Lane::kGrpc);
  EXPECT_THAT(Pull(), IsOkAndHolds(8));
  EXPECT_EQ(info_.lane, Lane::kGrpc);
}

TEST_F(LaneTest, ErrorsComeThroughWithTheirReason) {
  Start();
  OpenRun();
  ASSERT_THAT(Push(5, 8), IsOk());
  EXPECT_THAT(Push(4, 8), ReasonIs(ErrorReason::kStaleStep));
  EXPECT_THAT(client_->Pull("big", "nope", {}, nullptr, absl::Seconds(5)),
              ReasonIs(ErrorReason::kTrackNotFound));
  weights_.assign(kCount, 1.0f);
  weights_[700'000] = std::nanf("");
  EXPECT_THAT(trainer_->Push(6, TrainingTime::AtBatch(6), {std::as_bytes(std::span(weights_))},
                             absl::Seconds(30)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("element 700000")));
  ASSERT_THAT(Push(7, 8), IsOk());
  EXPECT_EQ(stats_.lane, Lane::kSharedMemory);
}

TEST_F(LaneTest, ARefusedPullIsOneCall) {
  class Observer final : public ServerObserver {
   public:
    void OnRpcEnded(std::string_view rpc, const absl::Status& status) override {
      if (rpc == "Pull" && !status.ok()) ++refused_pulls;
    }
    std::atomic<int> refused_pulls = 0;
  };
  Observer observer;
  RpcServer::Options options;
  options.observer = &observer;
  Start(options);
  OpenRun();
  ASSERT_THAT(Push(1, 8), IsOk());
  EXPECT_THAT(client_->Pull("big", "nope", {}, nullptr, absl::Seconds(5)),
              ReasonIs(ErrorReason::kTrackNotFound));
  EXPECT_THAT(Pull({.version = 7}), ReasonIs(ErrorReason::kVersionNotYet));
  server_.reset();
  EXPECT_EQ(observer.refused_pulls, 2);
}

TEST_F(LaneTest, AServerThatIsStartedAgainIsFoundAgain) {
  Start();
  OpenRun();
  ASSERT_THAT(Push(1, 8), IsOk());
  // The lane that the client has kept leads nowhere.
  server_.reset();
  const std::string address = address_;
  StartServer();
  ASSERT_NE(address_, address);
  EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(address_));
  trainer_.reset();
  EXPECT_THAT(Pull(), ReasonIs(ErrorReason::kModelNotFound));
}

TEST_F(LaneTest, WhoeverFindsNoLaneLeftTakesGrpc) {
  RpcServer::Options options;
  options.limits.max_push_streams = 1;
  options.limits.max_pull_streams = 1;
  Start(options);
  const std::unique_ptr<LanePipe> first = RawLane();
  const std::unique_ptr<LanePipe> second = RawLane();
  OpenRun();
  ASSERT_THAT(Push(1, 8), IsOk());
  EXPECT_EQ(stats_.lane, Lane::kGrpc);
  EXPECT_THAT(Pull(), IsOkAndHolds(8));
}

TEST_F(LaneTest, AClientThatLeavesInTheMiddleOfAPushHarmsNobody) {
  Start();
  OpenRun();
  {
    const std::unique_ptr<LanePipe> lane = RawLane();
    ASSERT_THAT(lane->SendMessage(PushRequest(1).SerializeAsString(), nullptr), IsOk());
    std::byte* const place = *lane->ReserveChunk(nullptr);
    std::memset(place, 0, 4096);
    lane->SendChunk(0, 4096, 0);
  }
  ASSERT_THAT(Push(2, 8), IsOk());
  EXPECT_THAT(Pull(), IsOkAndHolds(8));
}

TEST_F(LaneTest, WhatIsOutOfOrderEndsTheLaneWithAnError) {
  Start();
  OpenRun();
  std::unique_ptr<LanePipe> lane = RawLane();
  ASSERT_THAT(lane->SendMessage("\xff\xff nonsense", nullptr), IsOk());
  EXPECT_EQ(Answer(*lane).error().detail().reason(), v1::ERROR_REASON_BAD_REQUEST);
  EXPECT_TRUE(IsClosed(*lane));

  lane = RawLane();
  ASSERT_THAT(lane->ReserveChunk(nullptr), IsOk());
  lane->SendChunk(0, 100, 0);
  EXPECT_EQ(Answer(*lane).error().detail().reason(), v1::ERROR_REASON_BAD_REQUEST);

  lane = RawLane();
  ASSERT_THAT(lane->SendMessage(PushRequest(1).SerializeAsString(), nullptr), IsOk());
  ASSERT_THAT(lane->ReserveChunk(nullptr), IsOk());
  lane->SendChunk(-8, 100, 0);
  EXPECT_EQ(Answer(*lane).error().detail().reason(), v1::ERROR_REASON_BAD_CHUNK);

  lane = RawLane();
  ASSERT_THAT(lane->SendMessage(PushRequest(2).SerializeAsString(), nullptr), IsOk());
  v1::LaneRequest commit;
  commit.mutable_commit()->set_chunk_count(1);
  ASSERT_THAT(lane->SendMessage(commit.SerializeAsString(), nullptr), IsOk());
  EXPECT_EQ(Answer(*lane).error().detail().reason(), v1::ERROR_REASON_COUNT_MISMATCH);

  lane = RawLane();
  ASSERT_THAT(lane->SendMessage(PushRequest(3).SerializeAsString(), nullptr), IsOk());
  commit.mutable_commit()->set_chunk_count(0);
  ASSERT_THAT(lane->SendMessage(commit.SerializeAsString(), nullptr), IsOk());
  EXPECT_EQ(Answer(*lane).error().detail().reason(), v1::ERROR_REASON_PUSH_INCOMPLETE);
  ASSERT_THAT(Push(4, 8), IsOk());
}

TEST_F(LaneTest, AStepThatBecomesAVersionIsToldToAllStreamsOfItsRanks) {
  Start();
  OpenRun({.launch_id = "two", .world_size = 2, .shards = std::vector<Shard>{{0, {0}, {1}}}});
  const std::unique_ptr<ema::Run> other =
      *client_->OpenRun("big", {.launch_id = "two",
                                .rank = 1,
                                .world_size = 2,
                                .shards = std::vector<Shard>{{0, {1}, {kCount - 1}}}});
  const float one = 1;
  const std::span<const std::byte> bytes = std::as_bytes(std::span(&one, 1));
  const std::unique_ptr<LanePipe> first = RawLane();
  v1::LaneRequest begin = PushRequest(1);
  begin.mutable_push()->set_stream_group(1);
  begin.mutable_push()->set_stream_count(1);
  ASSERT_THAT(first->SendMessage(begin.SerializeAsString(), nullptr), IsOk());
  std::memcpy(*first->ReserveChunk(nullptr), bytes.data(), bytes.size());
  first->SendChunk(0, static_cast<int64_t>(bytes.size()), Crc32c(0, bytes));
  v1::LaneRequest commit;
  commit.mutable_commit()->set_chunk_count(1);
  commit.mutable_commit()->set_total_bytes(static_cast<int64_t>(bytes.size()));
  commit.mutable_commit()->set_digest(Crc32c(0, bytes));
  ASSERT_THAT(first->SendMessage(commit.SerializeAsString(), nullptr), IsOk());
  while (!trainer_->QueryPush(1, false)->rank_committed) absl::SleepFor(absl::Milliseconds(1));

  // The rank tries again; it has nothing to send any more, but its commit.
  const std::unique_ptr<LanePipe> second = RawLane();
  begin.mutable_push()->set_stream_group(2);
  ASSERT_THAT(second->SendMessage(begin.SerializeAsString(), nullptr), IsOk());
  EXPECT_EQ(Answer(*first).error().detail().reason(), v1::ERROR_REASON_FENCED);
  weights_.assign(kCount - 1, 1);
  const auto push = other->StartPush(1, TrainingTime::AtBatch(1),
                                     {std::as_bytes(std::span(weights_))}, absl::Seconds(30));
  ASSERT_THAT(push, IsOk());
  ASSERT_THAT((*push)->Wait(), IsOk());
  EXPECT_EQ(Answer(*second).pushed().version().version(), 1);
  EXPECT_TRUE(IsClosed(*second));
}

TEST_F(LaneTest, MoreLanesThanAllowedAreClosedAndToldOf) {
  class Observer final : public ServerObserver {
   public:
    void OnConnectionRefused(Refusal reason) override {
      if (reason == Refusal::kLanes) ++refused_lanes;
    }
    std::atomic<int> refused_lanes = 0;
  };
  Observer observer;
  absl::Mutex mu;
  std::string log;
  RpcServer::Options options;
  options.limits.max_push_streams = 1;
  options.limits.max_pull_streams = 1;
  options.observer = &observer;
  options.log = [&](const LogEvent& event) {
    absl::MutexLock lock(&mu);
    if (event.name == "connection refused") absl::StrAppend(&log, ToText(event), "\n");
  };
  Start(options);
  const std::unique_ptr<LanePipe> first = RawLane();
  const std::unique_ptr<LanePipe> second = RawLane();
  v1::GetLaneResponse offer;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->GetLane(&context, v1::GetLaneRequest(), &offer).ok());
  const absl::StatusOr<std::unique_ptr<LanePipe>> third = LanePipe::Connect(offer.socket_name());
  EXPECT_TRUE(!third.ok() || IsClosed(**third));
  {
    absl::MutexLock lock(&mu);
    const auto is_told = [&] { return !log.empty(); };
    mu.Await(absl::Condition(&is_told));
    EXPECT_THAT(log, HasSubstr("connection refused peer=\"lane:pid="));
    EXPECT_THAT(log, HasSubstr("reason=lanes limit=2"));
  }
  EXPECT_EQ(observer.refused_lanes, 1);
  server_.reset();
}

TEST_F(LaneTest, ChunksAreFoldedInTheClientsWindow) {
  Start();
  OpenRun();
  EMA_ASSERT_OK_AND_ASSIGN(const auto window, SharedMemory::CreateWindow(kCount * 4));
  std::fill_n(reinterpret_cast<float*>(window->data()), kCount, 8.0f);
  const std::unique_ptr<LanePipe> lane = RawLane(window.get());
  EXPECT_TRUE(Answer(*lane).window().is_mapped());
  ASSERT_THAT(lane->SendMessage(PushRequest(1).SerializeAsString(), nullptr), IsOk());
  int64_t chunk_count = 0;
  for (int64_t offset = 0; offset < kCount * 4; ++chunk_count) {
    const int64_t length_bytes = std::min(LanePipe::kMaxChunkBytes, kCount * 4 - offset);
    SendFromWindow(*lane, *window, offset, length_bytes);
    offset += length_bytes;
  }
  v1::LaneRequest commit;
  commit.mutable_commit()->set_chunk_count(chunk_count);
  commit.mutable_commit()->set_total_bytes(kCount * 4);
  commit.mutable_commit()->set_digest(Crc32c(0, {window->data(), static_cast<size_t>(kCount * 4)}));
  ASSERT_THAT(lane->SendMessage(commit.SerializeAsString(), nullptr), IsOk());
  EXPECT_EQ(Answer(*lane).pushed().version().version(), 1);
  EXPECT_THAT(Pull(), IsOkAndHolds(8));
}

TEST_F(LaneTest, WindowsBeyondTheLimitAreNotMapped) {
  RpcServer::Options options;
  options.max_window_bytes = 3 << 20;
  Start(options);
  OpenRun();
  EMA_ASSERT_OK_AND_ASSIGN(const auto window, SharedMemory::CreateWindow(2 << 20));
  std::unique_ptr<LanePipe> first = RawLane(window.get());
  EXPECT_TRUE(Answer(*first).window().is_mapped());
  const std::unique_ptr<LanePipe> second = RawLane(window.get());
  const v1::LaneResponse refused = Answer(*second);
  EXPECT_TRUE(refused.has_window());
  EXPECT_FALSE(refused.window().is_mapped());
  // The lane works, and a chunk of the window ends it.
  ASSERT_THAT(second->SendMessage(PushRequest(1).SerializeAsString(), nullptr), IsOk());
  SendFromWindow(*second, *window, 0, 4096);
  const absl::StatusOr<LanePipe::Frame> ended = second->Receive(nullptr);
  v1::LaneResponse error;
  EXPECT_TRUE(!ended.ok() || (error.ParseFromString(ended->message) && error.has_error()));
  // The end of a lane returns its memory.
  EXPECT_TRUE(first->AwaitPeerEnd(After(SteadyNow(), absl::Seconds(20))));
  bool is_mapped = false;
  for (int i = 0; i < 1000 && !is_mapped; ++i) {
    is_mapped = Answer(*RawLane(window.get())).window().is_mapped();
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_TRUE(is_mapped);
}

// The server reads from the memory while the client writes there: what it computes is right or
// wrong for that model alone.
TEST_F(LaneTest, AWindowThatChangesWhileItIsReadHarmsOnlyItsModel) {
  Start();
  OpenRun();
  ASSERT_THAT(Push(1, 8), IsOk());
  const Manifest manifest = *Manifest::Create({{"w", Dtype::kFloat32, {kCount}}});
  ASSERT_THAT(client_->CreateModel("other", manifest,
                                   {{.name = "ema", .schedule = *Schedule::Parse("1ba")}}),
              IsOk());
  const std::unique_ptr<ema::Run> other = *client_->OpenRun("other", {});
  EMA_ASSERT_OK_AND_ASSIGN(const auto window, SharedMemory::CreateWindow(kCount * 4));
  std::atomic<bool> is_done = false;
  std::thread writing([&] {
    while (!is_done) {
      for (const int value : {0xff, 0x7f, 0x80, 0}) {
        std::memset(window->data(), value, static_cast<size_t>(kCount * 4));
      }
    }
  });
  for (int64_t step = 2; step < 12; ++step) {
    const std::unique_ptr<LanePipe> lane = RawLane(window.get());
    EXPECT_TRUE(Answer(*lane).window().is_mapped());
    ASSERT_THAT(lane->SendMessage(PushRequest(step).SerializeAsString(), nullptr), IsOk());
    for (int64_t offset = 0; offset + LanePipe::kMaxChunkBytes <= kCount * 4;
         offset += LanePipe::kMaxChunkBytes) {
      if (!lane->AwaitPlace(nullptr).ok()) break;  // Values that are not finite end the step.
      SendFromWindow(*lane, *window, offset, LanePipe::kMaxChunkBytes);
    }
    weights_.assign(kCount, 4);
    const auto push = other->StartPush(step, TrainingTime::AtBatch(step),
                                       {std::as_bytes(std::span(weights_))}, absl::Seconds(30));
    ASSERT_THAT(push, IsOk());
    EXPECT_THAT((*push)->Wait(), IsOk());
  }
  is_done = true;
  writing.join();
  ASSERT_THAT(Push(12, 8), IsOk());
  EXPECT_THAT(Pull(), IsOkAndHolds(8));
}

TEST_F(LaneTest, WhoeverStallsIsEnded) {
  RpcServer::Options options;
  options.limits.stream_timeout = absl::Milliseconds(300);
  Start(options);
  OpenRun();
  ASSERT_THAT(Push(1, 8), IsOk());
  const std::unique_ptr<LanePipe> pusher = RawLane();
  ASSERT_THAT(pusher->SendMessage(PushRequest(2).SerializeAsString(), nullptr), IsOk());
  EXPECT_EQ(Answer(*pusher).error().detail().reason(), v1::ERROR_REASON_STALLED);

  const std::unique_ptr<LanePipe> puller = RawLane();
  v1::LaneRequest pull;
  pull.mutable_pull()->set_model("big");
  pull.mutable_pull()->set_track("ema");
  ASSERT_THAT(puller->SendMessage(pull.SerializeAsString(), nullptr), IsOk());
  EXPECT_TRUE(Answer(*puller).has_pull());
  // Reads nothing more: the ring is full, and the server ends the lane.
  const absl::Time wait_end = absl::Now() + absl::Seconds(20);
  while (puller->CheckPeer(nullptr).ok() && absl::Now() < wait_end) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_FALSE(puller->CheckPeer(nullptr).ok());
  // The pin has gone with it.
  for (int64_t step = 3; step < 8; ++step) ASSERT_THAT(Push(step, 8), IsOk());
}

TEST_F(LaneTest, ARequestMayBeLongerThanASlot) {
  Start();
  v1::LaneRequest request;
  request.mutable_pull()->set_model("nope");
  request.mutable_pull()->mutable_selection()->add_tensors(
      std::string(3 * SharedRing::kSlotBytes, 'x'));
  const std::unique_ptr<LanePipe> lane = RawLane();
  ASSERT_THAT(lane->SendMessage(request.SerializeAsString(), nullptr), IsOk());
  EXPECT_EQ(Answer(*lane).error().detail().reason(), v1::ERROR_REASON_MODEL_NOT_FOUND);
}

TEST_F(LaneTest, APushThatIsAbandonedFreesTheWeightsAndTheStep) {
  Start();
  OpenRun({.launch_id = "two", .world_size = 2, .shards = std::vector<Shard>{{0, {0}, {1}}}});
  ema::Run& waiting = *trainer_;
  const std::unique_ptr<ema::Run> other =
      *client_->OpenRun("big", {.launch_id = "two",
                                .rank = 1,
                                .world_size = 2,
                                .shards = std::vector<Shard>{{0, {1}, {kCount - 1}}}});
  const float one = 1;
  const auto push = waiting.StartPush(1, TrainingTime::AtBatch(1),
                                      {std::as_bytes(std::span(&one, 1))}, absl::Seconds(30));
  ASSERT_THAT(push, IsOk());
  EXPECT_TRUE((*push)->WaitReleased(absl::Seconds(20)));
  (*push)->Abandon();
  EXPECT_THAT((*push)->Wait(), ReasonIs(ErrorReason::kStepAbandoned));
  EXPECT_THAT(other->QueryPush(1, false)->state, PushProgress::State::kUnknown);
}

}  // namespace
}  // namespace ema
