// SPDX-License-Identifier: Apache-2.0
//
// Calls that wait for a thread of the server's.
#include <algorithm>
#include <atomic>
#include <functional>
#include <iostream>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

// Whoever lists holds up the thread that does so; whoever saves likewise.
class HeldCheckpoints final : public Checkpoints {
 public:
  absl::StatusOr<CheckpointList> List(Model&) override {
    ++begun;
    release.WaitForNotification();
    return CheckpointList();
  }
  absl::StatusOr<std::optional<VersionId>> Resume(Model&, const Launch&,
                                                  const ResumePoint&) override {
    ++begun;
    release.WaitForNotification();
    return std::nullopt;
  }
  absl::StatusOr<Saved> Save(Model& model, const SaveRequest& request) override {
    ++begun;
    release.WaitForNotification();
    return Checkpoints::Save(model, request);
  }

  std::atomic<int> begun = 0;
  absl::Notification release;
};

// Calls of one kind that are under way.
class WaitingCallsTest : public RpcFixture {
 protected:
  struct Call {
    grpc::ClientContext context;
    v1::ListCheckpointsResponse listing;
    v1::CreateCheckpointResponse saved;
    v1::OpenRunResponse opened;
    grpc::Status status;
    bool has_ended = false;
  };

  void SetUp() override {
    checkpoints_ = &held_;
    RpcServer::Options options;
    options.observer = &observer_;
    StartServer(options);
    CreateAndOpen();
  }
  void TearDown() override {
    if (!held_.release.HasBeenNotified()) held_.release.Notify();
    server_.reset();
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  Call& List() {
    v1::ListCheckpointsRequest request;
    request.set_model("m");
    Call& call = *calls_.emplace_back(std::make_unique<Call>());
    readers_.push_back(stub_->AsyncListCheckpoints(&call.context, request, &queue_));
    readers_.back()->Finish(&call.listing, &call.status, &call);
    return call;
  }
  Call& Save() {
    v1::CreateCheckpointRequest request;
    request.set_model("m");
    Call& call = *calls_.emplace_back(std::make_unique<Call>());
    savers_.push_back(stub_->AsyncCreateCheckpoint(&call.context, request, &queue_));
    savers_.back()->Finish(&call.saved, &call.status, &call);
    return call;
  }
  CallResult AwaitEnd(Call& call) {
    void* tag = nullptr;
    bool ok = false;
    while (!call.has_ended && queue_.Next(&tag, &ok)) static_cast<Call*>(tag)->has_ended = true;
    return Result(call.status, call.context);
  }
  // The one that ends next.
  Call& AwaitAnyEnd() {
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue_.Next(&tag, &ok));
    auto* const call = static_cast<Call*>(tag);
    call->has_ended = true;
    return *call;
  }
  static void Await(const std::function<bool()>& condition) {
    while (!condition()) absl::SleepFor(absl::Milliseconds(1));
  }

  // Counts the calls that the server has told of as cancelled.
  class Observer final : public ServerObserver {
   public:
    void OnRpcEnded(std::string_view, const absl::Status& status) override {
      if (absl::IsCancelled(status)) ++cancelled;
    }
    std::atomic<int> cancelled = 0;
  };

  HeldCheckpoints held_;
  Observer observer_;
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<Call>> calls_;
  std::vector<std::unique_ptr<grpc::ClientAsyncResponseReader<v1::ListCheckpointsResponse>>>
      readers_;
  std::vector<std::unique_ptr<grpc::ClientAsyncResponseReader<v1::CreateCheckpointResponse>>>
      savers_;
  std::vector<std::unique_ptr<grpc::ClientAsyncResponseReader<v1::OpenRunResponse>>> openers_;
};

TEST_F(WaitingCallsTest, ThoseBeyondTheLimitAreRefusedWithARetryHint) {
  List();
  Await([this] { return held_.begun == 1; });
  for (int64_t i = 0; i < RpcServer::kMaxWaitingCalls; ++i) List();
  const CallResult refused = AwaitEnd(List());
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(refused.detail.reason(), v1::ERROR_REASON_TOO_MANY_CALLS);
  EXPECT_GT(refused.detail.retry_delay_ms(), 0);
  held_.release.Notify();
  for (size_t i = 0; i + 1 < calls_.size(); ++i) {
    EXPECT_TRUE(AwaitEnd(*calls_[i]).status.ok()) << calls_[i]->status.error_message();
  }
}

// A request that resumes a run has the layout of a rank.
TEST_F(WaitingCallsTest, LongRequestsThatWaitShareALimitedMemory) {
  v1::OpenRunRequest request;
  request.set_model("m");
  request.mutable_resume();
  for (int i = 0; i < 100'000; ++i) {
    v1::Shard& shard = *request.mutable_layout()->add_shards();
    for (int d = 0; d < 8; ++d) shard.add_offsets(int64_t{1} << 60);
  }
  const int64_t fit = (int64_t{64} << 20) / static_cast<int64_t>(request.SpaceUsedLong());
  ASSERT_GE(fit, 2);
  ASSERT_LE(fit, 8);
  const auto open = [&](const v1::OpenRunRequest& opening) -> Call& {
    Call& call = *calls_.emplace_back(std::make_unique<Call>());
    openers_.push_back(stub_->AsyncOpenRun(&call.context, opening, &queue_));
    openers_.back()->Finish(&call.opened, &call.status, &call);
    return call;
  };
  // One of a good layout begins to resume, and is held up there.
  v1::OpenRunRequest good = request;
  v1::Model model;
  {
    grpc::ClientContext context;
    v1::GetModelRequest get;
    get.set_model("m");
    ASSERT_TRUE(stub_->GetModel(&context, get, &model).ok());
  }
  good.set_manifest_digest(model.manifest_digest());
  good.set_launch_id("another");
  good.set_world_size(1);
  good.mutable_layout()->clear_shards();
  v1::Shard& whole = *good.mutable_layout()->add_shards();
  whole.add_offsets(0);
  whole.add_extents(kElements);
  open(good);
  Await([this] { return held_.begun == 1; });
  // The server's copies may take somewhat less memory than this one.
  for (int64_t i = 0; i < 2 * fit; ++i) open(request);
  Call& first = AwaitAnyEnd();
  const CallResult refused = Result(first.status, first.context);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(refused.detail.reason(), v1::ERROR_REASON_TOO_MANY_CALLS);
  EXPECT_GT(refused.detail.retry_delay_ms(), 0);
  held_.release.Notify();
  // Those that have waited are run, and have a wrong layout.
  int64_t run = 0;
  for (int64_t i = 1; i <= 2 * fit; ++i) {
    const v1::ErrorReason reason = AwaitEnd(*calls_[i]).detail.reason();
    if (reason == v1::ERROR_REASON_LAYOUT_MISMATCH) ++run;
  }
  EXPECT_GE(run, 1);
  EXPECT_LT(run, 2 * fit);
  // Again there is room.
  EXPECT_EQ(AwaitEnd(open(request)).detail.reason(), v1::ERROR_REASON_LAYOUT_MISMATCH);
}

TEST_F(WaitingCallsTest, CallsCancelledWhileQueuedAreNotRun) {
  List();
  Await([this] { return held_.begun == 1; });
  Call& left = List();
  Call& stays = List();
  // One queue, one thread: whatever came after it has been seen, so has it.
  v1::GetModelRequest request;
  request.set_model("m");
  const auto ask = [&] {
    grpc::ClientContext context;
    v1::Model response;
    EXPECT_TRUE(stub_->GetModel(&context, request, &response).ok());
  };
  ask();
  left.context.TryCancel();
  EXPECT_EQ(AwaitEnd(left).status.error_code(), grpc::StatusCode::CANCELLED);
  ask();
  held_.release.Notify();
  EXPECT_TRUE(AwaitEnd(stays).status.ok());
  EXPECT_EQ(held_.begun, 2);
  EXPECT_EQ(observer_.cancelled, 1);
}

TEST_F(WaitingCallsTest, ADrainingServerDoesNotBeginThoseThatBeginWork) {
  Save();
  Await([this] { return held_.begun == 1; });
  Call& waiting = Save();
  List();  // Another thread's: it has been seen, so the one before has.
  Await([this] { return held_.begun == 2; });
  server_->StartDraining();
  held_.release.Notify();
  const CallResult refused = AwaitEnd(waiting);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(refused.detail.reason(), v1::ERROR_REASON_DRAINING);
  EXPECT_EQ(held_.begun, 2);
}

TEST_F(WaitingCallsTest, TheCreationOfAVeryLargeModelDoesNotHoldUpOtherCalls) {
  v1::CreateModelRequest request;
  request.set_model("large");
  for (int i = 0; i < 100'000; ++i) {
    v1::TensorSpec& tensor = *request.mutable_manifest()->add_tensors();
    tensor.set_name(absl::StrCat("w", i));
    tensor.set_dtype(v1::DTYPE_FLOAT32);
    tensor.add_shape(1);
  }
  for (int i = 0; i < 64; ++i) {
    v1::Track& track = *request.add_tracks();
    track.set_name(absl::StrCat("ema", i));
    (*track.mutable_schedule())["half_life"] = "1ba";
  }
  // Others who use this machine may hold up a call beside one creation, but hardly beside each.
  bool was_held_up = true;
  for (int i = 0; was_held_up && i < 5; ++i) {
    std::atomic<bool> is_over = false;
    const absl::Time begin = absl::Now();
    absl::Time end;
    grpc::Status status;
    std::thread creator([&] {
      grpc::ClientContext context;
      v1::CreateModelResponse response;
      status = stub_->CreateModel(&context, request, &response);
      end = absl::Now();
      is_over = true;
    });
    absl::Duration longest;
    while (!is_over) {
      grpc::ClientContext context;
      v1::GetModelRequest get;
      get.set_model("m");
      v1::Model model;
      const absl::Time asked = absl::Now();
      EXPECT_TRUE(stub_->GetModel(&context, get, &model).ok());
      longest = std::max(longest, absl::Now() - asked);
    }
    creator.join();
    ASSERT_TRUE(status.ok()) << status.error_message();
    std::cout << "it took " << end - begin << ", other calls at most " << longest << "\n";
    was_held_up = longest >= (end - begin) / 2;
    EXPECT_TRUE(store_->Delete("large"));
  }
  EXPECT_FALSE(was_held_up);
}

TEST_F(WaitingCallsTest, ARequestThatIsLargerThanAllThatMayWaitIsInvalid) {
  v1::GetStatisticsRequest request;
  request.set_model("m");
  request.add_tracks(std::string(5'000'000, 'x'));
  grpc::ClientContext context;
  v1::VersionRecord response;
  const grpc::Status status = stub_->GetStatistics(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("bytes of memory, expected at most 2097152"));
}

}  // namespace
}  // namespace ema
