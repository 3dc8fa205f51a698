// SPDX-License-Identifier: Apache-2.0
//
// Averages that are pulled into modules, and tensors that do not fit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tests/client/torch_testing.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

// What of Net another module may have.
struct Other : torch::nn::Module {
  explicit Other(int64_t width) { register_module("encoder", torch::nn::Linear(6, width)); }
};

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
  // Readers learn from it that no track has them.
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo info, client_->GetModel("m"));
  EXPECT_EQ(info.tracks[0].tensor_rules, options.tracks[0].tensor_rules);
  Net net;
  const std::map<std::string, torch::Tensor> before = CopyOf(net);
  EXPECT_THAT(PullInto(*client_, "m", net),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("missing: encoder.weight")));
  EXPECT_THAT(Differences(TensorsOf(net), before), IsEmpty());
  EXPECT_THAT(PullInto(*client_, "m", net, {.strict = false}), IsOk());
  EXPECT_TRUE(torch::equal(net.encoder->weight, before.at("encoder.weight")));
  EXPECT_TRUE(torch::equal(net.hidden->weight, reference.average().at("hidden.weight")));
}

// LibTorch does not write to a tensor whose elements share memory: no other may have been written.
TEST_F(TorchTest, AModuleThatCannotBeWrittenStaysAsItWas) {
  // By name, size or place, another one comes before the one that is refused.
  struct Expanded : torch::nn::Module {
    explicit Expanded(bool is_expanded) {
      const torch::Tensor one = torch::ones({1});
      register_buffer("a", torch::ones({1}));
      register_buffer("m", is_expanded ? one.expand({4}) : one.repeat({4}));
      register_buffer("z", torch::ones({100}));
    }
  };
  Expanded pushed(/*is_expanded=*/false);
  const auto ema = Attach(pushed);
  ema->WaitReleased();
  for (at::Tensor buffer : pushed.buffers()) buffer.fill_(2);
  ema->AfterStep();
  ema->Close();
  Expanded module(/*is_expanded=*/true);
  EXPECT_THAT(PullInto(*client_, "m", module),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("memory")));
  for (const at::Tensor& buffer : module.buffers()) {
    EXPECT_TRUE(torch::equal(buffer, torch::ones_like(buffer)));
  }
  ASSERT_THAT(PullInto(*client_, "m", pushed), IsOk());
}

TEST_F(TorchTest, AValueThatIsTooLargeForTheModulesDtypeIsTreatedAsTheOptionsSay) {
  struct Two : torch::nn::Module {
    explicit Two(float last) {
      register_buffer("a", torch::ones({3}));
      register_buffer("z", torch::tensor({{1.0F, last}, {2.0F, 3.0F}}));
    }
  };
  Two pushed(-1e5F);
  const auto ema = Attach(pushed);
  ema->AfterStep();
  ema->Close();
  Two module(2);
  module.to(torch::kFloat16);
  EXPECT_THAT(PullInto(*client_, "m", module),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("element 1 of tensor \"z\" is -100000, and Half in the module "
                                 "ends at 65504")));
  EXPECT_EQ(module.buffers()[1][0][1].item<float>(), 2);
  ASSERT_THAT(PullInto(*client_, "m", module, {.overflow = OverflowPolicy::kSaturate}), IsOk());
  EXPECT_EQ(module.buffers()[1][0][1].item<float>(), -65504);
  ASSERT_THAT(PullInto(*client_, "m", module, {.overflow = OverflowPolicy::kInfinity}), IsOk());
  EXPECT_EQ(module.buffers()[1][0][1].item<float>(), -INFINITY);
  module.to(torch::kBFloat16);
  EXPECT_THAT(PullInto(*client_, "m", module), IsOk());
}

// Nor does it write to a tensor of inference mode outside of it.
TEST_F(TorchTest, AModuleOfInferenceModeIsWrittenOnlyInIt) {
  struct Two : torch::nn::Module {
    explicit Two(bool is_of_inference) {
      register_buffer("a", torch::ones({3}));
      const c10::InferenceMode inference(is_of_inference);
      register_buffer("z", torch::ones({3}));
    }
  };
  Two pushed(/*is_of_inference=*/false);
  for (at::Tensor buffer : pushed.buffers()) buffer.fill_(2);
  const auto ema = Attach(pushed);
  ema->AfterStep();
  ema->Close();
  Two module(/*is_of_inference=*/true);
  EXPECT_THAT(PullInto(*client_, "m", module),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("\"z\" was created in inference")));
  EXPECT_TRUE(torch::equal(module.buffers()[0], torch::ones({3})));
  const c10::InferenceMode inference;
  ASSERT_THAT(PullInto(*client_, "m", module), IsOk());
  for (const at::Tensor& buffer : module.buffers()) {
    EXPECT_TRUE(torch::equal(buffer, torch::full({3}, 2.0F)));
  }
}

TEST_F(TorchTest, ARuleThatIgnoresNothingIsRefused) {
  Attachment::Options options = WithEma();
  options.tracks[0].tensor_rules = {{"encodre.*", TensorAction::kIgnore}};
  EXPECT_THAT(Attachment::Create(*client_, "m", Net(), options).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("pattern \"encodre.*\" matches no tensor")));
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
