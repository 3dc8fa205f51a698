// SPDX-License-Identifier: Apache-2.0
#include "server/device/accelerator_device.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "ema/internal/status_macros.h"
#include "server/device/fold_batch.h"
#include "server/device/host_copies.h"
#include "server/device/sum_queue.h"
#include "server/device/transfer_queue_pool.h"

namespace ema {
namespace {

using Queue = Accelerator::Queue;

class AcceleratorStream : public DeviceStream {
 public:
  AcceleratorStream(std::shared_ptr<TransferQueuePool> pool,
                    std::unique_ptr<TransferQueue> transfer)
      : pool_(std::move(pool)), transfer_(std::move(transfer)), name_(pool_->accelerator->name()) {}
  // A session that was dropped gives its blocks back: nothing may write to them any more.
  ~AcceleratorStream() override {
    if (!WaitForAll().ok()) return;
    if (transfer_->ring != nullptr) {
      for (Ring::Slab& slab : transfer_->ring->slabs) slab.batch.Clear();
    }
    pool_->Release(std::move(transfer_));
  }

  absl::StatusOr<std::optional<int64_t>> Fold(const FoldOp& op) override {
    EMA_RETURN_IF_ERROR(CheckFold(op, name_));
    EMA_RETURN_IF_ERROR(pool_->health.status());
    if (transfer_->ring == nullptr) EMA_RETURN_IF_ERROR(pool_->RingOf(*transfer_).status());
    for (int64_t first = 0; first < op.element_count;) {
      first += batch().Add(op, first, launch_bytes_);
      if (first == op.element_count) break;
      EMA_RETURN_IF_ERROR(Launch());
      launch_bytes_ = std::min(2 * launch_bytes_, pool_->options.slab_bytes);
    }
    return std::nullopt;
  }

  absl::Status Zero(std::byte* data, int64_t size_bytes) override {
    return InOrder([&](Queue& queue) { return queue.Zero(data, size_bytes); });
  }
  absl::Status Copy(std::byte* to, const std::byte* from, int64_t size_bytes) override {
    return InOrder([&](Queue& queue) { return queue.CopyOnDevice(to, from, size_bytes); });
  }

  // As a fold: many small ones are one copy, and one launch.
  absl::Status CopyFromHost(std::byte* device, const std::byte* host, int64_t size_bytes) override {
    constexpr int64_t kWide = sizeof(int64_t);
    const bool is_wide =
        reinterpret_cast<uintptr_t>(device) % kWide == 0 && size_bytes % kWide == 0;
    const FoldTarget target{.kind = FoldKind::kCopy, .next = device};
    return Fold({.source_dtype = is_wide ? Dtype::kInt64 : Dtype::kUInt8,
                 .source = host,
                 .element_count = is_wide ? size_bytes / kWide : size_bytes,
                 .targets = {&target, 1}})
        .status();
  }

  absl::StatusOr<std::vector<NonFiniteElement>> Synchronize() override {
    EMA_RETURN_IF_ERROR(Launch());
    EMA_RETURN_IF_ERROR(WaitForAll());
    if (transfer_->ring != nullptr) {
      for (Ring::Slab& slab : transfer_->ring->slabs) TakeNonFinite(slab.batch);
    }
    launch_bytes_ = FirstLaunchBytes();
    std::vector<NonFiniteElement> elements;
    for (const auto& [source_id, element] : non_finite_) elements.push_back({source_id, element});
    non_finite_.clear();
    return elements;
  }

 private:
  // The GPU begins early, and then has larger pieces each time.
  int64_t FirstLaunchBytes() const { return pool_->options.slab_bytes / 16; }

  // REQUIRES: there is a ring.
  FoldBatch& batch() { return transfer_->ring->slabs[slab_].batch; }

  // Waits for everything that is queued.
  absl::Status WaitForAll() {
    Queue& queue = *transfer_->queue;
    absl::Status status = queue.Mark(slab_);
    if (status.ok()) status = queue.Wait(slab_);
    return pool_->health.Check(status);
  }

  // After the folds that came before.
  template <typename Do>
  absl::Status InOrder(const Do& queue_work) {
    EMA_RETURN_IF_ERROR(Launch());
    return pool_->health.Check(queue_work(*transfer_->queue));
  }

  // Sends the slab that is being filled on its way, if there is something in it.
  absl::Status Launch() {
    EMA_RETURN_IF_ERROR(pool_->health.status());
    if (transfer_->ring == nullptr || batch().empty()) return absl::OkStatus();
    const Ring::Slab& slab = transfer_->ring->slabs[slab_];
    const FoldTable table = batch().Finish();
    Queue& queue = *transfer_->queue;
    absl::Status status = queue.CopyAhead(slab.device, slab.host, batch().size_bytes());
    if (status.ok()) status = queue.Fold(table);
    if (!status.ok()) batch().Clear();
    EMA_RETURN_IF_ERROR(pool_->health.Check(status));
    return NextSlab();
  }

  // Goes on with the next slab, when what was in it has been done.
  absl::Status NextSlab() {
    EMA_RETURN_IF_ERROR(pool_->health.Check(transfer_->queue->Mark(slab_)));
    slab_ = (slab_ + 1) % Queue::kSlots;
    EMA_RETURN_IF_ERROR(pool_->health.Check(transfer_->queue->Wait(slab_)));
    TakeNonFinite(batch());
    return absl::OkStatus();
  }

  // Empties a batch whose folds are done.
  void TakeNonFinite(FoldBatch& batch) {
    batch.ForEachNonFinite([this](const NonFiniteElement& found) {
      const auto [it, is_new] = non_finite_.try_emplace(found.source_id, found.element);
      it->second = std::min(it->second, found.element);
    });
    batch.Clear();
  }

  const std::shared_ptr<TransferQueuePool> pool_;
  std::unique_ptr<TransferQueue> transfer_;
  const std::string name_;
  int slab_ = 0;                                  // That is being filled.
  int64_t launch_bytes_ = FirstLaunchBytes();     // A slab is uploaded when it has this many.
  absl::btree_map<int64_t, int64_t> non_finite_;  // The first element of each source.
};

class AcceleratorDevice : public Device {
 public:
  AcceleratorDevice(std::shared_ptr<Accelerator> accelerator, const AcceleratorOptions& options)
      : pool_(std::make_shared<TransferQueuePool>(std::move(accelerator), options)),
        host_copies_(pool_, options.kept_host_bytes) {}

  std::string name() const override { return pool_->accelerator->name(); }
  absl::StatusOr<std::shared_ptr<Block>> Allocate(int64_t size_bytes) override {
    EMA_RETURN_IF_ERROR(pool_->health.status());
    return pool_->blocks.Allocate(size_bytes);
  }
  absl::StatusOr<std::unique_ptr<DeviceStream>> NewStream() override {
    EMA_ASSIGN_OR_RETURN(std::unique_ptr<TransferQueue> transfer, pool_->Acquire());
    return std::make_unique<AcceleratorStream>(pool_, std::move(transfer));
  }
  bool is_host() const override { return false; }

  absl::StatusOr<std::shared_ptr<const std::byte>> HostView(const BlockRef& block,
                                                            std::optional<Dtype> cast) override {
    return host_copies_.Get(block, FormatOf(cast));
  }
  bool HasHostView(const BlockRef& block, std::optional<Dtype> cast) override {
    return host_copies_.Has(block, FormatOf(cast));
  }
  absl::StatusOr<SquareSums> SumSquares(std::span<const SumRun> runs) override {
    const auto memory = [&](const Ring::Slab& slab) {
      return SumMemory{slab.host, slab.device, pool_->options.slab_bytes};
    };
    absl::StatusOr<SquareSums> sums;
    const auto sum = [&](TransferQueue& transfer) -> absl::Status {
      EMA_ASSIGN_OR_RETURN(const Ring* const ring, pool_->RingOf(transfer));
      sums = SumOnQueue(*transfer.queue, runs, memory(ring->slabs[0]), memory(ring->slabs[1]));
      return sums.status();
    };
    EMA_RETURN_IF_ERROR(pool_->RunWithQueue(sum));
    return sums;
  }
  int64_t total_memory_bytes() const override { return pool_->accelerator->total_memory_bytes(); }
  MemoryUse memory_use() const override {
    return {.block_bytes = pool_->blocks.used_bytes(),
            .kept_bytes = pool_->blocks.free_bytes(),
            .host_copy_bytes = host_copies_.size_bytes()};
  }
  Overhead overhead(int64_t block_bytes) const override {
    const AcceleratorOptions& options = pool_->options;
    const int64_t ring_bytes = Ring::SizeBytes(options.slab_bytes);
    const int64_t shared_bytes = (TransferQueuePool::kReaderQueues + kOtherStreams) * ring_bytes;
    return {.bytes_per_stream = ring_bytes,
            .shared_bytes = shared_bytes,
            .host_bytes_per_stream = ring_bytes,
            .host_bytes_per_reader = 2 * block_bytes,
            .shared_host_bytes = options.kept_host_bytes +
                                 BlockPool::LeastKept(options.kept_host_bytes) + shared_bytes};
  }
  void Trim(int64_t most_bytes) override {
    pool_->blocks.Trim(most_bytes);
    // Pushes of other models use the rings, and pinning one again takes milliseconds.
    if (most_bytes == 0) pool_->FreeRings();
    host_copies_.Trim();
    pool_->accelerator->Trim();
  }
  absl::Status health() const override { return pool_->health.status(); }

 private:
  static SourceFormat FormatOf(std::optional<Dtype> cast) {
    return cast.has_value() ? static_cast<SourceFormat>(*cast) : SourceFormat::kNoFloat;
  }

  const std::shared_ptr<TransferQueuePool> pool_;
  HostCopies host_copies_;
};

}  // namespace

std::unique_ptr<Device> MakeAcceleratorDevice(std::shared_ptr<Accelerator> accelerator,
                                              const AcceleratorOptions& options) {
  return std::make_unique<AcceleratorDevice>(std::move(accelerator), options);
}

}  // namespace ema
