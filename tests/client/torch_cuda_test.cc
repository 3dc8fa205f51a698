// SPDX-License-Identifier: Apache-2.0
//
// Modules on a GPU: LibTorch's CPU half with what ema/torch.h needs of the other, and a CUDA driver
// in host memory.
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>

#include "absl/synchronization/notification.h"
#include "ema/torch.h"
#include "tests/client/fake_cuda.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

// The stream on which every thread works.
std::atomic<void*> current_stream = nullptr;
std::atomic<int64_t> clone_count = 0;

void QueueOn(void* stream, std::function<void()> work) {
  const auto run = [](void* argument) {
    const std::unique_ptr<std::function<void()>> function(
        static_cast<std::function<void()>*>(argument));
    (*function)();
  };
  ema_fake_cuda_queue(stream, run, new std::function<void()>(std::move(work)));
}

at::Tensor OnGpu(std::shared_ptr<std::vector<float>> values) {
  const auto size = static_cast<int64_t>(values->size());
  float* const data = values->data();
  const at::Device gpu(at::kCUDA, 0);
  return at::for_blob(data, {size})
      .deleter([values](void*) {})
      .options(at::TensorOptions(at::kFloat).device(gpu))
      .target_device(gpu)
      .make_tensor();
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  at::DeviceType type() const override { return at::kCUDA; }
  at::Device exchangeDevice(at::Device /*device*/) const override { return getDevice(); }
  at::Device getDevice() const override { return {at::kCUDA, 0}; }
  void setDevice(at::Device /*device*/) const override {}
  void uncheckedSetDevice(at::Device /*device*/) const noexcept override {}
  at::Stream getStream(at::Device device) const override {
    return at::Stream(at::Stream::DEFAULT, device);
  }
  at::Stream exchangeStream(at::Stream stream) const override { return stream; }
  void* getStreamNativeHandle(const at::Stream /*stream*/) const override { return current_stream; }
  at::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// On the stream, as on a GPU.
at::Tensor Clone(const at::Tensor& from, std::optional<at::MemoryFormat> /*format*/) {
  ++clone_count;
  auto values = std::make_shared<std::vector<float>>(from.numel());
  QueueOn(current_stream, [values, from] {
    std::memcpy(values->data(), from.const_data_ptr(), values->size() * sizeof(float));
  });
  return OnGpu(values);
}

at::Tensor Narrowed(const at::Tensor& from, c10::SymIntArrayRef sizes,
                    c10::SymIntArrayRef /*strides*/, std::optional<c10::SymInt> /*offset*/) {
  // The tests take no real parts.
  EXPECT_EQ(sizes[0].expect_int(), from.numel());
  return from.detach();
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("clone", Clone);
  library.impl("as_strided", Narrowed);
}

struct Net : torch::nn::Module {
  Net() {
    register_parameter("held", OnGpu(held));
    register_parameter("other", OnGpu(other));
    register_buffer("buffer", OnGpu(buffer));
  }
  void Fill(float value) const {
    for (const auto& values : {held, other, buffer}) {
      std::fill(values->begin(), values->end(), value);
    }
  }

  std::shared_ptr<std::vector<float>> held = std::make_shared<std::vector<float>>(50'000);
  std::shared_ptr<std::vector<float>> other = std::make_shared<std::vector<float>>(1'000);
  std::shared_ptr<std::vector<float>> buffer = std::make_shared<std::vector<float>>(100);
};

class TorchCudaTest : public testing::Test {
 protected:
  TorchCudaTest() {
    current_stream = stream_;
    clone_count = 0;
    net_.Fill(1);
  }
  ~TorchCudaTest() override {
    ema_fake_cuda_release();
    ema_ = nullptr;
    ema_fake_cuda_end_stream(stream_);
    EXPECT_EQ(ema_fake_cuda_pinned_bytes(), 0);
    EXPECT_EQ(ema_fake_cuda_objects(), 0);
  }
  void SetUp() override {
    EMA_ASSERT_OK_AND_ASSIGN(const NamedTensors own, NamedTensors::Of(net_));
    EMA_ASSERT_OK_AND_ASSIGN(Manifest manifest, Manifest::Create(own.specs));
    server_ = std::make_unique<FakeServer>(std::move(manifest));
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_->address()));
    Attachment::Options options;
    // Its track has an interval of ten.
    options.time = [](int64_t step) {
      TrainingTime time;
      time.Set(TimeUnit::kBatch, 10.0 * static_cast<double>(step));
      return time;
    };
    EMA_ASSERT_OK_AND_ASSIGN(ema_, Attachment::Create(*client_, "m", net_, options));
  }

  std::vector<float> Pushed(int64_t step) const {
    const std::string bytes = server_->StepBytes(step, 0);
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  static std::vector<float> All(float value) { return std::vector<float>(51'100, value); }

  void* const stream_ = ema_fake_cuda_new_stream();
  Net net_;
  torch::optim::SGD optimizer_{std::vector<at::Tensor>{net_.named_parameters()["held"]}, 0.1};
  std::unique_ptr<FakeServer> server_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Attachment> ema_;
};

TEST_F(TorchCudaTest, TheStreamWaitsForTheCopiesAndTheTrainerDoesNot) {
  ema_fake_cuda_hold();
  ema_->AfterStep();
  EXPECT_EQ(clone_count, 1) << "of the buffer alone";
  ema_->WaitReleased();
  EXPECT_EQ(ema_fake_cuda_made_copies(), 0);
  absl::Notification overwritten;
  QueueOn(stream_, [&] {
    net_.Fill(2);
    overwritten.Notify();
  });
  EXPECT_FALSE(overwritten.HasBeenNotified());
  ema_fake_cuda_release();
  overwritten.WaitForNotification();
  ASSERT_THAT(ema_->WaitPushed(), IsOk());
  EXPECT_EQ(ema_->stats().pushes, 1) << ema_->stats().last_error;
  EXPECT_EQ(Pushed(1), All(1));
}

TEST_F(TorchCudaTest, EachPushHasWhatTheStreamHasMadeByThen) {
  for (int64_t step = 1; step <= 10; ++step) {
    ema_->WaitReleased();
    QueueOn(stream_, [this, step] { net_.Fill(static_cast<float>(step)); });
    ema_->AfterStep();
    ASSERT_THAT(ema_->WaitPushed(), IsOk());
    EXPECT_EQ(Pushed(step), All(static_cast<float>(step))) << ema_->stats().last_error;
  }
}

TEST_F(TorchCudaTest, StepCopiesNothingThatTheOptimizerHolds) {
  ema_->Step(optimizer_);
  ASSERT_THAT(ema_->WaitPushed(), IsOk());
  EXPECT_EQ(clone_count, 2) << "of the buffer, and of what somebody else may change";
  EXPECT_EQ(Pushed(1), All(1)) << ema_->stats().last_error;
}

}  // namespace
}  // namespace ema
