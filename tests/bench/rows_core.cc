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
#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/crc32c.h"
#include "server/core/model.h"
#include "server/core/model_store.h"
#include "tests/bench/rows.h"

namespace ema::bench {
namespace {

constexpr int64_t kSmallParameters = 1'000'000;
constexpr int64_t kTensors = 400;
constexpr int64_t kChunkBytes = int64_t{1} << 20;

std::string ParametersText(int64_t parameters) {
  return absl::StrCat(parameters / 1'000'000, " million parameters");
}

std::shared_ptr<const Manifest> NewManifest(int64_t parameters) {
  std::vector<TensorSpec> specs;
  for (int64_t i = 0; i < kTensors; ++i) {
    specs.push_back({absl::StrCat("layer", i), Dtype::kBFloat16, {parameters / kTensors}});
  }
  return std::make_shared<const Manifest>(Must(Manifest::Create(std::move(specs))));
}

std::shared_ptr<Model> NewModel(const std::shared_ptr<Device>& device, int64_t parameters) {
  ModelConfig config{.name = "model",
                     .manifest = NewManifest(parameters),
                     .tracks = {{.name = "raw", .schedule = Must(Schedule::Parse("copy"))}},
                     .max_pinned_versions = 1};
  const auto budget = std::make_shared<MemoryBudget>(config.MemoryBytes());
  return Must(Model::Create(std::move(config), device, budget, {}));
}

// One rank that pushes the same chunk for every part of its model.
class CoreTrainer {
 public:
  explicit CoreTrainer(int64_t parameters)
      : device_(MakeCpuDevice(std::numeric_limits<int64_t>::max())),
        model_(NewModel(device_, parameters)),
        chunk_(kChunkBytes) {
    std::vector<Shard> shards;
    for (int64_t i = 0; i < kTensors; ++i) shards.push_back(WholeTensor(model_->manifest(), i));
    RankLayout layout = Must(RankLayout::Create(model_->manifest(), std::move(shards)));
    total_bytes_ = layout.total_bytes();
    joined_ = Must(model_->JoinRun("bench", 0, 1, std::move(layout)));
    CommitSeconds();  // There is a version to pin from here on.
  }

  // Pushes a step and times its commit.
  double CommitSeconds() {
    ++step_;
    PushStart start{
        .run_epoch = joined_.run_epoch, .layout_digest = joined_.layout_digest, .step = step_};
    start.time.Set(TimeUnit::kBatch, static_cast<double>(step_));
    Clock::time_point visible;
    const std::unique_ptr<RankPush> push =
        Must(model_->OpenPush(start, [&visible](const absl::StatusOr<PushResult>& result) {
          visible = Clock::now();
          Must(result.status());
        }));
    const PushEnd end = AddChunks(*push);
    const Clock::time_point begin = Clock::now();
    Must(push->Commit(end));
    return std::chrono::duration<double>(visible - begin).count();
  }

  double PinSeconds() {
    SnapshotRef pinned;
    return SecondsOf([&] { pinned = Must(model_->PinVersion(0)); });
  }

 private:
  using Clock = std::chrono::steady_clock;

  PushEnd AddChunks(RankPush& push) {
    PushEnd end;
    uint32_t digest = 0;
    for (int64_t offset = 0; offset < total_bytes_; offset += kChunkBytes) {
      const int64_t size = std::min(kChunkBytes, total_bytes_ - offset);
      const std::span<const std::byte> piece = chunk_.bytes().first(static_cast<size_t>(size));
      const uint32_t crc32c = Crc32c(0, piece);
      Must(push.AddChunk({offset, crc32c, size}, {piece}));
      ++end.chunk_count;
      digest = Crc32cCombine(digest, crc32c, size);
    }
    end.digest = digest;
    end.total_bytes = total_bytes_;
    return end;
  }

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Model> model_;
  const Arena chunk_;
  int64_t total_bytes_ = 0;
  Model::JoinResult joined_;
  int64_t step_ = 0;
};

Side CommitOf(int64_t parameters) {
  const auto trainer = std::make_shared<CoreTrainer>(parameters);
  return {.name = absl::StrCat(parameters, " parameters"),
          .run = [trainer] { return std::vector<double>{trainer->CommitSeconds() * 1e3}; }};
}

Side PinOf(int64_t parameters) {
  constexpr int kPins = 10'000;
  const auto trainer = std::make_shared<CoreTrainer>(parameters);
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
