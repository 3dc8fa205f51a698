// SPDX-License-Identifier: Apache-2.0
//
// Pushes of weights on a GPU through a window that a real server maps: two processes, with a CUDA
// driver in host memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "tests/client/fake_cuda.h"
#include "tests/client/trainer_stream.h"
#include "tests/testutil/server_process.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr char kWindow[] = "ema-window";  // As /proc shows it.

// Makes all later work of a stream wait, until it is unblocked or destroyed.
class BlockedStream {
 public:
  explicit BlockedStream(TrainerStream& stream) {
    stream.Queue([unblocked = unblocked_] { unblocked->WaitForNotification(); });
  }
  ~BlockedStream() {
    if (!unblocked_->HasBeenNotified()) Unblock();
  }
  BlockedStream(const BlockedStream&) = delete;
  BlockedStream& operator=(const BlockedStream&) = delete;
  void Unblock() { unblocked_->Notify(); }

 private:
  const std::shared_ptr<absl::Notification> unblocked_ = std::make_shared<absl::Notification>();
};

// A trainer with a tensor on GPU 0 and another on GPU 1. The model "host" gets the same values over
// gRPC from host memory, so both must have the same averages, bit for bit.
class WindowTest : public testing::Test {
 protected:
  ~WindowTest() override {
    ema_fake_cuda_refuse_registration(0);
    run_.reset();
    host_run_.reset();
    first_.reset();
    second_.reset();
    EXPECT_EQ(ema_fake_cuda_pinned_bytes(), 0);
    EXPECT_EQ(ema_fake_cuda_objects(), 0);
    EXPECT_EQ(ema_fake_cuda_contexts(), 0);
  }

  void StartServer(std::vector<std::string> options = {}) {
    EMA_ASSERT_OK_AND_ASSIGN(server_, ServerProcess::Start(EMA_SERVER_BINARY, std::move(options)));
    Client::Options by_lane;
    by_lane.max_connections = max_lanes_;
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_->address(), by_lane));
    Client::Options by_grpc;
    by_grpc.same_host_lane = false;
    EMA_ASSERT_OK_AND_ASSIGN(host_client_, Client::Create(server_->address(), by_grpc));
    const Manifest manifest = *Manifest::Create(
        {{.name = "first", .shape = {counts_[0]}}, {.name = "second", .shape = {counts_[1]}}});
    for (const char* model : {"gpu", "host"}) {
      ASSERT_THAT(client_->CreateModel(model, manifest,
                                       {{.name = "ema", .schedule = *Schedule::Parse("3ba")},
                                        {.name = "raw", .schedule = *Schedule::Parse("copy")}}),
                  IsOk());
    }
    weights_.resize(counts_[0] + counts_[1]);
  }
  void OpenRuns(const Client::RunOptions& options = {}) {
    run_.reset();
    EMA_ASSERT_OK_AND_ASSIGN(run_, client_->OpenRun("gpu", options));
    Client::RunOptions host_options;
    host_options.wire_dtype = options.wire_dtype;
    host_options.frozen_shard_count = options.frozen_shard_count;
    EMA_ASSERT_OK_AND_ASSIGN(host_run_, host_client_->OpenRun("host", host_options));
  }
  void Start(std::vector<std::string> options = {}) {
    StartServer(std::move(options));
    OpenRuns();
  }

  void Fill(int64_t seed) {
    for (size_t i = 0; i < weights_.size(); ++i) {
      const bool is_fixed = second_is_frozen_ && static_cast<int64_t>(i) >= counts_[0];
      weights_[i] =
          static_cast<float>(static_cast<int64_t>(i) * 37 % 1001 + (is_fixed ? 0 : seed) * 11) / 7;
    }
  }
  std::span<float> FirstTensor() { return std::span(weights_).first(counts_[0]); }
  std::span<float> SecondTensor() { return std::span(weights_).subspan(counts_[0]); }

  absl::StatusOr<std::unique_ptr<PendingPush>> StartPush(int64_t step,
                                                         absl::Duration timeout = kPatience) {
    return run_->StartPush(
        step, TrainingTime::AtBatch(step),
        {std::as_bytes(FirstTensor()), std::as_bytes(SecondTensor())}, timeout,
        {.frozen_changed = frozen_changed_,
         .gpu_weights = {.devices = {0, 1}, .streams = {first_->on(0), second_->on(1)}}});
  }
  absl::StatusOr<Version> Push(int64_t step) {
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<PendingPush> push, StartPush(step));
    return push->Wait();
  }
  absl::Status PushToHost(int64_t step) {
    EMA_ASSIGN_OR_RETURN(
        const std::unique_ptr<PendingPush> push,
        host_run_->StartPush(step, TrainingTime::AtBatch(step),
                             {std::as_bytes(FirstTensor()), std::as_bytes(SecondTensor())},
                             kPatience, {.frozen_changed = frozen_changed_}));
    return push->Wait().status();
  }
  // Pushes to both models, and overwrites the weights as an optimizer does: its work on the streams
  // of the GPUs waits for the copies.
  void TrainStep(int64_t step) {
    Fill(step);
    ASSERT_THAT(PushToHost(step), IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<PendingPush> push, StartPush(step));
    ASSERT_TRUE(push->WaitReleased(kPatience));
    QueueOverwrite();
    AwaitStreams();
    ASSERT_THAT(push->Wait(), IsOk());
    EXPECT_EQ(push->stats().stream_count, 1);
    EXPECT_EQ(push->stats().lane, lane_);
    lane_count_ = push->stats().connection_count;
    lane_reason_ = push->stats().lane_reason;
  }
  void QueueOverwrite() {
    first_->Queue([this] { std::fill(FirstTensor().begin(), FirstTensor().end(), -1.0f); });
    second_->Queue([this] { std::fill(SecondTensor().begin(), SecondTensor().end(), -1.0f); });
  }
  void AwaitStreams() {
    first_->Await();
    second_->Await();
  }
  // The same as TrainStep(), but the server ends the lanes when the first tensor has been sent,
  // because the second GPU is slow. The trainer has gone on by then, so the missing bytes are only
  // in the window. Needs a short --stream-timeout.
  void PushOverBrokenLanes(int64_t step, int64_t lane_count = 1) {
    Fill(step);
    ASSERT_THAT(PushToHost(step), IsOk());
    BlockedStream blocked(*second_);
    EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<PendingPush> push, StartPush(step));
    ASSERT_TRUE(push->WaitReleased(kPatience));
    QueueOverwrite();
    ASSERT_TRUE(AwaitMappedWindows(lane_count));
    ASSERT_TRUE(AwaitMappedWindows(0));
    blocked.Unblock();
    ASSERT_THAT(push->Wait(), IsOk());
    EXPECT_GE(push->stats().stream_count, 2);
    AwaitStreams();
  }

  std::vector<float> Pull(const std::string& model, const std::string& track) {
    std::vector<float> values;
    const auto target = [&](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
      values.resize(info.total_bytes / sizeof(float));
      return std::as_writable_bytes(std::span(values));
    };
    EXPECT_THAT(host_client_->Pull(model, track, {}, target, kPatience), IsOk());
    return values;
  }
  void ExpectSameAverages() {
    for (const char* track : {"ema", "raw"}) {
      const std::vector<float> pushed = Pull("gpu", track);
      const std::vector<float> expected = Pull("host", track);
      ASSERT_EQ(pushed.size(), weights_.size());
      ASSERT_EQ(expected.size(), weights_.size());
      EXPECT_EQ(std::memcmp(pushed.data(), expected.data(), pushed.size() * sizeof(float)), 0)
          << track;
    }
  }

  static bool Await(const std::function<bool()>& is_true) {
    const absl::Time wait_end = absl::Now() + kPatience;
    while (!is_true()) {
      if (absl::Now() > wait_end) return false;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return true;
  }
  // Waits until the server has mapped this number of windows.
  bool AwaitMappedWindows(int64_t count) {
    return Await([&] { return server_->CountMappings(kWindow) == count; });
  }

  std::vector<int64_t> counts_ = {500'000, 400'001};
  int64_t max_lanes_ = 1;
  bool second_is_frozen_ = false;
  bool frozen_changed_ = false;      // Pushes include the frozen tensor.
  Lane lane_ = Lane::kSharedWindow;  // Of the pushes of TrainStep().
  // Statistics of the push of the last TrainStep().
  int64_t lane_count_ = 0;
  std::string lane_reason_;
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Client> host_client_;
  std::unique_ptr<TrainerStream> first_ = std::make_unique<TrainerStream>();
  std::unique_ptr<TrainerStream> second_ = std::make_unique<TrainerStream>();
  std::unique_ptr<ema::Run> run_;
  std::unique_ptr<ema::Run> host_run_;
  std::vector<float> weights_;
};

// More than the ring: 65 MiB on one GPU, 2 MiB on the other.
class LargeWindowTest : public WindowTest {
 protected:
  LargeWindowTest() { counts_ = {65 << 18, 1 << 19}; }
};

TEST_F(WindowTest, AveragesAreThoseOfWeightsInHostMemory) {
  Start();
  for (int64_t step = 1; step <= 10; ++step) TrainStep(step);
  EXPECT_EQ(server_->CountMappings(kWindow), 1);
  EXPECT_GT(ema_fake_cuda_registered_bytes(), 3'600'000);
  EXPECT_EQ(ema_fake_cuda_registered_bytes(), ema_fake_cuda_pinned_bytes());
  EXPECT_EQ(lane_reason_, "");
  ExpectSameAverages();
  run_.reset();
  EXPECT_TRUE(AwaitMappedWindows(0));
}

TEST_F(LargeWindowTest, BuffersAreUsedAgainForWeightsThatAreLargerThanTheRing) {
  Start();
  for (int64_t step = 1; step <= 2; ++step) TrainStep(step);
  EXPECT_EQ(server_->CountMappings(kWindow), 1);
  EXPECT_EQ(ema_fake_cuda_registered_bytes(), 64 << 20);
  ExpectSameAverages();
}

TEST_F(LargeWindowTest, SeveralLanesReadFromTheWindow) {
  max_lanes_ = 2;
  Start({"--stream-timeout", "2s"});
  int64_t step = 0;
  // The first pushes measure the speed of one lane.
  while (lane_count_ < 2 && step < 10) TrainStep(++step);
  EXPECT_EQ(lane_count_, 2);
  EXPECT_EQ(server_->CountMappings(kWindow), 2);
  ExpectSameAverages();
  PushOverBrokenLanes(++step, 2);
  ExpectSameAverages();
  TrainStep(++step);
  ExpectSameAverages();
}

TEST_F(LargeWindowTest, AServerWithMemoryForOneWindowGetsOneLane) {
  max_lanes_ = 2;
  Start({"--max-window-bytes", "100M"});
  // Some of them try two lanes.
  for (int64_t step = 1; step <= 8; ++step) {
    TrainStep(step);
    EXPECT_EQ(lane_count_, 1);
    EXPECT_EQ(server_->CountMappings(kWindow), 1);
  }
  ExpectSameAverages();
}

TEST_F(WindowTest, WhereMemoryCannotBeRegisteredPinnedMemoryIsUsed) {
  lane_ = Lane::kSharedMemory;
  Start();
  int64_t step = 1;
  // NOT_SUPPORTED (confidential computing), OPERATING_SYSTEM, OUT_OF_MEMORY.
  for (const int result : {801, 304, 2}) {
    SCOPED_TRACE(result);
    ema_fake_cuda_refuse_registration(result);
    OpenRuns();
    for (int i = 0; i < 2; ++i) TrainStep(step++);
    EXPECT_THAT(lane_reason_, AllOf(HasSubstr("cannot pin"), HasSubstr(absl::StrCat(result))));
    EXPECT_EQ(ema_fake_cuda_registered_bytes(), 0);
    EXPECT_GT(ema_fake_cuda_pinned_bytes(), 3'600'000);
    EXPECT_EQ(server_->CountMappings(kWindow), 0);
  }
  ExpectSameAverages();
}

TEST_F(WindowTest, AServerWithoutMemoryForWindowsTakesCopies) {
  lane_ = Lane::kSharedMemory;
  Start({"--max-window-bytes", "1M"});
  for (int64_t step = 1; step <= 3; ++step) {
    TrainStep(step);
    EXPECT_THAT(lane_reason_, HasSubstr("--max-window-bytes"));
  }
  EXPECT_EQ(server_->CountMappings(kWindow), 0);
  ExpectSameAverages();
}

TEST_F(WindowTest, AServerWithoutLanesGetsTheWeightsOverGrpc) {
  lane_ = Lane::kGrpc;
  Start({"--same-host-lane", "off"});
  for (int64_t step = 1; step <= 3; ++step) TrainStep(step);
  EXPECT_EQ(lane_reason_, "the server offers no same-host lanes");
  EXPECT_EQ(ema_fake_cuda_registered_bytes(), 0);
  ExpectSameAverages();
}

TEST_F(WindowTest, WeightsThatAreRoundedForTheWireAreCopied) {
  lane_ = Lane::kSharedMemory;
  StartServer();
  OpenRuns({.wire_dtype = WireDtype::kBFloat16});
  for (int64_t step = 1; step <= 3; ++step) TrainStep(step);
  EXPECT_EQ(lane_reason_, "the weights are rounded for the wire");
  EXPECT_EQ(ema_fake_cuda_registered_bytes(), 0);
  ExpectSameAverages();
}

TEST_F(WindowTest, ABrokenLaneIsReplacedAfterTheRelease) {
  Start({"--stream-timeout", "300ms"});
  PushOverBrokenLanes(1);
  PushOverBrokenLanes(2);
  ExpectSameAverages();
}

// Here the buffers of the first tensor have been used again.
TEST_F(LargeWindowTest, ABrokenLaneIsReplacedAfterTheRelease) {
  Start({"--stream-timeout", "300ms"});
  PushOverBrokenLanes(1);
  PushOverBrokenLanes(2);
  ExpectSameAverages();
}

TEST_F(WindowTest, AKilledServerEndsThePushAndTheNextServerGetsAll) {
  Start();
  TrainStep(1);
  Fill(2);
  {
    BlockedStream blocked(*second_);
    EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<PendingPush> push,
                             StartPush(2, absl::Seconds(3)));
    ASSERT_TRUE(push->WaitReleased(kPatience));
    server_.reset();
    blocked.Unblock();
    EXPECT_FALSE(push->Wait().ok());
  }
  Start();
  for (int64_t step = 1; step <= 3; ++step) TrainStep(step);
  EXPECT_EQ(server_->CountMappings(kWindow), 1);
  ExpectSameAverages();
}

// After SIGCONT the server may still read from the old window.
TEST_F(LargeWindowTest, AServerThatHangsGetsANewWindowForAllLanes) {
  max_lanes_ = 2;
  Start();
  int64_t step = 0;
  while (lane_count_ < 2 && step < 10) TrainStep(++step);
  ASSERT_EQ(lane_count_, 2);
  Fill(++step);
  {
    BlockedStream blocked(*second_);
    EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<PendingPush> push,
                             StartPush(step, absl::Seconds(2)));
    ASSERT_TRUE(push->WaitReleased(kPatience));
    server_->Signal(SIGSTOP);
    blocked.Unblock();
    EXPECT_FALSE(push->Wait().ok());
  }
  server_->Signal(SIGCONT);
  for (int i = 0; i < 3; ++i) TrainStep(++step);
  EXPECT_EQ(ema_fake_cuda_registered_bytes(), ema_fake_cuda_pinned_bytes());
  ExpectSameAverages();
}

// A push without the frozen tensor is small, and uses one of two lanes; the other one is idle.
TEST_F(WindowTest, AnIdleLaneDoesNotReadADiscardedWindow) {
  counts_ = {40 << 18, 28 << 18};
  max_lanes_ = 2;
  StartServer();
  second_is_frozen_ = true;
  OpenRuns({.frozen_shard_count = 1});
  int64_t step = 0;
  frozen_changed_ = true;
  while (lane_count_ < 2 && step < 10) TrainStep(++step);
  ASSERT_EQ(lane_count_, 2);
  frozen_changed_ = false;
  TrainStep(++step);
  EXPECT_EQ(lane_count_, 1);
  server_->Signal(SIGSTOP);
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<PendingPush> push,
                           StartPush(++step, absl::Seconds(2)));
  EXPECT_FALSE(push->Wait().ok());
  server_->Signal(SIGCONT);
  frozen_changed_ = true;
  for (int i = 0; i < 3; ++i) TrainStep(++step);
  ExpectSameAverages();
}

// After SIGCONT the server may still read from the old window.
TEST_F(WindowTest, AServerThatHangsGetsANewWindow) {
  Start();
  Fill(1);
  {
    BlockedStream blocked(*second_);
    EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<PendingPush> push,
                             StartPush(1, absl::Seconds(2)));
    ASSERT_TRUE(AwaitMappedWindows(1));
    server_->Signal(SIGSTOP);
    blocked.Unblock();
    EXPECT_FALSE(push->Wait().ok());
  }
  server_->Signal(SIGCONT);
  for (int64_t step = 2; step <= 4; ++step) TrainStep(step);
  EXPECT_TRUE(AwaitMappedWindows(1));
  EXPECT_EQ(ema_fake_cuda_registered_bytes(), ema_fake_cuda_pinned_bytes());
  ExpectSameAverages();
}

TEST_F(WindowTest, AFailureOfTheGpuEndsThePushAndFreesTheWindow) {
  Start();
  constexpr int kIllegalAddress = 700;
  int64_t step = 1;
  for (int64_t call = 1; call < 60; call += 7) {
    SCOPED_TRACE(call);
    OpenRuns();
    Fill(step);
    ema_fake_cuda_fail(call, kIllegalAddress);
    EXPECT_THAT(Push(step++), ReasonIs(ErrorReason::kDevice));
    ema_fake_cuda_fail(0, 0);
    run_.reset();
    EXPECT_EQ(ema_fake_cuda_pinned_bytes(), 0);
  }
  OpenRuns();
  Fill(step);
  ASSERT_THAT(Push(step), IsOk());
  EXPECT_EQ(Pull("gpu", "raw"), weights_);
  EXPECT_TRUE(AwaitMappedWindows(1));
}

TEST_F(WindowTest, AKilledTrainerLeavesOnlyWholeSteps) {
  StartServer();
  int64_t next_step = 1;
  for (int round = 0; round < 6; ++round) {
    SCOPED_TRACE(round);
    EMA_ASSERT_OK_AND_ASSIGN(const auto trainer,
                             ChildProcess::Start({EMA_WINDOW_TRAINER_BINARY, server_->address(),
                                                  "gpu", absl::StrCat(next_step)}));
    const absl::Time wait_end = absl::Now() + kPatience;
    const auto newest_step = [&] {
      const absl::StatusOr<ModelInfo> info = client_->GetModel("gpu");
      return info.ok() && info->latest.has_value() ? info->latest->step : 0;
    };
    while (newest_step() < next_step + 1) {
      ASSERT_TRUE(trainer->is_running());
      ASSERT_LT(absl::Now(), wait_end);
      absl::SleepFor(absl::Milliseconds(1));
    }
    absl::SleepFor(absl::Microseconds(700 * round));
    trainer->Signal(SIGKILL);
    ASSERT_THAT(trainer->Wait(kPatience), IsOk());
    ASSERT_TRUE(AwaitMappedWindows(0));
    const std::vector<float> values = Pull("gpu", "raw");
    const int64_t step = newest_step();
    EXPECT_EQ(values, std::vector<float>(weights_.size(), static_cast<float>(step)));
    next_step = step + 1;
  }
  EXPECT_TRUE(server_->is_running());
}

TEST_F(WindowTest, RunsThatComeAndGoLeaveNothingBehind) {
  Start();
  TrainStep(1);
  run_.reset();
  ASSERT_TRUE(AwaitMappedWindows(0));
  const int64_t sockets = server_->socket_count();
  const int64_t resident_bytes = server_->resident_bytes();
  for (int64_t step = 2; step < 60; ++step) {
    EMA_ASSERT_OK_AND_ASSIGN(run_, client_->OpenRun("gpu", {}));
    ASSERT_THAT(Push(step), IsOk());
    run_.reset();
  }
  EXPECT_TRUE(AwaitMappedWindows(0));
  EXPECT_EQ(ema_fake_cuda_registered_bytes(), 0);
  EXPECT_TRUE(Await([&] { return server_->socket_count() <= sockets; }));
  EXPECT_LT(server_->resident_bytes(), resident_bytes + (32 << 20));
}

}  // namespace
}  // namespace ema
