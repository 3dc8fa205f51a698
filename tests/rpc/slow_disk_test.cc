// SPDX-License-Identifier: Apache-2.0
//
// Versions that are only on the disk: nobody else waits for it, and who does is no worse off.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "tests/rpc/stored_pull.h"

namespace ema {
namespace {

using SlowDiskTest = StoredPullTest;

TEST_F(SlowDiskTest, ManyAtOnceCostOneReadOfTheDisk) {
  Start();
  constexpr int kReaders = 32;
  std::atomic<int64_t> read_bytes = 0;
  disk_.on_read = [&](int64_t, int64_t length_bytes) {
    read_bytes += length_bytes;
    return absl::OkStatus();
  };
  // Held so that the last of the readers, too, comes while somebody reads.
  const auto held =
      model_->readings().OpenStored(*disk_.OpenVersion(*model_, {1, 7}, "ema"), /*selection=*/{});
  ASSERT_THAT(held, IsOk());
  std::vector<std::thread> readers;
  std::atomic<int> good = 0;
  for (int i = 0; i < kReaders; ++i) {
    readers.emplace_back([&, i] {
      const bool by_lane = i % 4 == 3;
      const v1::PullRequest request = i % 2 == 0 ? Request(1) : ByLabel("best");
      good += IsData(by_lane ? PullByLane(request).data : Pull(request).data, first_) ? 1 : 0;
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(good, kReaders);
  EXPECT_EQ(read_bytes, kBytes);
}

TEST_F(SlowDiskTest, NobodyElseWaitsForASlowDisk) {
  Start();
  BlockReadsFrom(2);
  Pulled slow;
  std::thread reader([&] { slow = Pull(Request(1)); });
  is_blocked_.notification.WaitForNotification();
  // While the disk stands still: pulls from memory by both ways, pushes, and calls.
  EXPECT_TRUE(IsData(Pull(Request()).data, newest_));
  EXPECT_TRUE(IsData(PullByLane(Request()).data, newest_));
  CreateAndOpen();
  v1::PushResponse response;
  EXPECT_TRUE(PushFilled(1, 2.0f, &response).status.ok());
  EXPECT_EQ(Pull("ema").data, Filled(2.0f));
  go_on_.Notify();
  reader.join();
  EXPECT_TRUE(slow.complete);
  EXPECT_TRUE(IsData(slow.data, first_));
}

TEST_F(SlowDiskTest, NorForOneThatIsSlowToOpen) {
  Start();
  disk_.on_open = [this] {
    is_blocked_.notification.Notify();
    go_on_.WaitForNotification();
    return absl::OkStatus();
  };
  Pulled slow;
  std::thread reader([&] { slow = Pull(ByLabel("best")); });
  is_blocked_.notification.WaitForNotification();
  EXPECT_TRUE(IsData(Pull(ByLabel("newest")).data, newest_));
  go_on_.Notify();
  reader.join();
  EXPECT_TRUE(IsData(slow.data, first_));
}

TEST_F(SlowDiskTest, LongListsThatWaitForTheDiskShareALimitedMemory) {
  Start();
  disk_.on_open = [this] {
    go_on_.WaitForNotification();
    return absl::OkStatus();
  };
  v1::PullRequest request = Request(1);
  for (int i = 0; i < 150'000; ++i) {
    request.mutable_selection()->add_tensors(std::string(40, 'a'));
  }
  // Of 72 bytes a name: six fit into 64 MiB.
  std::atomic<int> refused = 0;
  std::atomic<int> opened = 0;
  {
    std::vector<std::jthread> readers;
    for (int i = 0; i < 8; ++i) {
      readers.emplace_back([&] {
        const v1::ErrorReason reason = ReasonOf(request);
        (reason == v1::ERROR_REASON_TOO_MANY_CALLS ? refused : opened) += 1;
      });
    }
    while (refused < 2) std::this_thread::yield();
    go_on_.Notify();
  }
  EXPECT_EQ(refused, 2);
  EXPECT_EQ(opened, 6);
  EXPECT_EQ(ReasonOf(request), v1::ERROR_REASON_BAD_REQUEST);  // There is no such tensor.
}

TEST_F(SlowDiskTest, AReaderThatWaitsForTheDiskHasNotStalled) {
  RpcServer::Options options;
  options.limits.max_pull_streams = 1;
  options.limits.stream_timeout = absl::Seconds(3);
  Start(options);
  BlockReadsFrom(2);
  Pulled slow;
  std::thread reader([&] { slow = Pull(Request(1)); });
  is_blocked_.notification.WaitForNotification();
  absl::SleepFor(options.limits.stream_timeout / 10 + absl::Milliseconds(100));
  // It would lose its place to one of these if it counted as stalled.
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(ReasonOf(Request()), v1::ERROR_REASON_TOO_MANY_STREAMS);
  }
  go_on_.Notify();
  reader.join();
  EXPECT_TRUE(slow.complete);
}

TEST_F(SlowDiskTest, AReaderThatLeavesMeanwhileIsLetGo) {
  Start();
  BlockReadsFrom(2);
  std::weak_ptr<Model> model = model_;
  {
    grpc::ClientContext context;
    const auto stream = stub_->Pull(&context, Request(1));
    v1::PullResponse response;
    ASSERT_TRUE(stream->Read(&response));
    is_blocked_.notification.WaitForNotification();
    context.TryCancel();
    while (stream->Read(&response)) {
    }
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  go_on_.Notify();
  // The place is free again, and nothing is held.
  EXPECT_TRUE(IsData(Pull(Request(1)).data, first_));
  server_->Shutdown(After(SteadyNow(), absl::Seconds(10)));
  server_.reset();
  disk_.Clear();
  rank_.reset();
  model_.reset();
  store_.reset();
  EXPECT_TRUE(model.expired());
}

TEST_F(SlowDiskTest, APullThatIsRunningFinishesWhileTheServerStops) {
  Start();
  BlockReadsFrom(2);
  Pulled slow;
  std::thread reader([&] { slow = Pull(Request(1)); });
  is_blocked_.notification.WaitForNotification();
  std::thread stopper([&] { server_->Shutdown(After(SteadyNow(), absl::Seconds(30))); });
  while (NewChannel()->WaitForConnected(std::chrono::system_clock::now() +
                                        std::chrono::milliseconds(100))) {
  }  // Until nobody gets in any more.
  go_on_.Notify();
  stopper.join();
  reader.join();
  EXPECT_TRUE(slow.complete) << slow.result.status.error_message();
  EXPECT_TRUE(IsData(slow.data, first_));
}

TEST_F(SlowDiskTest, AServerThatMustStopAtOnceEndsIt) {
  Start();
  BlockReadsFrom(2);
  Pulled slow;
  std::thread reader([&] { slow = Pull(Request(1)); });
  is_blocked_.notification.WaitForNotification();
  std::thread stopper([&] { server_->Shutdown(SteadyNow()); });
  reader.join();  // Told at once; the disk's read ends later.
  EXPECT_FALSE(slow.result.status.ok());
  EXPECT_FALSE(slow.complete);
  go_on_.Notify();
  stopper.join();
}

TEST_F(SlowDiskTest, ADeletedModelsPullFinishes) {
  Start();
  BlockReadsFrom(2);
  Pulled slow;
  std::thread reader([&] { slow = Pull(Request(1)); });
  is_blocked_.notification.WaitForNotification();
  EXPECT_TRUE(store_->Delete("big"));
  go_on_.Notify();
  reader.join();
  EXPECT_TRUE(slow.complete);
  EXPECT_EQ(ReasonOf(Request(1)), v1::ERROR_REASON_MODEL_NOT_FOUND);
}

}  // namespace
}  // namespace ema
