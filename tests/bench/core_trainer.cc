// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/core_trainer.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/crc32c.h"
#include "server/core/model_store.h"

namespace ema::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kChunkBytes = int64_t{1} << 20;

std::shared_ptr<const Manifest> NewManifest(const CoreTrainer::Options& options) {
  std::vector<TensorSpec> specs;
  for (int64_t i = 0; i < options.tensor_count; ++i) {
    specs.push_back(
        {absl::StrCat("layer", i), options.dtype, {options.parameters / options.tensor_count}});
  }
  return std::make_shared<const Manifest>(Must(Manifest::Create(std::move(specs))));
}

std::shared_ptr<Model> NewModel(const CoreTrainer::Options& options) {
  ModelConfig config{.name = "model",
                     .manifest = NewManifest(options),
                     .tracks = {options.track},
                     .max_pinned_versions = 1};
  const auto budget = std::make_shared<MemoryBudget>(std::numeric_limits<int64_t>::max());
  std::shared_ptr<Device> device = options.device;
  if (device == nullptr) device = MakeCpuDevice(std::numeric_limits<int64_t>::max());
  const Model::Options model_options;
  const auto tracks = Must(MakeTracks(config.tracks, *config.manifest, *budget));
  return Must(Model::Create(std::move(config), tracks, std::move(device), budget, model_options));
}

}  // namespace

CoreTrainer::CoreTrainer(const Options& options) : model_(NewModel(options)), chunk_(kChunkBytes) {
  // Finite in every dtype, and nothing that a disk could shorten.
  for (size_t i = 0; i < chunk_.size(); ++i) {
    chunk_.data()[i] = static_cast<std::byte>(i * 2654435761U >> 24 & 0x3f);
  }
  std::vector<Shard> shards;
  for (int64_t i = 0; i < options.tensor_count; ++i) {
    shards.push_back(WholeTensor(model_->manifest(), i));
  }
  RankLayout layout = Must(RankLayout::Create(model_->manifest(), std::move(shards)));
  total_bytes_ = layout.total_bytes();
  joined_ = Must(model_->JoinRun({"bench"}, 0, 1, std::move(layout)));
  CommitSeconds();
}

double CoreTrainer::CommitSeconds() {
  ++step_;
  const PushStart start{.run_epoch = joined_.run_epoch,
                        .layout_digest = joined_.layout_digest,
                        .step = step_,
                        .time = TrainingTime::AtBatch(step_)};
  Clock::time_point visible;
  const std::unique_ptr<RankPush> push =
      Must(model_->OpenPush(start, [&visible](const absl::StatusOr<PushResult>& result) {
        visible = Clock::now();
        Must(result.status());
      }));
  const PushTotals end = AddChunks(*push);
  const Clock::time_point begin = Clock::now();
  Must(push->Commit(end));
  return std::chrono::duration<double>(visible - begin).count();
}

double CoreTrainer::PinSeconds() {
  SnapshotRef pinned;
  return SecondsOf([&] { pinned = Must(model_->history().Pin(0)); });
}

PushTotals CoreTrainer::AddChunks(RankPush& push) {
  PushTotals end;
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

}  // namespace ema::bench
