// SPDX-License-Identifier: Apache-2.0
//
// Modules that train against a real server, for the tests of ema/torch.h. What is averaged is
// compared bit for bit with the definition, fma(w, p - average, average), with the schedule's own
// weights.
#ifndef EMA_TESTS_CLIENT_TORCH_TESTING_H_
#define EMA_TESTS_CLIENT_TORCH_TESTING_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/torch.h"
#include "server/server.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {

inline constexpr char kSchedule[] = "half_life=4ba, update_interval=2ba";
// What a test waits for something that comes; it fails after that.
inline constexpr absl::Duration kPatience = absl::Seconds(60);

// Buffers, a frozen layer, and weights with two names.
struct Net : torch::nn::Module {
  Net() {
    register_module("again", hidden);
    frozen->weight.set_requires_grad(false);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return frozen(hidden(torch::relu(norm(encoder(x)))));
  }

  torch::nn::Linear encoder =
      register_module("encoder", torch::nn::Linear(torch::nn::LinearOptions(6, 5).bias(false)));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(5));
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(5, 5));
  torch::nn::Linear frozen =
      register_module("frozen", torch::nn::Linear(torch::nn::LinearOptions(5, 400).bias(false)));
};
inline constexpr int64_t kFrozenBytes = int64_t{5} * 400 * 4;

inline std::map<std::string, torch::Tensor> TensorsOf(const torch::nn::Module& module) {
  std::map<std::string, torch::Tensor> result;
  for (const auto& item : module.named_parameters()) result[item.key()] = item.value().detach();
  for (const auto& item : module.named_buffers()) result[item.key()] = item.value().detach();
  return result;
}

inline std::map<std::string, torch::Tensor> CopyOf(const torch::nn::Module& module) {
  std::map<std::string, torch::Tensor> result = TensorsOf(module);
  for (auto& [name, tensor] : result) tensor = tensor.clone();
  return result;
}

// The names of those that differ in a bit or in their dtype, or that only one has.
inline std::vector<std::string> Differences(const std::map<std::string, torch::Tensor>& a,
                                            const std::map<std::string, torch::Tensor>& b) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second.dtype() != tensor.dtype() ||
        !torch::equal(other->second, tensor)) {
      names.push_back(name);
    }
  }
  for (const auto& [name, tensor] : b) {
    if (a.count(name) == 0) names.push_back(name);
  }
  return names;
}

inline void CopyInto(torch::nn::Module& module, const torch::nn::Module& from) {
  const torch::NoGradGuard no_grad;
  const std::map<std::string, torch::Tensor> source = TensorsOf(from);
  for (auto& [name, tensor] : TensorsOf(module)) tensor.copy_(source.at(name));
}

// The average that the definition gives.
class Reference {
 public:
  void Step(int64_t step, const torch::nn::Module& module) {
    TrainingTime now;
    now.Set(TimeUnit::kBatch, static_cast<double>(step));
    const Schedule::Update update = *schedule_.Plan(state_, now);
    if (!update.due) return;
    for (const auto& [name, tensor] : TensorsOf(module)) {
      const bool averages = tensor.is_floating_point();
      torch::Tensor value = averages ? tensor.to(torch::kFloat32).clone() : tensor.clone();
      if (averages && state_.update_count > 0) Average(update.update_weight, average_[name], value);
      average_[name] = value;
    }
    state_ = schedule_.Next(state_, update, now);
  }
  const std::map<std::string, torch::Tensor>& average() const { return average_; }

 private:
  // Into `value`.
  static void Average(double weight, const torch::Tensor& average, torch::Tensor& value) {
    const auto* const current = average.const_data_ptr<float>();
    auto* const pushed = value.data_ptr<float>();
    for (int64_t i = 0; i < value.numel(); ++i) {
      pushed[i] = std::fma(static_cast<float>(weight), pushed[i] - current[i], current[i]);
    }
  }

  const Schedule schedule_ = *Schedule::Parse(kSchedule);
  Schedule::State state_;
  std::map<std::string, torch::Tensor> average_;
};

inline Attachment::Options WithEma() {
  Attachment::Options options;
  options.tracks = {{.name = "ema", .schedule = *Schedule::Parse(kSchedule)}};
  return options;
}

class TorchTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { torch::set_num_threads(1); }

  void SetUp() override {
    torch::manual_seed(1);
    StartServer(0);
    address_ = absl::StrCat("127.0.0.1:", server_->port());
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(address_));
  }

  void StartServer(int port) {
    ServerOptions options;
    options.listen = {absl::StrCat("127.0.0.1:", port)};
    options.device = "cpu";
    options.memory_bytes = int64_t{1} << 30;
    options.thread_count = 2;
    options.limits.session_timeout = absl::Seconds(3);
    options.data_dir = data_dir_;
    EMA_ASSERT_OK_AND_ASSIGN(server_, Server::Start(options));
  }
  // The same server, with a disk.
  void RestartWithDisk() {
    data_dir_ = testing::TempDir() + "/ema_torch_XXXXXX";
    ASSERT_NE(mkdtemp(data_dir_.data()), nullptr);
    const int port = server_->port();
    StopServer();
    StartServer(port);
  }
  void TearDown() override {
    server_ = nullptr;
    if (!data_dir_.empty()) std::filesystem::remove_all(data_dir_);
  }
  void StopServer() {
    ASSERT_THAT(server_->Drain(), IsOk());
    server_ = nullptr;
  }

  std::unique_ptr<Attachment> Attach(const torch::nn::Module& module,
                                     const Attachment::Options& options = WithEma()) {
    return AttachBy(*client_, module, options);
  }
  static std::unique_ptr<Attachment> AttachBy(Client& client, const torch::nn::Module& module,
                                              const Attachment::Options& options) {
    absl::StatusOr<std::unique_ptr<Attachment>> ema =
        Attachment::Create(client, "m", module, options);
    EXPECT_THAT(ema, IsOk());
    return ema.ok() ? *std::move(ema) : nullptr;
  }

  // The average of the newest version.
  std::map<std::string, torch::Tensor> Pulled() {
    Net net;
    EXPECT_THAT(PullInto(*client_, "m", net), IsOk());
    return CopyOf(net);
  }

  std::string data_dir_;
  std::unique_ptr<Server> server_;
  std::string address_;
  std::unique_ptr<Client> client_;
};

// A trainer: its steps are the same for equal weights.
struct Trainer {
  void Backward() {
    const torch::Tensor x = torch::sin(torch::arange(24) * 0.7 * static_cast<double>(++count));
    optimizer.zero_grad();
    net.forward(x.view({4, 6}).to(net.encoder->weight.scalar_type())).pow(2).sum().backward();
  }
  void Step(Attachment& ema) {
    Backward();
    ema.Step(optimizer);
  }

  Net net;
  torch::optim::SGD optimizer{net.parameters(), 0.0001};
  int64_t count = 0;
};

// Two layers that no buffer of a socket holds.
struct Large : torch::nn::Module {
  torch::nn::Linear held =
      register_module("held", torch::nn::Linear(torch::nn::LinearOptions(2048, 2048).bias(false)));
  torch::nn::Linear others = register_module(
      "others", torch::nn::Linear(torch::nn::LinearOptions(2048, 2048).bias(false)));
};

// A server that reads nothing for a while.
class StalledTorchTest : public TorchTest {
 protected:
  void SetUp() override {
    TorchTest::SetUp();
    proxy_ = std::make_unique<TcpProxy>(server_->port());
    Client::Options options;
    options.same_host_lane = false;
    EMA_ASSERT_OK_AND_ASSIGN(far_client_, Client::Create(proxy_->address(), options));
    large_.held->weight.mutable_grad() = torch::ones({2048, 2048});
  }

  std::unique_ptr<TcpProxy> proxy_;
  std::unique_ptr<Client> far_client_;
  Large large_;
  torch::optim::SGD optimizer_{large_.held->parameters(), 0.5};
};

}  // namespace ema

#endif  // EMA_TESTS_CLIENT_TORCH_TESTING_H_
