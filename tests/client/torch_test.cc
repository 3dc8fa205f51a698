// SPDX-License-Identifier: Apache-2.0
//
// Modules that train and are pulled into, against a real server. What is averaged is compared bit
// for bit with the definition, fma(w, p - average, average), with the schedule's own weights.
#include "ema/torch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/server.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kSchedule[] = "half_life=4ba, update_interval=2ba";
// What a test waits for something that comes; it fails after that.
constexpr absl::Duration kPatience = absl::Seconds(60);

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
constexpr int64_t kFrozenBytes = int64_t{5} * 400 * 4;

std::map<std::string, torch::Tensor> TensorsOf(const torch::nn::Module& module) {
  std::map<std::string, torch::Tensor> result;
  for (const auto& item : module.named_parameters()) result[item.key()] = item.value().detach();
  for (const auto& item : module.named_buffers()) result[item.key()] = item.value().detach();
  return result;
}

std::map<std::string, torch::Tensor> CopyOf(const torch::nn::Module& module) {
  std::map<std::string, torch::Tensor> result = TensorsOf(module);
  for (auto& [name, tensor] : result) tensor = tensor.clone();
  return result;
}

// The names of those that differ in a bit or in their dtype, or that only one has.
std::vector<std::string> Differences(const std::map<std::string, torch::Tensor>& a,
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

void CopyInto(torch::nn::Module& module, const torch::nn::Module& from) {
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

Attachment::Options WithEma() {
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
    options.session_timeout = absl::Seconds(3);
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

TEST_F(TorchTest, AveragesAreThoseOfTheDefinition) {
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  Reference reference;
  for (int64_t step = 1; step <= 40; ++step) {
    trainer.Step(*ema);
    EXPECT_EQ(ema->step(), step);
    reference.Step(step, trainer.net);
  }
  ema->Close();
  EXPECT_EQ(ema->stats().pushes, 21);
  EXPECT_EQ(ema->stats().skipped, 0);
  EXPECT_THAT(ema->stats().last_error, IsOk());
  ASSERT_TRUE(ema->version().has_value());
  EXPECT_EQ(ema->version()->step, 40);

  EXPECT_THAT(Differences(Pulled(), reference.average()), IsEmpty());
  EXPECT_FALSE(torch::equal(reference.average().at("encoder.weight"), trainer.net.encoder->weight));
}

TEST_F(TorchTest, TheServerKnowsBuffersTiedAndFrozenTensors) {
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo info, client_->GetModel("m"));
  EXPECT_EQ(info.manifest.tensor_count(), 9);
  const TensorSpec& tied = info.manifest.tensor(*info.manifest.Find("hidden.weight"));
  EXPECT_THAT(tied.aliases, ElementsAre("again.weight"));
  EXPECT_FALSE(tied.is_buffer);
  EXPECT_TRUE(info.manifest.tensor(*info.manifest.Find("norm.running_mean")).is_buffer);
  EXPECT_EQ(info.manifest.tensor(*info.manifest.Find("norm.num_batches_tracked")).dtype,
            Dtype::kInt64);

  Reference reference;
  for (int64_t step = 1; step <= 20; ++step) {
    trainer.Step(*ema);
    reference.Step(step, trainer.net);
  }
  EXPECT_THAT(ema->WaitPushed(), IsOk());
  // Eleven pushes, and the frozen layer in one of them.
  EXPECT_LT(ema->stats().sent_bytes, 2 * kFrozenBytes);

  ema->WaitReleased();
  {
    const torch::NoGradGuard no_grad;
    trainer.net.frozen->weight.mul_(-3);
  }
  for (int64_t step = 21; step <= 24; ++step) {
    trainer.Step(*ema);
    reference.Step(step, trainer.net);
  }
  ema->Close();
  EXPECT_THAT(Differences(Pulled(), reference.average()), IsEmpty());
}

TEST_F(TorchTest, RanksSendEvenShares) {
  Trainer trainers[2];
  CopyInto(trainers[1].net, trainers[0].net);
  StepPusher::Stats stats[2];
  Reference reference;
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Attachment::Options options = WithEma();
      options.launch_id = "launch";
      options.rank = rank;
      options.world_size = 2;
      const auto ema = Attach(trainers[rank].net, options);
      ASSERT_NE(ema, nullptr);
      for (int64_t step = 1; step <= 20; ++step) {
        trainers[rank].Backward();
        // Those of rank 0 count.
        if (rank == 1) trainers[rank].net.norm->running_mean.fill_(100);
        ema->Step(trainers[rank].optimizer);
        if (rank == 0) reference.Step(step, trainers[rank].net);
      }
      ema->Close();
      EXPECT_EQ(ema->step(), 20);
      stats[rank] = ema->stats();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const StepPusher::Stats& of_rank : stats) {
    EXPECT_EQ(of_rank.pushes, 11) << of_rank.last_error;
    EXPECT_EQ(of_rank.skipped, 0);
  }
  // At each push within an element, and one of what is not frozen.
  EXPECT_LE(std::abs(stats[0].sent_bytes - stats[1].sent_bytes), 11 * 16);
  EXPECT_THAT(Differences(Pulled(), reference.average()), IsEmpty());
}

TEST_F(TorchTest, RunsThatLackALaunchAreRefused) {
  Net net;
  Attachment::Options options = WithEma();
  options.world_size = 2;
  EXPECT_THAT(Attachment::Create(*client_, "m", net, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("launch_id is empty")));
  EXPECT_THAT(client_->GetModel("m"), ReasonIs(ErrorReason::kModelNotFound));
}

TEST_F(TorchTest, TrainingGoesOnWithoutTheServerAndThenWithIt) {
  Trainer trainer;
  std::vector<int64_t> told;
  Attachment::Options options = WithEma();
  options.on_skip = [&](int64_t step, const absl::Status&) { told.push_back(step); };
  const auto ema = Attach(trainer.net, options);
  for (int i = 0; i < 6; ++i) trainer.Step(*ema);
  ASSERT_THAT(ema->WaitPushed(), IsOk());
  EXPECT_EQ(ema->version()->step, 6);

  const int port = server_->port();
  StopServer();
  for (int i = 0; i < 20; ++i) trainer.Step(*ema);
  EXPECT_EQ(ema->step(), 26);
  EXPECT_TRUE(ema->stats().is_away);
  EXPECT_GT(ema->stats().skipped, 5);
  EXPECT_THAT(told, ElementsAre(8));
  EXPECT_THAT(ema->stats().last_error, Not(IsOk()));

  // One that has forgotten the model: its first version is what was pushed then.
  StartServer(port);
  const int64_t pushes_before = ema->stats().pushes;
  const absl::Time give_up = absl::Now() + kPatience;
  while (ema->stats().pushes == pushes_before && absl::Now() < give_up) {
    trainer.Step(*ema);
    ASSERT_THAT(ema->WaitPushed(), IsOk());
  }
  ASSERT_GT(ema->stats().pushes, pushes_before) << ema->stats().last_error;
  EXPECT_FALSE(ema->stats().is_away);
  EXPECT_EQ(ema->version()->number, 1);
  EXPECT_EQ(ema->version()->step, ema->step());
  EXPECT_THAT(Differences(Pulled(), TensorsOf(trainer.net)), IsEmpty());
}

TEST_F(TorchTest, RanksMeetAgainAfterARestart) {
  Trainer trainers[2];
  CopyInto(trainers[1].net, trainers[0].net);
  const int port = server_->port();
  const absl::Time give_up = absl::Now() + kPatience;
  std::atomic<int> met = 0;
  std::atomic<bool> restarted = false;
  std::atomic<bool> stop = false;
  // Ranks step together, as gradients that are summed make them.
  std::barrier stepped(2, [&]() noexcept {
    if (!restarted.exchange(true)) {
      StopServer();
      StartServer(port);
    }
    stop = met == 2 || absl::Now() > give_up;
  });
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Attachment::Options options = WithEma();
      options.launch_id = "launch";
      options.rank = rank;
      options.world_size = 2;
      const auto ema = Attach(trainers[rank].net, options);
      trainers[rank].Step(*ema);
      EXPECT_THAT(ema->WaitPushed(), IsOk());
      EXPECT_EQ(ema->stats().pushes, 1);
      stepped.arrive_and_wait();
      bool has_met = false;
      while (!stop) {
        trainers[rank].Step(*ema);
        if (!has_met && ema->stats().pushes > 1) {
          has_met = true;
          ++met;
        }
        stepped.arrive_and_wait();
      }
      EXPECT_TRUE(has_met) << ema->stats().last_error;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo info, client_->GetModel("m"));
  EXPECT_GE(info.latest->number, 1);
}

TEST_F(TorchTest, ANewerRunTakesOver) {
  Trainer trainer;
  const auto older = Attach(trainer.net);
  trainer.Step(*older);
  ASSERT_THAT(older->WaitPushed(), IsOk());
  Trainer next;
  const auto newer = Attach(next.net);
  EXPECT_EQ(newer->step(), 1);
  trainer.Step(*older);
  ASSERT_THAT(older->WaitPushed(), IsOk());
  EXPECT_EQ(older->stats().pushes, 1);
  EXPECT_THAT(older->stats().last_error, ReasonIs(ErrorReason::kFenced));
  next.Step(*newer);
  ASSERT_THAT(newer->WaitPushed(), IsOk());
  EXPECT_EQ(newer->stats().pushes, 1) << newer->stats().last_error;
  EXPECT_EQ(newer->version()->step, 2);
}

TEST_F(TorchTest, ResumesWhereTheTrainerStands) {
  RestartWithDisk();
  Trainer trainer;
  Reference reference;
  std::optional<Version> at_6;
  {
    const auto ema = Attach(trainer.net);
    for (int64_t step = 1; step <= 6; ++step) {
      trainer.Step(*ema);
      reference.Step(step, trainer.net);
    }
    EMA_ASSERT_OK_AND_ASSIGN(at_6, ema->WaitPushed());
    ASSERT_THAT(client_->CreateCheckpoint("m"), IsOk());
    // What the checkpoint of the trainer does not have.
    Trainer strayed;
    for (int i = 0; i < 2; ++i) strayed.Step(*ema);
  }
  ASSERT_TRUE(at_6.has_value());
  Attachment::Options options = WithEma();
  options.resume = {.step = 6, .version = VersionId{at_6->number, at_6->incarnation}};
  const auto ema = Attach(trainer.net, options);
  EXPECT_EQ(ema->step(), 6);
  for (int64_t step = 7; step <= 10; ++step) {
    trainer.Step(*ema);
    reference.Step(step, trainer.net);
  }
  ema->Close();
  EXPECT_THAT(Differences(Pulled(), reference.average()), IsEmpty());

  options.resume->version->version = 99;
  EXPECT_THAT(Attachment::Create(*client_, "m", trainer.net, options), Not(IsOk()));
  options.start_step = 6;
  EXPECT_THAT(Attachment::Create(*client_, "m", trainer.net, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("start_step 6 and resume")));
  // A model that is gone is not made anew.
  ASSERT_THAT(client_->DeleteModel("m"), IsOk());
  options.start_step.reset();
  EXPECT_THAT(Attachment::Create(*client_, "m", trainer.net, options),
              ReasonIs(ErrorReason::kModelNotFound));
  EXPECT_THAT(client_->GetModel("m"), ReasonIs(ErrorReason::kModelNotFound));
}

TEST_F(TorchTest, AClosureRunsInsideTheStep) {
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  Reference reference;
  for (int64_t step = 1; step <= 10; ++step) {
    const torch::Tensor loss = ema->Step(trainer.optimizer, [&] {
      trainer.Backward();
      return torch::tensor(static_cast<double>(step));
    });
    EXPECT_EQ(loss.item<double>(), static_cast<double>(step));
    reference.Step(step, trainer.net);
  }
  ema->Close();
  EXPECT_THAT(Differences(Pulled(), reference.average()), IsEmpty());
}

TEST_F(TorchTest, LoopsOfAnotherKindCountTheirSteps) {
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  Reference reference;
  for (int64_t step = 1; step <= 10; ++step) {
    trainer.Backward();
    ema->WaitReleased();
    trainer.optimizer.step();
    ema->AfterStep();
    reference.Step(step, trainer.net);
  }
  ema->Close();
  EXPECT_THAT(Differences(Pulled(), reference.average()), IsEmpty());
}

TEST_F(TorchTest, TensorsThatEveryTrackIgnoresAreNotSent) {
  Trainer trainer;
  Attachment::Options options = WithEma();
  options.tracks[0].tensor_rules = {{"encoder.*", TensorAction::kIgnore}};
  const auto ema = Attach(trainer.net, options);
  Reference reference;
  for (int64_t step = 1; step <= 4; ++step) {
    trainer.Step(*ema);
    reference.Step(step, trainer.net);
  }
  ema->Close();
  Net net;
  const std::map<std::string, torch::Tensor> before = CopyOf(net);
  EXPECT_THAT(PullInto(*client_, "m", net),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("missing: encoder.weight")));
  EXPECT_THAT(Differences(TensorsOf(net), before), IsEmpty());
  EXPECT_THAT(PullInto(*client_, "m", net, {.strict = false}), IsOk());
  EXPECT_TRUE(torch::equal(net.encoder->weight, before.at("encoder.weight")));
  EXPECT_TRUE(torch::equal(net.hidden->weight, reference.average().at("hidden.weight")));
}

TEST_F(TorchTest, ModulesOfAnotherDtypeAreAveragedInFloat32AndPulledInTheirOwn) {
  Trainer trainer;
  trainer.net.to(torch::kBFloat16);
  const auto ema = Attach(trainer.net);
  Reference reference;
  for (int64_t step = 1; step <= 10; ++step) {
    trainer.Step(*ema);
    reference.Step(step, trainer.net);
  }
  ema->Close();
  Net full;
  full.to(torch::kFloat32);
  ASSERT_THAT(PullInto(*client_, "m", full), IsOk());
  EXPECT_TRUE(torch::equal(full.encoder->weight, reference.average().at("encoder.weight")));

  std::map<std::string, torch::Tensor> rounded = reference.average();
  for (auto& [name, tensor] : rounded) tensor = tensor.to(TensorsOf(trainer.net).at(name).dtype());
  const void* const data = trainer.net.encoder->weight.const_data_ptr();
  ASSERT_THAT(PullInto(*client_, "m", trainer.net), IsOk());
  EXPECT_THAT(Differences(TensorsOf(trainer.net), rounded), IsEmpty());
  EXPECT_EQ(trainer.net.encoder->weight.const_data_ptr(), data);
  EXPECT_TRUE(trainer.net.encoder->weight.requires_grad());
}

// What of Net another module may have.
struct Other : torch::nn::Module {
  explicit Other(int64_t width) { register_module("encoder", torch::nn::Linear(6, width)); }
};

TEST_F(TorchTest, PullIntoNamesAllThatDoesNotFitAndChangesNothing) {
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  trainer.Step(*ema);
  ema->Close();

  Other other(5);
  const std::map<std::string, torch::Tensor> before = CopyOf(other);
  EXPECT_THAT(PullInto(*client_, "m", other),
              AllOf(ReasonIs(ErrorReason::kBadLayout),
                    StatusIs(absl::StatusCode::kInvalidArgument,
                             AllOf(StartsWith("model \"m\", track \"ema\": "),
                                   HasSubstr("missing: encoder.bias; unexpected: "),
                                   HasSubstr("hidden.weight"), HasSubstr("norm.running_var")))));
  EXPECT_THAT(Differences(TensorsOf(other), before), IsEmpty());
  EXPECT_THAT(PullInto(*client_, "m", other, {.strict = false}), IsOk());
  EXPECT_THAT(Differences(TensorsOf(other), before), ElementsAre("encoder.weight"));
  EXPECT_TRUE(torch::equal(TensorsOf(other).at("encoder.weight"), trainer.net.encoder->weight));

  Other narrow(3);
  const std::map<std::string, torch::Tensor> narrow_before = CopyOf(narrow);
  EXPECT_THAT(
      PullInto(*client_, "m", narrow, {.strict = false}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("encoder.weight: float32[5, 6] there, float32[3, 6] in the module")));
  EXPECT_THAT(Differences(TensorsOf(narrow), narrow_before), IsEmpty());
}

TEST_F(TorchTest, PullIntoTakesTheVersionThatIsAskedFor) {
  RestartWithDisk();
  Trainer trainer;
  Attachment::Options options = WithEma();
  options.tracks.push_back({.name = "raw", .schedule = *Schedule::Parse("copy")});
  const auto ema = Attach(trainer.net, options);
  trainer.Step(*ema);
  ASSERT_THAT(ema->WaitPushed(), IsOk());
  ASSERT_THAT(client_->SetLabel("m", "first"), IsOk());
  const std::map<std::string, torch::Tensor> first = CopyOf(trainer.net);
  trainer.Step(*ema);
  ema->Close();

  for (const PullIntoOptions& older : {PullIntoOptions{.track = "raw", .version = 1},
                                       PullIntoOptions{.track = "raw", .label = "first"}}) {
    Net net;
    EMA_ASSERT_OK_AND_ASSIGN(const Version version, PullInto(*client_, "m", net, older));
    EXPECT_EQ(version.step, 1);
    EXPECT_THAT(Differences(TensorsOf(net), first), IsEmpty());
  }
  Net net;
  EMA_ASSERT_OK_AND_ASSIGN(const Version newest, PullInto(*client_, "m", net, {.track = "raw"}));
  EXPECT_EQ(newest.step, 2);
  EXPECT_THAT(Differences(TensorsOf(net), TensorsOf(trainer.net)), IsEmpty());

  const std::map<std::string, torch::Tensor> before = CopyOf(net);
  EXPECT_THAT(PullInto(*client_, "m", net, {.track = "none"}),
              ReasonIs(ErrorReason::kTrackNotFound));
  EXPECT_THAT(PullInto(*client_, "m", net, {.version = 9}), ReasonIs(ErrorReason::kVersionNotYet));
  EXPECT_THAT(PullInto(*client_, "m", net, {.label = "best"}),
              ReasonIs(ErrorReason::kLabelNotFound));
  EXPECT_THAT(Differences(TensorsOf(net), before), IsEmpty());
}

TEST_F(TorchTest, TensorsThatTheServerCannotKeepAreNamed) {
  Net net;
  net.register_buffer("phase", torch::zeros({2}, torch::kComplexFloat));
  EXPECT_THAT(Attachment::Create(*client_, "m", net, WithEma()),
              AllOf(ReasonIs(ErrorReason::kBadManifest),
                    StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("tensor \"phase\""))));
  EXPECT_THAT(PullInto(*client_, "m", net), ReasonIs(ErrorReason::kBadManifest));
}

TEST_F(TorchTest, AModuleThatChangesIsNotPushedAndTheStepCounted) {
  Trainer trainer;
  const auto ema = Attach(trainer.net);
  trainer.Step(*ema);
  ASSERT_THAT(ema->WaitPushed(), IsOk());
  trainer.net.register_buffer("late", torch::zeros({2}));
  trainer.Step(*ema);
  EXPECT_EQ(ema->stats().skipped, 1);
  EXPECT_THAT(ema->stats().last_error,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not as it was attached")));
}

TEST_F(TorchTest, TheExampleRuns) {
  const std::string command = absl::StrCat(EMA_CPP_TRAIN_BINARY, " ", address_, " mlp");
  FILE* const output = popen(command.c_str(), "r");
  ASSERT_NE(output, nullptr);
  int version = 0;
  int step = 0;
  double trained = 0;
  double averaged = 0;
  EXPECT_EQ(fscanf(output, "version %d, step %d trained: %lf averaged: %lf", &version, &step,
                   &trained, &averaged),
            4);
  EXPECT_EQ(pclose(output), 0);
  EXPECT_EQ(step, 300);
  EXPECT_LT(averaged, trained);
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo info, client_->GetModel("mlp"));
  EXPECT_EQ(info.latest->number, version);
}

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

TEST_F(StalledTorchTest, WhatTheOptimizerDoesNotHoldIsCopied) {
  const auto ema = AttachBy(*far_client_, large_, WithEma());
  proxy_->SetStalled(true);
  ema->Step(optimizer_);
  const std::map<std::string, torch::Tensor> pushed = CopyOf(large_);
  {
    const torch::NoGradGuard no_grad;
    large_.others->weight.fill_(7);
  }
  proxy_->SetStalled(false);
  ema->Close();
  EXPECT_EQ(ema->stats().pushes, 1) << ema->stats().last_error;
  Large average;
  ASSERT_THAT(PullInto(*client_, "m", average), IsOk());
  EXPECT_THAT(Differences(TensorsOf(average), pushed), IsEmpty());
}

TEST_F(StalledTorchTest, AStepWaitsNoLongerThanMaxWaitAndGivesThePushUp) {
  Attachment::Options options = WithEma();
  options.max_wait = absl::Milliseconds(50);
  const auto ema = AttachBy(*far_client_, large_, options);
  proxy_->SetStalled(true);
  ema->Step(optimizer_);
  ema->Step(optimizer_);
  EXPECT_EQ(ema->stats().pushes, 0);
  EXPECT_GE(ema->stats().skipped, 1);
  EXPECT_THAT(ema->stats().last_error, Not(IsOk()));
  EXPECT_EQ(ema->step(), 2);
  proxy_->SetStalled(false);
  ema->Close();
}

TEST_F(StalledTorchTest, APullThatEndsEarlyChangesNothing) {
  const auto ema = AttachBy(*client_, large_, WithEma());
  ema->Step(optimizer_);
  ema->Close();
  Large into;
  const std::map<std::string, torch::Tensor> before = CopyOf(into);
  proxy_->SetTrickle(1000);
  EXPECT_THAT(PullInto(*far_client_, "m", into, {.timeout = absl::Milliseconds(300)}),
              StatusIs(absl::StatusCode::kDeadlineExceeded, testing::_));
  EXPECT_THAT(Differences(TensorsOf(into), before), IsEmpty());
  proxy_->SetTrickle(0);
  EXPECT_THAT(PullInto(*far_client_, "m", into), IsOk());
  EXPECT_THAT(Differences(TensorsOf(into), TensorsOf(large_)), IsEmpty());
}

}  // namespace
}  // namespace ema
