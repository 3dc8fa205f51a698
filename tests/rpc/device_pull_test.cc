// SPDX-License-Identifier: Apache-2.0
//
// Pulls of averages that are not in the host's memory.
#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "server/device/accelerator_device.h"
#include "tests/rpc/rpc_fixture.h"
#include "tests/testutil/fake_accelerator.h"

namespace ema {
namespace {

class DevicePullTest : public RpcFixture {
 protected:
  void SetUp() override {
    device_ = MakeAcceleratorDevice(accelerator_, {.kept_free_bytes = 1 << 20});
    StartServer({.thread_count = 1});
    CreateAndOpen();
    v1::PushResponse pushed;
    ASSERT_TRUE(PushFilled(1, 8, &pushed).status.ok());
  }

  const std::shared_ptr<FakeAccelerator> accelerator_ =
      std::make_shared<FakeAccelerator>(FakeAccelerator::Options());
};

TEST_F(DevicePullTest, WhileOneWaitsForTheDeviceTheServersThreadServesOthers) {
  const int64_t copies = accelerator_->copies_to_host();
  accelerator_->HoldCopiesToHost(true);
  Pulled pulled;
  std::jthread reader([&] { pulled = Pull("ema"); });
  while (accelerator_->copies_to_host() == copies) std::this_thread::yield();
  for (int i = 0; i < 3; ++i) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    v1::GetModelRequest request;
    request.set_model("m");
    v1::Model response;
    EXPECT_TRUE(stub_->GetModel(&context, request, &response).ok());
  }
  accelerator_->HoldCopiesToHost(false);
  reader.join();
  EXPECT_TRUE(pulled.complete);
  EXPECT_EQ(pulled.data, Filled(8));
  // What has been brought to the host once needs the device no more.
  accelerator_->HoldCopiesToHost(true);
  EXPECT_EQ(Pull("ema").data, Filled(8));
  accelerator_->HoldCopiesToHost(false);
}

}  // namespace
}  // namespace ema
