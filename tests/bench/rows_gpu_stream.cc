// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/bench/core_trainer.h"
#include "tests/bench/rows_gpu.h"

namespace ema::bench {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kChunkElements = (int64_t{1} << 20) / kFloatBytes;

// Streams that each fold a part of one model, from a chunk of host memory that is in the caches
// like bytes just received.
class Receiver {
 public:
  Receiver(const GpuBench& bench, int stream_count, int64_t elements)
      : device_(MakeAcceleratorDevice(bench.accelerator, {.slab_bytes = bench.slab_bytes})),
        current_(Must(device_->Allocate(elements * kFloatBytes))),
        next_(Must(device_->Allocate(elements * kFloatBytes))),
        chunk_(kChunkElements * kFloatBytes),
        elements_(elements) {
    for (int i = 0; i < stream_count; ++i) streams_.push_back(Must(device_->NewStream()));
    Must(streams_[0]->Zero(current_->data(), current_->size_bytes()));
    Must(streams_[0]->Synchronize());
  }

  // All of it, so many times.
  void Receive(int passes) {
    const auto count = static_cast<int64_t>(streams_.size());
    std::vector<std::jthread> threads;
    for (int64_t i = 0; i < count; ++i) {
      const auto fold = [this, i, count, passes] {
        for (int pass = 0; pass < passes; ++pass) {
          Fold(*streams_[i], elements_ * i / count, elements_ * (i + 1) / count);
        }
        Must(streams_[i]->Synchronize());
      };
      if (i + 1 < count) {
        threads.emplace_back(fold);
      } else {
        fold();  // One stream alone needs no thread.
      }
    }
  }

 private:
  void Fold(DeviceStream& stream, int64_t begin, int64_t end) const {
    for (int64_t at = begin; at < end;) {
      const int64_t run_end = std::min(end, (at / kChunkElements + 1) * kChunkElements);
      const FoldTarget target{.kind = FoldKind::kAverage,
                              .update_weight = 0.25,
                              .current = current_->data() + at * kFloatBytes,
                              .next = next_->data() + at * kFloatBytes};
      Must(stream.Fold({.source = chunk_.data() + at % kChunkElements * kFloatBytes,
                        .element_count = run_end - at,
                        .targets = {&target, 1}}));
      at = run_end;
    }
  }

  const std::unique_ptr<Device> device_;
  const std::shared_ptr<Block> current_;
  const std::shared_ptr<Block> next_;
  const Arena chunk_;
  const int64_t elements_;
  std::vector<std::unique_ptr<DeviceStream>> streams_;
};

}  // namespace

// One thread copies into pinned memory at a fraction of what the bus can do: as many receive as a
// server has threads by default.
void ReceiveBesideCopy(const GpuBench& bench, Row& row) {
  const int stream_count =
      bench.streams > 0 ? bench.streams
                        : std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / 2);
  row.name +=
      absl::StrCat(", ", stream_count, " streams, slabs of ", bench.slab_bytes >> 10, " KiB");
  const int64_t total_bytes = bench.parameters() * kFloatBytes;
  // A round of one would be milliseconds, of which starting the threads is a part.
  const int passes = bench.repeats;
  row.ours.gigabytes = row.peer.gigabytes = passes * Gigabytes(static_cast<size_t>(total_bytes));
  const auto receiver = std::make_shared<Receiver>(bench, stream_count, bench.parameters());
  row.ours = SpeedOf(row.ours, [receiver, passes] { receiver->Receive(passes); });

  const std::shared_ptr<BlockPool::Memory> pinned =
      Must(bench.accelerator->AllocatePinned(total_bytes));
  const std::shared_ptr<BlockPool::Memory> memory =
      Must(bench.accelerator->AllocateDevice(total_bytes));
  const std::shared_ptr<Accelerator::Queue> queue = Must(bench.accelerator->NewQueue());
  row.peer = SpeedOf(row.peer, [=] {
    for (int pass = 0; pass < passes; ++pass) {
      Must(queue->CopyToDevice(memory->data(), pinned->data(), total_bytes));
    }
    Must(queue->Mark(0));
    Must(queue->Wait(0));
  });
}

void SmallTensorsArriving(const GpuBench& bench, Row& row) {
  const auto pushes_of = [&bench](int64_t tensor_count) {
    const TrackConfig track{.name = "ema", .schedule = Must(Schedule::Parse("half_life=10ba"))};
    const CoreTrainer::Options options{
        .parameters = bench.small_tensors() * GpuBench::kSmallTensorElements,
        .tensor_count = tensor_count,
        .track = track,
        .device = MakeAcceleratorDevice(bench.accelerator, {})};
    const auto trainer = std::make_shared<CoreTrainer>(options);
    return [trainer] { trainer->CommitSeconds(); };
  };
  row.ours = TimeOf(row.ours, pushes_of(bench.small_tensors()));
  row.peer = TimeOf(row.peer, pushes_of(1));
}

}  // namespace ema::bench
