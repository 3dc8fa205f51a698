// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/bench/peers/python_peer.h"
#include "tests/bench/rows_gpu.h"

namespace ema::bench {
namespace {

using Memory = BlockPool::Memory;
using Queue = Accelerator::Queue;

constexpr int64_t kFloatBytes = sizeof(float);
constexpr int kTracks = 4;
// As python_peer.cc tells the peers.
constexpr int64_t kTensors = 400;

void Finish(Queue& queue) {
  Must(queue.Mark(0));
  Must(queue.Wait(0));
}

// Weights and averages of them in device memory, as equal tensors. They are no constant: multiples
// of 0.001.
class DeviceWeights {
 public:
  struct Shape {
    int64_t tensor_count = 1;
    int64_t tensor_elements = 0;  // Rounded down so that vectors are aligned.
    int track_count = 1;
  };
  DeviceWeights(const GpuBench& bench, const Shape& shape);

  // What folds them into the tracks [first_track, first_track + track_count).
  struct Launch {
    std::unique_ptr<Memory> memory;
    FoldTable table;
  };
  Launch NewLaunch(int first_track, int track_count) const;
  // Fills device memory with the weights, over and over.
  void CopyTo(std::byte* device, int64_t size_bytes) const;

 private:
  struct Track {
    std::unique_ptr<Memory> current;
    std::unique_ptr<Memory> next;
  };

  std::unique_ptr<Memory> NewFloats() const;

  const std::shared_ptr<Accelerator> accelerator_;
  const int64_t tensor_count_;
  const int64_t tensor_elements_;
  const std::unique_ptr<Queue> queue_;
  const std::unique_ptr<Memory> weights_;
  std::vector<Track> tracks_;
};

DeviceWeights::DeviceWeights(const GpuBench& bench, const Shape& shape)
    : accelerator_(bench.accelerator),
      tensor_count_(shape.tensor_count),
      tensor_elements_(shape.tensor_elements / kFoldVector * kFoldVector),
      queue_(Must(accelerator_->NewQueue())),
      weights_(NewFloats()) {
  for (int i = 0; i < shape.track_count; ++i) tracks_.push_back({NewFloats(), NewFloats()});
}

std::unique_ptr<Memory> DeviceWeights::NewFloats() const {
  constexpr int64_t kPieceBytes = int64_t{4} << 20;
  const int64_t total_bytes = tensor_count_ * tensor_elements_ * kFloatBytes;
  const std::unique_ptr<Memory> piece = Must(accelerator_->AllocatePinned(kPieceBytes));
  auto* const values = reinterpret_cast<float*>(piece->data());
  for (int64_t i = 0; i < kPieceBytes / kFloatBytes; ++i) {
    values[i] = static_cast<float>(i % 1000) * 0.001f;
  }
  std::unique_ptr<Memory> memory = Must(accelerator_->AllocateDevice(total_bytes));
  for (int64_t at = 0; at < total_bytes; at += kPieceBytes) {
    Must(queue_->CopyToDevice(memory->data() + at, piece->data(),
                              std::min(kPieceBytes, total_bytes - at)));
  }
  Finish(*queue_);
  return memory;
}

DeviceWeights::Launch DeviceWeights::NewLaunch(int first_track, int track_count) const {
  std::vector<FoldTile> tiles;
  std::vector<DeviceFoldTarget> targets;
  // Tensors share targets, as FoldBatch lets neighbours; but each has tiles of its own, as where
  // they come in another order.
  for (int track = first_track; track < first_track + track_count; ++track) {
    targets.push_back({.current = tracks_[track].current->data(),
                       .next = tracks_[track].next->data(),
                       .update_weight = 0.25,
                       .kind = FoldKind::kAverage});
  }
  for (int64_t i = 0; i < tensor_count_; ++i) {
    const int64_t first = i * tensor_elements_;
    ForEachFoldTile({.source = weights_->data() + first * kFloatBytes,
                     .target_offset = first,
                     .target_count = static_cast<uint8_t>(track_count),
                     .is_aligned = true},
                    tensor_elements_, [&](const FoldTile& tile) { tiles.push_back(tile); });
  }
  const size_t tiles_bytes = tiles.size() * sizeof(FoldTile);
  const size_t targets_bytes = targets.size() * sizeof(DeviceFoldTarget);
  const auto table_bytes = static_cast<int64_t>(tiles_bytes + targets_bytes);
  const std::unique_ptr<Memory> pinned = Must(accelerator_->AllocatePinned(table_bytes));
  std::memcpy(pinned->data(), tiles.data(), tiles_bytes);
  std::memcpy(pinned->data() + tiles_bytes, targets.data(), targets_bytes);
  std::unique_ptr<Memory> memory = Must(accelerator_->AllocateDevice(table_bytes));
  Must(queue_->CopyToDevice(memory->data(), pinned->data(), table_bytes));
  Finish(*queue_);
  const FoldTable table{
      .tiles = reinterpret_cast<const FoldTile*>(memory->data()),
      .targets = reinterpret_cast<const DeviceFoldTarget*>(memory->data() + tiles_bytes),
      .tile_count = static_cast<int64_t>(tiles.size())};
  return {std::move(memory), table};
}

void DeviceWeights::CopyTo(std::byte* device, int64_t size_bytes) const {
  const int64_t weights_bytes = tensor_count_ * tensor_elements_ * kFloatBytes;
  for (int64_t at = 0; at < size_bytes; at += weights_bytes) {
    Must(queue_->CopyOnDevice(device + at, weights_->data(),
                              std::min(weights_bytes, size_bytes - at)));
  }
  Finish(*queue_);
}

// What a side of a row times: folds of weights into `passes` times `tracks_a_pass` tracks.
std::function<void()> Folds(const GpuBench& bench, std::shared_ptr<const DeviceWeights> weights,
                            int passes, int tracks_a_pass) {
  const auto launches = std::make_shared<std::vector<DeviceWeights::Launch>>();
  for (int i = 0; i < passes; ++i) {
    launches->push_back(weights->NewLaunch(i * tracks_a_pass, tracks_a_pass));
  }
  const std::shared_ptr<Queue> queue = Must(bench.accelerator->NewQueue());
  return [weights = std::move(weights), launches, queue, repeats = bench.repeats] {
    for (int i = 0; i < repeats; ++i) {
      for (const DeviceWeights::Launch& launch : *launches) Must(queue->Fold(launch.table));
    }
    Finish(*queue);
  };
}

std::shared_ptr<const DeviceWeights> FourTrackWeights(const GpuBench& bench) {
  return std::make_shared<const DeviceWeights>(
      bench, DeviceWeights::Shape{.tensor_count = kTensors,
                                  .tensor_elements = bench.parameters() / kTensors,
                                  .track_count = kTracks});
}

// One pass into all tracks of `weights`, beside a copy on the device that moves as many bytes.
void PassBesideCopy(const GpuBench& bench, const std::shared_ptr<const DeviceWeights>& weights,
                    int tracks, Row& row) {
  // Weights and averages are read, averages written; of a copy each byte is read and written.
  const int64_t moved_bytes = (1 + 2 * tracks) * bench.parameters() * kFloatBytes;
  const int64_t copied_bytes = moved_bytes / 2;
  const int repeats = bench.repeats;
  row.ours.gigabytes = row.peer.gigabytes = repeats * Gigabytes(static_cast<size_t>(moved_bytes));
  row.ours = SpeedOf(row.ours, Folds(bench, weights, 1, tracks));
  const std::shared_ptr<Memory> from = Must(bench.accelerator->AllocateDevice(copied_bytes));
  const std::shared_ptr<Memory> to = Must(bench.accelerator->AllocateDevice(copied_bytes));
  const std::shared_ptr<Queue> queue = Must(bench.accelerator->NewQueue());
  // Of the same values: memory may be faster with zeros.
  weights->CopyTo(from->data(), copied_bytes);
  row.peer = SpeedOf(row.peer, [=] {
    for (int i = 0; i < repeats; ++i) {
      Must(queue->CopyOnDevice(to->data(), from->data(), copied_bytes));
    }
    Finish(*queue);
  });
}

void FourTracksBesideTorch(const GpuBench& bench, const std::string& by, Row& row) {
  row.ours = TimeOf(row.ours, Folds(bench, FourTrackWeights(bench), 1, kTracks));
  if (bench.options.python.empty()) {
    row.missing = "peer: no Python with torch was named";
    return;
  }
  const auto peer = std::make_shared<PythonPeer>(
      bench.options, "foreach_peer.py", bench.options.megabytes,
      std::vector<std::string>{"--by", by, "--tracks", absl::StrCat(kTracks), "--repeats",
                               absl::StrCat(bench.repeats)});
  row.peer.run = [peer] { return std::vector<double>{peer->RunRound()}; };
}

}  // namespace

void FoldBesideCopy(const GpuBench& bench, Row& row) {
  PassBesideCopy(bench,
                 std::make_shared<const DeviceWeights>(
                     bench, DeviceWeights::Shape{.tensor_elements = bench.parameters()}),
                 1, row);
}

void FourTracksBesideCopy(const GpuBench& bench, Row& row) {
  PassBesideCopy(bench, FourTrackWeights(bench), kTracks, row);
}

void FourTracksAtOnce(const GpuBench& bench, Row& row) {
  const std::shared_ptr<const DeviceWeights> weights = FourTrackWeights(bench);
  row.ours = TimeOf(row.ours, Folds(bench, weights, 1, kTracks));
  row.peer = TimeOf(row.peer, Folds(bench, weights, kTracks, 1));
}

void FourTracksBesideForeach(const GpuBench& bench, Row& row) {
  FourTracksBesideTorch(bench, "foreach", row);
}

void FourTracksBesideLoop(const GpuBench& bench, Row& row) {
  FourTracksBesideTorch(bench, "loop", row);
}

void SmallTensorsInOneTable(const GpuBench& bench, Row& row) {
  const auto folds_of = [&bench](const DeviceWeights::Shape& shape) {
    return Folds(bench, std::make_shared<const DeviceWeights>(bench, shape), 1, 1);
  };
  constexpr int64_t kElements = GpuBench::kSmallTensorElements;
  row.ours = TimeOf(row.ours, folds_of({bench.small_tensors(), kElements}));
  row.peer = TimeOf(row.peer, folds_of({1, bench.small_tensors() * kElements}));
}

}  // namespace ema::bench
