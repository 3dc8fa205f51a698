// SPDX-License-Identifier: Apache-2.0
#include "server/device/transfer_queue_pool.h"

#include "absl/cleanup/cleanup.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// Null: there is none.
template <typename T>
std::unique_ptr<T> TakeLast(std::vector<std::unique_ptr<T>>& idle) {
  if (idle.empty()) return nullptr;
  std::unique_ptr<T> last = std::move(idle.back());
  idle.pop_back();
  return last;
}

}  // namespace

TransferQueuePool::TransferQueuePool(std::shared_ptr<Accelerator> the_accelerator,
                                     const AcceleratorOptions& the_options)
    : accelerator(std::move(the_accelerator)),
      options(the_options),
      blocks([this](int64_t size_bytes) { return AllocateDevice(size_bytes); },
             options.kept_free_bytes) {}

absl::StatusOr<std::unique_ptr<BlockPool::Memory>> TransferQueuePool::AllocateDevice(
    int64_t size_bytes) {
  EMA_RETURN_IF_ERROR(health.status());
  absl::StatusOr<std::unique_ptr<BlockPool::Memory>> memory =
      accelerator->AllocateDevice(size_bytes);
  if (!memory.ok()) return health.Check(memory.status());
  return memory;
}

absl::StatusOr<std::unique_ptr<TransferQueue>> TransferQueuePool::Acquire() {
  EMA_RETURN_IF_ERROR(health.status());
  auto transfer = std::make_unique<TransferQueue>();
  {
    absl::MutexLock lock(&mu);
    transfer->queue = TakeLast(idle_queues);
  }
  if (transfer->queue != nullptr) return transfer;
  absl::StatusOr<std::unique_ptr<Accelerator::Queue>> queue = accelerator->NewQueue();
  if (!queue.ok()) return health.Check(queue.status());
  transfer->queue = *std::move(queue);
  return transfer;
}

absl::StatusOr<Ring*> TransferQueuePool::RingOf(TransferQueue& transfer) {
  if (transfer.ring == nullptr) {
    absl::MutexLock lock(&mu);
    transfer.ring = TakeLast(idle_rings);
  }
  if (transfer.ring == nullptr) {
    absl::StatusOr<std::unique_ptr<Ring>> ring = MakeRing();
    if (absl::IsResourceExhausted(ring.status()) && blocks.free_bytes() > 0) {
      blocks.Trim(0);
      ring = MakeRing();
    }
    EMA_ASSIGN_OR_RETURN(transfer.ring, std::move(ring));
  }
  return transfer.ring.get();
}

absl::StatusOr<std::unique_ptr<Ring>> TransferQueuePool::MakeRing() {
  const int64_t size_bytes = Ring::SizeBytes(options.slab_bytes);
  auto ring = std::make_unique<Ring>();
  EMA_ASSIGN_OR_RETURN(ring->device, AllocateDevice(size_bytes));
  absl::StatusOr<std::unique_ptr<BlockPool::Memory>> host = accelerator->AllocatePinned(size_bytes);
  if (!host.ok()) return health.Check(host.status());
  ring->host = *std::move(host);
  for (int64_t offset = 0; offset < size_bytes; offset += options.slab_bytes) {
    std::byte* const host_slab = ring->host->data() + offset;
    std::byte* const device_slab = ring->device->data() + offset;
    ring->slabs.push_back(
        {host_slab, device_slab, FoldBatch(host_slab, device_slab, options.slab_bytes)});
  }
  return ring;
}

void TransferQueuePool::Release(std::unique_ptr<TransferQueue> transfer) {
  absl::MutexLock lock(&mu);
  idle_queues.push_back(std::move(transfer->queue));
  if (transfer->ring != nullptr) idle_rings.push_back(std::move(transfer->ring));
}

absl::Status TransferQueuePool::RunWithQueue(absl::FunctionRef<absl::Status(TransferQueue&)> work) {
  {
    absl::MutexLock lock(&mu);
    const auto is_free = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu) {
      return reader_count < kReaderQueues;
    };
    mu.Await(absl::Condition(&is_free));
    ++reader_count;
  }
  const absl::Cleanup let_go = [this] {
    absl::MutexLock lock(&mu);
    --reader_count;
  };
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<TransferQueue> transfer, Acquire());
  EMA_RETURN_IF_ERROR(health.Check(work(*transfer)));
  Release(std::move(transfer));
  return absl::OkStatus();
}

void TransferQueuePool::FreeRings() {
  std::vector<std::unique_ptr<Ring>> freed;  // Destroyed after the lock.
  absl::MutexLock lock(&mu);
  freed.swap(idle_rings);
}

}  // namespace ema
