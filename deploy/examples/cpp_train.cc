// SPDX-License-Identifier: Apache-2.0
//
// Trains with LibTorch; the average is on an EMA Server, and pulled into a second module.
//
// Usage: cpp_train host:50051 MODEL
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdlib>
#include <iostream>

#include "ema/client.h"
#include "ema/schedule.h"
#include "ema/torch.h"

namespace {

constexpr int kSteps = 300;

struct Mlp : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return last(torch::tanh(hidden(x))); }

  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(8, 32));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(32, 1));
};

torch::Tensor Target(const torch::Tensor& x) { return torch::sin(x).sum(1, /*keepdim=*/true); }

double TestLoss(Mlp& mlp) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(2);
  const torch::Tensor x = torch::randn({2000, 8});
  return torch::nn::functional::mse_loss(mlp.forward(x), Target(x)).item<double>();
}

template <typename T>
T Get(absl::StatusOr<T> result) {
  if (!result.ok()) {
    std::cerr << result.status() << "\n";
    std::exit(1);
  }
  return *std::move(result);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: cpp_train host:50051 MODEL\n";
    return 2;
  }
  torch::manual_seed(1);
  Mlp mlp;
  torch::optim::SGD optimizer(mlp.parameters(), /*lr=*/0.2);

  const std::unique_ptr<ema::Client> client = Get(ema::Client::Create(argv[1]));
  ema::Attachment::Options options;
  options.tracks = {{.name = "ema", .schedule = Get(ema::Schedule::Parse("half_life=20ba"))}};
  options.existing = ema::StepPusher::Existing::kNew;  // A second training starts anew.
  const auto ema = Get(ema::Attachment::Create(*client, argv[2], mlp, options));

  for (int step = 0; step < kSteps; ++step) {
    const torch::Tensor x = torch::randn({16, 8});
    const torch::Tensor noise = 2 * torch::randn({16, 1});
    optimizer.zero_grad();
    torch::nn::functional::mse_loss(mlp.forward(x), Target(x) + noise).backward();
    ema->Step(optimizer);  // Instead of optimizer.step().
  }
  ema->Close();

  Mlp averaged;
  const ema::Version version = Get(ema::PullInto(*client, argv[2], averaged));
  std::cout << "version " << version.number << ", step " << version.step << "\n"
            << "trained: " << TestLoss(mlp) << "\n"
            << "averaged: " << TestLoss(averaged) << "\n";
}
