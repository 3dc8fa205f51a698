// SPDX-License-Identifier: Apache-2.0
//
// What clients and whoever watches the server see of a device that has no memory, or is broken.
#include <gmock/gmock.h>

#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/device/accelerator_device.h"
#include "server/server.h"
#include "tests/rpc/rpc_fixture.h"
#include "tests/testutil/fake_accelerator.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<Device> DeviceOf(std::shared_ptr<FakeAccelerator> accelerator) {
  return MakeAcceleratorDevice(std::move(accelerator),
                               {.kept_free_bytes = 1 << 20, .slab_bytes = 16 << 10});
}

class DeviceFailureTest : public RpcFixture {
 protected:
  void SetUp() override {
    device_ = DeviceOf(accelerator_);
    StartServer();
    CreateAndOpen();
    v1::PushResponse pushed;
    ASSERT_TRUE(PushFilled(1, 8, &pushed).status.ok());
  }

  bool IsServing(const std::string& service) {
    const auto stub = grpc::health::v1::Health::NewStub(channel_);
    grpc::health::v1::HealthCheckRequest request;
    request.set_service(service);
    grpc::health::v1::HealthCheckResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(stub->Check(&context, request, &response).ok());
    return response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
  }

  // All memory that is left on the device.
  std::vector<std::shared_ptr<Block>> TakeMemory() {
    std::vector<std::shared_ptr<Block>> taken;
    for (const int64_t size_bytes : {1 << 20, 4096, 64, 1}) {
      while (true) {
        absl::StatusOr<std::shared_ptr<Block>> block = device_->Allocate(size_bytes);
        if (!block.ok()) break;
        taken.push_back(*std::move(block));
      }
    }
    return taken;
  }

  const std::shared_ptr<FakeAccelerator> accelerator_ =
      std::make_shared<FakeAccelerator>(FakeAccelerator::Options{.memory_bytes = 8 << 20});
};

TEST_F(DeviceFailureTest, APushThatFindsNoMemoryChangesNothingAndMayComeAgain) {
  std::vector<std::shared_ptr<Block>> taken = TakeMemory();
  v1::PushResponse pushed;
  const CallResult refused = PushFilled(2, 4, &pushed);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(refused.detail.reason(), v1::ERROR_REASON_MEMORY_BUDGET);
  EXPECT_THAT(refused.status.error_message(), HasSubstr("device \"fake:0\": no memory"));
  EXPECT_TRUE(IsServing(""));
  EXPECT_EQ(Pull("ema").header.version().version(), 1);
  EXPECT_EQ(Pull("ema").data, Filled(8));

  taken.clear();
  const CallResult accepted = PushFilled(2, 4, &pushed);
  ASSERT_TRUE(accepted.status.ok()) << accepted.status.error_message();
  EXPECT_EQ(Pull("ema").data, Filled(6));
  EXPECT_EQ(Pull("raw").data, Filled(4));
}

// The step's blocks fit, a ring by which weights come does not.
TEST_F(DeviceFailureTest, APushForWhoseRingThereIsNoMemoryMayComeAgain) {
  // The first push's stream has given its ring back, before the response.
  device_->Trim(0);
  ASSERT_EQ(accelerator_->pinned_bytes(), 0);
  std::vector<std::shared_ptr<Block>> taken = TakeMemory();
  const int64_t ring_bytes = device_->overhead(0).bytes_per_stream;
  for (int64_t freed = 0; freed < ring_bytes / 2; taken.pop_back()) {
    freed += taken.back()->size_bytes();
  }
  device_->Trim(0);
  v1::PushResponse pushed;
  const CallResult refused = PushFilled(2, 4, &pushed);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(refused.detail.reason(), v1::ERROR_REASON_MEMORY_BUDGET);
  EXPECT_THAT(refused.status.error_message(), HasSubstr(absl::StrCat(ring_bytes, " bytes")));
  EXPECT_TRUE(IsServing(""));

  taken.clear();
  const CallResult accepted = PushFilled(2, 4, &pushed);
  ASSERT_TRUE(accepted.status.ok()) << accepted.status.error_message();
  EXPECT_EQ(Pull("ema").data, Filled(6));
  EXPECT_EQ(Pull("raw").data, Filled(4));
}

TEST_F(DeviceFailureTest, ABrokenDeviceIsSaidAndWhatIsOnTheHostIsServed) {
  EXPECT_TRUE(IsServing(""));
  ASSERT_EQ(Pull("ema").data, Filled(8));
  accelerator_->Break();
  v1::PushResponse pushed;
  const CallResult broken = PushFilled(2, 4, &pushed);
  EXPECT_EQ(broken.status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(broken.detail.reason(), v1::ERROR_REASON_DEVICE);
  EXPECT_THAT(broken.status.error_message(), HasSubstr("illegal memory access"));
  EXPECT_FALSE(IsServing(""));
  EXPECT_FALSE(IsServing("ema.v1.EmaService"));

  // The copy that the first reader made.
  const Pulled copied = Pull("ema");
  EXPECT_TRUE(copied.complete);
  EXPECT_EQ(copied.header.version().version(), 1);
  EXPECT_EQ(copied.data, Filled(8));
  // Nobody has read that one.
  const Pulled lost = Pull("raw");
  EXPECT_FALSE(lost.complete);
  EXPECT_EQ(lost.result.detail.reason(), v1::ERROR_REASON_DEVICE);
  // From then on the first error is told.
  EXPECT_EQ(PushFilled(3, 4, &pushed).status.error_message(), broken.status.error_message());
}

class TwoRanksOneStreamTest : public RpcFixture {
 protected:
  void SetUp() override {
    device_ = DeviceOf(accelerator_);
    RpcServer::Options options;
    options.limits.max_push_streams = 1;
    StartServer(options);
    grpc::ClientContext context;
    v1::CreateModelResponse created;
    ASSERT_TRUE(stub_->CreateModel(&context, CreateRequest(), &created).ok());
    for (int64_t rank = 0; rank < 2; ++rank) {
      v1::OpenRunRequest request;
      request.set_model("m");
      request.set_launch_id("launch");
      request.set_rank(rank);
      request.set_world_size(2);
      request.set_manifest_digest(created.model().manifest_digest());
      v1::Shard* const shard = request.mutable_layout()->add_shards();
      shard->add_offsets(rank * kElements / 2);
      shard->add_extents(kElements / 2);
      grpc::ClientContext open_context;
      ASSERT_TRUE(stub_->OpenRun(&open_context, request, &runs_[rank]).ok());
    }
  }

  // A rank's stream of a step, all sent.
  struct Stream {
    grpc::ClientContext context;
    v1::PushResponse response;
    std::unique_ptr<grpc::ClientWriter<v1::PushRequest>> writer;
  };
  std::unique_ptr<Stream> Begin(int64_t rank, int64_t step) {
    auto stream = std::make_unique<Stream>();
    stream->writer = stub_->Push(&stream->context, &stream->response);
    v1::PushRequest header = Header(step);
    header.mutable_header()->set_rank(rank);
    header.mutable_header()->set_run_epoch(runs_[rank].run_epoch());
    header.mutable_header()->set_layout_digest(runs_[rank].layout_digest());
    const std::string data = Filled(1).substr(0, kElements / 2 * 4);
    for (const v1::PushRequest& message : {header, Chunk(0, data), Commit(1, data)}) {
      if (!stream->writer->Write(message)) break;
    }
    stream->writer->WritesDone();
    return stream;
  }

  const std::shared_ptr<FakeAccelerator> accelerator_ =
      std::make_shared<FakeAccelerator>(FakeAccelerator::Options{.max_delay_us = 5'000});
  v1::OpenRunResponse runs_[2];
};

TEST_F(TwoRanksOneStreamTest, TheSecondGetsTheFirstOnesMemoryWithItsPlace) {
  for (int64_t step = 1; step <= 20; ++step) {
    const int64_t work_before = accelerator_->work_count();
    const std::unique_ptr<Stream> first = Begin(0, step);
    // It has the place.
    while (accelerator_->work_count() == work_before) absl::SleepFor(absl::Microseconds(50));
    CallResult second;
    do {
      const std::unique_ptr<Stream> stream = Begin(1, step);
      second = Result(stream->writer->Finish(), stream->context);
    } while (second.detail.reason() == v1::ERROR_REASON_TOO_MANY_STREAMS);
    EXPECT_TRUE(second.status.ok()) << second.status.error_message();
    const grpc::Status status = first->writer->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_EQ(accelerator_->pin_count(), 1);
}

TEST(ServerOnABrokenDeviceTest, TheDrainSaysWhatBrokeIt) {
  const auto accelerator = std::make_shared<FakeAccelerator>(FakeAccelerator::Options{});
  const std::shared_ptr<Device> device = DeviceOf(accelerator);
  ServerOptions options;
  options.listen = {"127.0.0.1:0"};
  options.thread_count = 1;
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Server> server,
                           Server::Start(options, /*hooks=*/{}, device));
  accelerator->Break();
  EXPECT_FALSE(device->NewStream().ok());
  // main() exits with 1 for any error.
  EXPECT_THAT(server->Drain(), StatusIs(absl::StatusCode::kInternal, HasSubstr("illegal memory")));
}

}  // namespace
}  // namespace ema
