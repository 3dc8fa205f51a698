// SPDX-License-Identifier: Apache-2.0
//
// Pushes of weights on a GPU, through the client as it is, with a CUDA driver in host memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cpp/gpu/pinned_ring.h"
#include "ema/client.h"
#include "server/base/crc32c.h"
#include "tests/client/fake_cuda.h"
#include "tests/client/fake_group.h"
#include "tests/client/fake_server.h"
#include "tests/client/trainer_stream.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

using client_internal::PinnedRing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int64_t kChunkBytes = 64 << 10;
constexpr int kIllegalAddress = 700;  // CUDA's.
constexpr int kOutOfMemory = 2;
constexpr int kCaptureUnsupported = 900;

// 5 chunks; the fourth has many small pieces, some at odd addresses.
Manifest SmallManifest() {
  std::vector<TensorSpec> tensors = {{.name = "big", .shape = {60'000}}};
  for (int i = 0; i < 20; ++i) {
    tensors.push_back({.name = absl::StrCat("small", i),
                       .dtype = i % 2 == 0 ? Dtype::kUInt8 : Dtype::kBFloat16,
                       .shape = {i}});
  }
  tensors.push_back({.name = "last", .dtype = Dtype::kFloat64, .shape = {7'000}});
  return *Manifest::Create(std::move(tensors));
}

// Twice the least ring.
Manifest LargeManifest() {
  return *Manifest::Create({{.name = "large", .dtype = Dtype::kUInt8, .shape = {128 << 20}}});
}

// A trainer whose weights are on GPU 0, or on what `devices` says.
class GpuPushTest : public testing::Test {
 protected:
  explicit GpuPushTest(Manifest manifest = SmallManifest()) : server_(std::move(manifest)) {}
  ~GpuPushTest() override {
    ema_fake_cuda_fail(0, 0);
    ema_fake_cuda_limit_pinned(0);
    ema_fake_cuda_delay_pinned(0);
    ema_fake_cuda_release();
    ema_fake_cuda_capture(false);
    run_.reset();
    client_.reset();
    trainer_.reset();
    other_.reset();
    // Nothing leaks, whatever has happened.
    EXPECT_EQ(ema_fake_cuda_pinned_bytes(), kept_bytes_);
    EXPECT_EQ(ema_fake_cuda_objects(), kept_objects_);
    EXPECT_EQ(ema_fake_cuda_contexts(), kept_contexts_);
  }

  void Open(const std::string& address, int64_t chunk_bytes = kChunkBytes,
            const Client::RunOptions& options = {}) {
    Client::Options client_options;
    client_options.chunk_bytes = chunk_bytes;
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(address, client_options));
    EMA_ASSERT_OK_AND_ASSIGN(run_, client_->OpenRun("m", options));
    devices_.assign(run_->layout().shards().size(), 0);
    for (const Shard& shard : run_->layout().shards()) {
      const TensorSpec& spec = run_->manifest().tensor(shard.tensor_index);
      sizes_.push_back(shard.element_count() * DtypeSize(spec.dtype));
      total_bytes_ += sizes_.back();
    }
    weights_.resize(total_bytes_);
    Fill(0);
  }
  void Open() { Open(server_.address()); }

  void Fill(int seed) {
    for (size_t i = 0; i < weights_.size(); ++i) {
      weights_[i] = static_cast<char>(i * 31 + i / 7 + seed);
    }
  }
  std::string Filled(int seed) {
    const std::string before = weights_;
    Fill(seed);
    std::string filled = weights_;
    weights_ = before;
    return filled;
  }

  absl::StatusOr<std::unique_ptr<PendingPush>> TryStart(
      int64_t step, absl::Duration timeout = absl::Seconds(60)) {
    std::vector<std::span<const std::byte>> shards;
    const char* start = weights_.data();
    for (const int64_t size : sizes_) {
      shards.push_back(std::as_bytes(std::span(start, static_cast<size_t>(size))));
      start += size;
    }
    GpuWeights gpu_weights = {.devices = devices_, .streams = {trainer_->on(0)}};
    if (std::find(devices_.begin(), devices_.end(), 1) != devices_.end()) {
      gpu_weights.streams.push_back(other_->on(1));
    }
    return run_->StartPush(step, TrainingTime::AtBatch(step), std::move(shards), timeout,
                           {.gpu_weights = std::move(gpu_weights)});
  }
  std::unique_ptr<PendingPush> Start(int64_t step) {
    auto push = TryStart(step);
    EXPECT_THAT(push, IsOk());
    return push.ok() ? *std::move(push) : nullptr;
  }
  absl::StatusOr<Version> Push(int64_t step) {
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<PendingPush> push, TryStart(step));
    return push->Wait();
  }

  // What tests before have left, in the same process, as they must.
  int64_t kept_bytes_ = ema_fake_cuda_pinned_bytes();
  int64_t kept_objects_ = ema_fake_cuda_objects();
  int64_t kept_contexts_ = ema_fake_cuda_contexts();
  FakeServer server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<ema::Run> run_;
  std::unique_ptr<TrainerStream> trainer_ = std::make_unique<TrainerStream>();
  std::unique_ptr<TrainerStream> other_ = std::make_unique<TrainerStream>();
  std::vector<int> devices_;
  std::vector<int64_t> sizes_;
  int64_t total_bytes_ = 0;
  std::string weights_;
};

class LargeGpuPushTest : public GpuPushTest {
 protected:
  LargeGpuPushTest() : GpuPushTest(LargeManifest()) {}
};

TEST_F(GpuPushTest, SendsWhatTheTrainersStreamHasMadeByThen) {
  Open();
  for (int64_t step = 1; step <= 20; ++step) {
    trainer_->Queue([this, step] { Fill(static_cast<int>(step)); });
    const auto push = Start(step);
    ASSERT_TRUE(push->WaitReleased(absl::Seconds(60)));
    // The optimizer: long queued when the bytes leave.
    trainer_->Queue([this] { std::fill(weights_.begin(), weights_.end(), 'x'); });
    ASSERT_THAT(push->Wait(), IsOk());
    trainer_->Await();
    EXPECT_EQ(server_.StepBytes(step, 0), Filled(static_cast<int>(step))) << step;
  }
}

class GroupGpuPushTest : public GpuPushTest {
 protected:
  FakeGroup group_{SmallManifest(), {1, 20, 1}};
};

TEST_F(GroupGpuPushTest, EveryServersPartIsCopiedBeforeTheWeightsChange) {
  Open(group_.address());
  for (int64_t step = 1; step <= 5; ++step) {
    trainer_->Queue([this, step] { Fill(static_cast<int>(step)); });
    const auto push = Start(step);
    ASSERT_TRUE(push->WaitReleased(absl::Seconds(60)));
    trainer_->Queue([this] { std::fill(weights_.begin(), weights_.end(), 'x'); });
    ASSERT_THAT(push->Wait(), IsOk());
    trainer_->Await();
    std::string received;
    for (size_t i = 0; i < group_.size(); ++i) received += group_.server(i).StepBytes(step, 0);
    EXPECT_EQ(received, Filled(static_cast<int>(step))) << step;
  }
}

TEST_F(GpuPushTest, TheReleaseWaitsNeitherForTheNetworkNorForTheCopies) {
  TcpProxy proxy(server_.port());
  Open(proxy.address());
  ASSERT_THAT(Push(1), IsOk());
  const std::string expected = weights_;
  proxy.SetStalled(true);
  ema_fake_cuda_hold();
  const int64_t made = ema_fake_cuda_made_copies();
  const auto push = Start(2);
  EXPECT_TRUE(push->WaitReleased(absl::Seconds(60)));
  EXPECT_EQ(ema_fake_cuda_made_copies(), made);
  absl::Notification overwritten;
  trainer_->Queue([&] {
    std::fill(weights_.begin(), weights_.end(), 'x');
    overwritten.Notify();
  });
  EXPECT_FALSE(overwritten.HasBeenNotified());
  ema_fake_cuda_release();
  overwritten.WaitForNotification();
  proxy.SetStalled(false);
  ASSERT_THAT(push->Wait(), IsOk());
  EXPECT_EQ(server_.StepBytes(2, 0), expected);
}

TEST_F(GpuPushTest, AnotherStreamThanThePushsWaits) {
  Open();
  const std::string expected = weights_;
  ema_fake_cuda_hold();
  const auto push = Start(1);
  TrainerStream later;
  ASSERT_TRUE(push->WaitReleased(absl::Seconds(60), {later.on(0)}));
  later.Queue([this] { std::fill(weights_.begin(), weights_.end(), 'x'); });
  ema_fake_cuda_release();
  ASSERT_THAT(push->Wait(), IsOk());
  EXPECT_EQ(server_.StepBytes(1, 0), expected);
}

TEST_F(GpuPushTest, TwoGpusAndHostMemoryMakeOneChunk) {
  Open();
  for (size_t i = 0; i < devices_.size(); ++i) devices_[i] = static_cast<int>(i % 3) - 1;
  other_->Queue([this] { Fill(5); });
  other_->Await();
  ASSERT_THAT(Push(1), IsOk());
  EXPECT_EQ(server_.StepBytes(1, 0), weights_);
}

// Of a tensor in host memory that is stored column by column, beside one on a GPU.
TEST_F(GpuPushTest, WhatHasStridesIsGatheredIntoTheRing) {
  FakeServer server(
      *Manifest::Create({{.name = "columns", .shape = {90, 70}}, {.name = "w", .shape = {5'000}}}));
  Open(server.address());
  devices_ = {-1, 0};
  std::vector<float> columns(90 * 70);
  for (size_t i = 0; i < columns.size(); ++i) {
    std::memcpy(&columns[i % 70 * 90 + i / 70], weights_.data() + 4 * i, 4);
  }
  const size_t first_bytes = 4 * columns.size();
  const std::vector<std::span<const std::byte>> shards = {
      std::as_bytes(std::span(columns)), std::as_bytes(std::span(weights_)).subspan(first_bytes)};
  const GpuWeights gpu_weights = {.devices = devices_, .streams = {trainer_->on(0)}};
  const auto start = [&](std::vector<Strides> strides) {
    return run_->StartPush(1, TrainingTime::AtBatch(1), shards, absl::Seconds(60),
                           {.gpu_weights = gpu_weights, .strides = std::move(strides)});
  };
  const std::vector<std::vector<Strides>> wrong = {
      {Strides{1, 90}}, {Strides{1, 90, 1}, Strides()}, {Strides{1, 90}, Strides{1}}};
  for (const std::vector<Strides>& strides : wrong) {
    EXPECT_THAT(start(strides).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("strides")));
  }
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, start({Strides{1, 90}, Strides()}));
  ASSERT_THAT(push->Wait(), IsOk());
  EXPECT_EQ(server.StepBytes(1, 0), weights_);
}

TEST_F(GpuPushTest, RoundsForTheWire) {
  FakeServer server(*Manifest::Create({{.name = "w", .shape = {50'000}}}));
  Open(server.address(), kChunkBytes, {.wire_dtype = WireDtype::kBFloat16});
  std::vector<float> values(50'000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 0.37F;
  std::memcpy(weights_.data(), values.data(), weights_.size());
  ASSERT_THAT(Push(1), IsOk());
  const std::string from_gpu = server.StepBytes(1, 0);
  EXPECT_THAT(from_gpu, SizeIs(100'000));
  devices_.clear();
  ASSERT_THAT(Push(2), IsOk());
  EXPECT_EQ(from_gpu, server.StepBytes(2, 0));
}

TEST_F(GpuPushTest, ACutConnectionIsHealedFromTheWeightsThemselves) {
  TcpProxy proxy(server_.port());
  Open(proxy.address());
  int64_t step = 1;
  for (const int64_t cut : {200, 5'000, 70'000, 150'000, 250'000, 298'000}) {
    SCOPED_TRACE(cut);
    ASSERT_THAT(Push(step), IsOk());
    ++step;
    proxy.CutAfter(cut);
    ASSERT_THAT(Push(step), IsOk());
    EXPECT_EQ(server_.StepBytes(step, 0), weights_);
    ++step;
  }
}

TEST_F(GpuPushTest, ACorruptChunkIsCopiedAgain) {
  server_.push_scripts = {{.corrupt_chunk = 1}};
  Open();
  ASSERT_THAT(Push(1), IsOk());
  EXPECT_EQ(server_.StepBytes(1, 0), weights_);
}

TEST_F(GpuPushTest, AfterTheReleaseACorruptChunkIsSentAgainFromTheRing) {
  server_.push_scripts = {{.corrupt_chunk = 3, .hold_chunks = true}};
  Open();
  const std::string expected = weights_;
  const auto push = Start(1);
  ASSERT_TRUE(server_.AwaitPushes(1));
  ASSERT_TRUE(push->WaitReleased(absl::Seconds(60)));
  trainer_->Queue([this] { std::fill(weights_.begin(), weights_.end(), 'x'); });
  trainer_->Await();
  const int64_t queued = ema_fake_cuda_queued_copies();
  server_.Release();
  ASSERT_THAT(push->Wait(), IsOk());
  EXPECT_EQ(ema_fake_cuda_queued_copies(), queued);
  EXPECT_EQ(server_.StepBytes(1, 0), expected);
}

TEST_F(GpuPushTest, WhatIsStagedSurvivesTriesThatSendNothing) {
  Open();
  const std::string expected = weights_;
  server_.Stop();
  const auto push = Start(1);
  ASSERT_TRUE(push->WaitReleased(absl::Seconds(60)));
  trainer_->Queue([this] { std::fill(weights_.begin(), weights_.end(), 'x'); });
  trainer_->Await();
  server_.Start();
  ASSERT_THAT(push->Wait(), IsOk());
  EXPECT_EQ(server_.StepBytes(1, 0), expected);
}

TEST_F(GpuPushTest, AFailureEndsThePushAndStays) {
  for (int64_t call = 1;; ++call) {
    SCOPED_TRACE(call);
    Open();
    ema_fake_cuda_fail(call, kIllegalAddress);
    const int64_t last = ema_fake_cuda_calls() + call;
    const absl::StatusOr<Version> version = Push(1);
    const bool has_failed = ema_fake_cuda_calls() >= last;
    ema_fake_cuda_fail(0, 0);
    if (has_failed) {
      EXPECT_THAT(version, StatusIs(absl::StatusCode::kInternal,
                                    AllOf(HasSubstr("GPU 0: "),
                                          HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS (an illegal "))));
      EXPECT_THAT(version, ReasonIs(ErrorReason::kDevice));
      EXPECT_FALSE(server_.IsCommitted(1));
    }
    run_.reset();
    EXPECT_EQ(ema_fake_cuda_pinned_bytes(), kept_bytes_);
    EXPECT_EQ(ema_fake_cuda_contexts(), kept_contexts_);
    sizes_.clear();
    total_bytes_ = 0;
    if (!has_failed) {
      EXPECT_THAT(version, IsOk());
      EXPECT_GT(call, 10);
      break;
    }
    server_.ForgetRuns();
  }
}

TEST_F(GpuPushTest, TheFirstErrorIsGivenAgain) {
  Open();
  ASSERT_THAT(Push(1), IsOk());
  ema_fake_cuda_fail(4, kIllegalAddress);
  const absl::StatusOr<Version> first = Push(2);
  EXPECT_THAT(first, ReasonIs(ErrorReason::kDevice));
  EXPECT_THAT(Push(3), StatusIs(absl::StatusCode::kInternal, HasSubstr("ILLEGAL_ADDRESS")));
  // Other weights can still be pushed.
  devices_.clear();
  EXPECT_THAT(Push(4), IsOk());
}

TEST_F(GpuPushTest, AnErrorOfOneCallEndsOnePush) {
  Open();
  ASSERT_THAT(Push(1), IsOk());
  // As of a trainer's stream that captures; and of each later call.
  for (int64_t call = 1, step = 2;; ++call, step += 2) {
    SCOPED_TRACE(call);
    const int64_t last = ema_fake_cuda_calls() + call;
    ema_fake_cuda_fail(call, kCaptureUnsupported);
    const absl::StatusOr<Version> version = Push(step);
    const bool has_failed = ema_fake_cuda_calls() >= last;
    ema_fake_cuda_fail(0, 0);
    if (!has_failed) {
      EXPECT_GT(call, 5);
      break;
    }
    EXPECT_THAT(version, ReasonIs(ErrorReason::kDevice));
    ASSERT_THAT(Push(step + 1), IsOk());
    EXPECT_EQ(server_.StepBytes(step + 1, 0), weights_);
  }
}

TEST_F(GpuPushTest, WantOfMemoryIsNoLastWord) {
  Open();
  ema_fake_cuda_fail(7, kOutOfMemory);  // After context, stream, event and following: the ring.
  EXPECT_THAT(Push(1), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("pinned memory")));
  EXPECT_THAT(Push(2), IsOk());
  EXPECT_EQ(server_.StepBytes(2, 0), weights_);
}

TEST_F(GpuPushTest, AbandonedInTheMiddleItLeavesNothingBehind) {
  server_.push_scripts = {{.hold_chunks = true}};
  Open();
  ema_fake_cuda_hold();
  {
    const auto push = Start(1);
    ASSERT_TRUE(server_.AwaitPushes(1));
    // The driver cannot be told to drop a copy: it is waited for.
    std::thread release([] { ema_fake_cuda_release(); });
    push->Abandon();
    release.join();
  }
  server_.Release();
  // On a machine that is so slow that the copies were given up, for those.
  trainer_->Await();
  EXPECT_EQ(ema_fake_cuda_queued_copies(), ema_fake_cuda_made_copies());
  Fill(3);
  ASSERT_THAT(Push(2), IsOk());
  EXPECT_EQ(server_.StepBytes(2, 0), weights_);
}

TEST_F(GpuPushTest, AGpuThatHangsHoldsNeitherAbandonNorTheNextPush) {
  Open();
  ema_fake_cuda_hold();
  const auto push = Start(1);
  ASSERT_TRUE(server_.AwaitPushes(1));
  push->Abandon();
  EXPECT_LT(ema_fake_cuda_made_copies(), ema_fake_cuda_queued_copies());
  EXPECT_THAT(push->Wait(),
              AllOf(ReasonIs(ErrorReason::kStepAbandoned),
                    StatusIs(absl::StatusCode::kAborted,
                             HasSubstr("327680 bytes of pinned memory are not freed until"))));
  EXPECT_THAT(TryStart(2), AllOf(ReasonIs(ErrorReason::kDevice),
                                 StatusIs(absl::StatusCode::kInternal, HasSubstr("GPU hangs"))));
  // What is queued after the end comes after the copies that are still to be made.
  const int64_t queued = ema_fake_cuda_queued_copies();
  int64_t made = 0;
  trainer_->Queue([&] {
    made = ema_fake_cuda_made_copies();
    Fill(4);
  });
  ema_fake_cuda_release();
  trainer_->Await();
  EXPECT_EQ(made, queued);
  ASSERT_THAT(Push(3), IsOk());
  EXPECT_EQ(server_.StepBytes(3, 0), weights_);
}

TEST_F(GpuPushTest, AReleaseIsNotHeldByAGpuThatHangs) {
  server_.push_scripts = {{.hold_chunks = true}};
  Open();
  ema_fake_cuda_hold();
  {
    const auto push = Start(1);
    EXPECT_TRUE(push->WaitReleased(absl::Seconds(60)));
    EXPECT_FALSE(push->WaitDone(absl::Milliseconds(100)));
  }
  server_.Release();
  ema_fake_cuda_release();
  trainer_->Await();
  EXPECT_THAT(Push(2), IsOk());
}

TEST_F(GpuPushTest, APushDoesNotWaitForAGpuLongerThanItsTimeout) {
  Open();
  ema_fake_cuda_hold();
  EMA_ASSERT_OK_AND_ASSIGN(const auto push, TryStart(1, absl::Seconds(2)));
  EXPECT_THAT(push->Wait(), AllOf(ReasonIs(ErrorReason::kDevice),
                                  StatusIs(absl::StatusCode::kDeadlineExceeded,
                                           HasSubstr("GPU 0: a copy of weights had not ended"))));
}

TEST_F(GpuPushTest, WhatAGpuThatHangsMayStillWriteToIsNeverFreed) {
  Open();
  ema_fake_cuda_hold();
  {
    const auto push = Start(1);
    ASSERT_TRUE(server_.AwaitPushes(1));
  }
  run_.reset();
  EXPECT_GT(ema_fake_cuda_pinned_bytes(), kept_bytes_);
  EXPECT_GT(ema_fake_cuda_contexts(), kept_contexts_);
  kept_bytes_ = ema_fake_cuda_pinned_bytes();
  kept_objects_ = ema_fake_cuda_objects() - 2;  // The trainer's streams.
  kept_contexts_ = ema_fake_cuda_contexts();
}

TEST_F(GpuPushTest, GoesOnWhileAnotherThreadCaptures) {
  Open();
  const auto push = Start(1);
  ema_fake_cuda_capture(true);
  ASSERT_THAT(push->Wait(), IsOk());
  EXPECT_EQ(server_.StepBytes(1, 0), weights_);
}

TEST_F(GpuPushTest, RefusesAnUnknownGpu) {
  Open();
  devices_.assign(devices_.size(), 1);
  devices_[0] = 7;
  std::vector<std::span<const std::byte>> shards;
  for (const int64_t size : sizes_) {
    shards.push_back(std::as_bytes(std::span(weights_.data(), static_cast<size_t>(size))));
  }
  const auto start = [&](const GpuWeights& gpu_weights) {
    return run_
        ->StartPush(1, TrainingTime::AtBatch(1), shards, absl::Seconds(60),
                    {.gpu_weights = gpu_weights})
        .status();
  };
  EXPECT_THAT(start({.devices = devices_, .streams = {{.device = 1}}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no stream of it")));
  EXPECT_THAT(start({.devices = devices_, .streams = {{.device = 1}, {.device = 7}}}),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("GPU 7: not found")));
  EXPECT_THAT(start({.devices = {0}, .streams = {{.device = 0}}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("22 shards, but 1 devices")));
}

TEST_F(LargeGpuPushTest, TheRingKeepsToItsBoundAndTheTrainerWaitsForTheRest) {
  TcpProxy proxy(server_.port());
  Open(proxy.address(), 1 << 20, {.max_staging_bytes = PinnedRing::kMinRingBytes});
  ASSERT_THAT(Push(1), IsOk());
  EXPECT_EQ(ema_fake_cuda_pinned_bytes() - kept_bytes_, PinnedRing::kMinRingBytes);
  proxy.SetStalled(true);
  const int64_t queued = ema_fake_cuda_queued_copies();
  const auto push = Start(2);
  const absl::Time wait_end = absl::Now() + absl::Seconds(20);
  while (ema_fake_cuda_queued_copies() - queued < 64) {
    ASSERT_LT(absl::Now(), wait_end);
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_FALSE(push->WaitReleased(absl::Milliseconds(300)));
  EXPECT_LT(ema_fake_cuda_queued_copies() - queued, 128);
  EXPECT_THAT(push->Wait(), ReasonIs(ErrorReason::kStepAbandoned));
  proxy.SetStalled(false);
  Fill(9);
  ASSERT_THAT(Push(3), IsOk());
  EXPECT_EQ(server_.StepBytes(3, 0), weights_);
  EXPECT_EQ(ema_fake_cuda_pinned_bytes() - kept_bytes_, PinnedRing::kMinRingBytes);
}

TEST_F(LargeGpuPushTest, WithRoomForAllTheTrainerDoesNotWaitForTheNetwork) {
  TcpProxy proxy(server_.port());
  Open(proxy.address(), 1 << 20, {.max_staging_bytes = int64_t{1} << 30});
  ASSERT_THAT(Push(1), IsOk());
  // What the shards need, and no more.
  EXPECT_EQ(ema_fake_cuda_pinned_bytes() - kept_bytes_, total_bytes_);
  for (const int64_t step : {2, 3}) {
    Fill(static_cast<int>(step));
    const std::string expected = weights_;
    proxy.SetStalled(true);
    const auto push = Start(step);
    EXPECT_TRUE(push->WaitReleased(absl::Seconds(60)));
    // The optimizer: its stream waits for the copies.
    trainer_->Queue([this] { std::fill(weights_.begin(), weights_.end(), 'x'); });
    trainer_->Await();
    const int64_t queued = ema_fake_cuda_queued_copies();
    if (step == 3) proxy.CutAll();
    proxy.SetStalled(false);
    ASSERT_THAT(push->Wait(), IsOk());
    EXPECT_EQ(server_.StepBytes(step, 0), expected);
    EXPECT_EQ(ema_fake_cuda_queued_copies(), queued);
  }
}

TEST_F(LargeGpuPushTest, WhereThereIsNoPinnedMemoryThePushFails) {
  Open(server_.address(), 1 << 20, {.max_staging_bytes = int64_t{1} << 30});
  ema_fake_cuda_limit_pinned(10 << 20);
  EXPECT_THAT(Push(1), ReasonIs(ErrorReason::kMemoryBudget));
  ema_fake_cuda_limit_pinned(100 << 20);
  EXPECT_THAT(Push(2), IsOk());
  EXPECT_EQ(ema_fake_cuda_pinned_bytes() - kept_bytes_, total_bytes_ / 2);
  EXPECT_EQ(server_.StepBytes(2, 0), weights_);
}

TEST_F(LargeGpuPushTest, NoMoreThanTheLeastIsTakenForFrozenTensors) {
  Open(server_.address(), 1 << 20,
       {.frozen_shard_count = 1, .max_staging_bytes = int64_t{1} << 30});
  EXPECT_THAT(Push(1), IsOk());
  EXPECT_EQ(ema_fake_cuda_pinned_bytes() - kept_bytes_, PinnedRing::kMinRingBytes);
}

// More than the second after which a server counts as away.
TEST_F(GpuPushTest, TheServerIsNotAwayWhileMemoryIsPinned) {
  Open();
  ema_fake_cuda_delay_pinned(1500);
  const auto push = Start(1);
  EXPECT_TRUE(push->WaitReleased(absl::Seconds(60)));
  EXPECT_THAT(push->Wait(), IsOk());
  EXPECT_EQ(server_.StepBytes(1, 0), weights_);
}

TEST_F(GpuPushTest, RefusesLessThanTheLeastRing) {
  EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_.address()));
  EXPECT_THAT(client_->OpenRun("m", {.max_staging_bytes = 1 << 20}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("max_staging_bytes 1048576: must be at least 67108864")));
}

}  // namespace
}  // namespace ema
