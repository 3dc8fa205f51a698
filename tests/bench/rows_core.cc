// SPDX-License-Identifier: Apache-2.0
//
// Commit and pin of a large model, in this process, by the server's own core: over a network the
// time from the last rank's commit message to the new version has the bytes before it in it, which
// take a thousand times as long as what is measured. So a model is pushed whole, chunk by chunk,
// and only the call that hands in the commit message is timed, to the call that says that the new
// version is there.
//
// Its 10^9 parameters are bfloat16 in a copy track: what a commit does depends on the number of
// chunks, blocks and tensors, and float32 would take 12 GB instead of 6.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/bench/core_trainer.h"
#include "tests/bench/rows.h"

namespace ema::bench {
namespace {

constexpr int64_t kSmallParameters = 1'000'000;

std::string ParametersText(int64_t parameters) {
  return absl::StrCat(parameters / 1'000'000, " million parameters");
}

std::shared_ptr<CoreTrainer> NewTrainer(int64_t parameters) {
  return std::make_shared<CoreTrainer>(
      CoreTrainer::Options{.parameters = parameters,
                           .dtype = Dtype::kBFloat16,
                           .track = {.name = "raw", .schedule = Must(Schedule::Parse("copy"))}});
}

Side CommitOf(int64_t parameters) {
  const std::shared_ptr<CoreTrainer> trainer = NewTrainer(parameters);
  return {.name = absl::StrCat(parameters, " parameters"),
          .run = [trainer] { return std::vector<double>{trainer->CommitSeconds() * 1e3}; }};
}

Side PinOf(int64_t parameters) {
  constexpr int kPins = 10'000;
  const std::shared_ptr<CoreTrainer> trainer = NewTrainer(parameters);
  return {.name = ParametersText(parameters), .run = [trainer] {
            std::vector<double> microseconds;
            for (int i = 0; i < kPins; ++i) microseconds.push_back(trainer->PinSeconds() * 1e6);
            return microseconds;
          }};
}

}  // namespace

Row LargeCommit(Bench& bench) {
  const int64_t parameters = bench.options().large_model_parameters;
  return {.key = "commit",
          .name = absl::StrCat("commit of ", ParametersText(parameters)),
          .unit = "ms",
          .ours = CommitOf(parameters),
          .peer = Limit(1),
          .goal = AtMost(1),
          .statistic = Statistic::kP99};
}

Row LargeCommitBesideSmall(Bench& bench) {
  const int64_t parameters = bench.options().large_model_parameters;
  return {.key = "commit_size",
          .name = absl::StrCat("commit of ", ParametersText(parameters)),
          .unit = "ms",
          .ours = CommitOf(parameters),
          .peer = CommitOf(kSmallParameters),
          .goal = AtMost(2)};
}

Row LargePinBesideSmall(Bench& bench) {
  const int64_t parameters = bench.options().large_model_parameters;
  return {.key = "pin_size",
          .name = absl::StrCat("pin of ", ParametersText(parameters)),
          .unit = "us",
          .ours = PinOf(parameters),
          .peer = PinOf(kSmallParameters),
          .goal = AtMost(2)};
}

}  // namespace ema::bench
