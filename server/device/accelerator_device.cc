// SPDX-License-Identifier: Apache-2.0
#include "server/device/accelerator_device.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <list>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/container/btree_map.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/device/fold_batch.h"
#include "server/device/sum_queue.h"

namespace ema {
namespace {

using Queue = Accelerator::Queue;
using Memory = BlockPool::Memory;

// Flags of a stream in device memory, which say which tracks differ. A model has at most 64.
constexpr int64_t kMaxFlags = 64;
constexpr int64_t kFlagBytes = kMaxFlags * static_cast<int64_t>(sizeof(uint32_t));

// By which blocks go to the host and are summed: one copies while the other casts.
constexpr int kReaderFeeds = 2;

// The first error breaks the device. Thread-safe.
class Health {
 public:
  // Passes `status` on; an error that is no lack of memory breaks the device, and what broke it
  // first is returned.
  absl::Status Check(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    if (status.ok() || absl::IsResourceExhausted(status)) return status;
    absl::MutexLock lock(&mu_);
    if (first_.ok()) first_ = status;
    return first_;
  }
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return first_;
  }

 private:
  mutable absl::Mutex mu_;
  absl::Status first_ ABSL_GUARDED_BY(mu_);
};

// A queue with the memory by which it is fed. Made seldom, and used again by stream after stream:
// pinning memory takes milliseconds.
struct Feed {
  struct Slab {
    std::unique_ptr<Memory> host;
    std::unique_ptr<Memory> device;
    std::optional<FoldBatch> batch;
  };
  std::array<Slab, Queue::kSlots> slabs;
  std::unique_ptr<Memory> host_flags;
  std::unique_ptr<Memory> device_flags;
  std::unique_ptr<Queue> queue;  // Destroyed, and so waited for, first.
};

// What streams share with their device, which they may outlive.
struct Shared {
  Shared(std::shared_ptr<Accelerator> the_accelerator, const AcceleratorOptions& the_options)
      : accelerator(std::move(the_accelerator)), options(the_options) {}

  absl::StatusOr<std::unique_ptr<Feed>> TakeFeed() ABSL_LOCKS_EXCLUDED(mu);
  // REQUIRES: nothing is queued.
  void GiveBack(std::unique_ptr<Feed> feed) ABSL_LOCKS_EXCLUDED(mu);
  // Calls `work` with a feed, whose work it waits for. Waits until one of kReaderFeeds is free: few
  // of them keep the link busy, and the memory formula counts them.
  absl::Status DoWithFeed(absl::FunctionRef<absl::Status(Feed&)> work) ABSL_LOCKS_EXCLUDED(mu);
  // Frees those that nobody has.
  void FreeFeeds() ABSL_LOCKS_EXCLUDED(mu);

  const std::shared_ptr<Accelerator> accelerator;
  const AcceleratorOptions options;
  Health health;

  absl::Mutex mu;
  std::vector<std::unique_ptr<Feed>> idle_feeds ABSL_GUARDED_BY(mu);
  int reader_count ABSL_GUARDED_BY(mu) = 0;

 private:
  absl::StatusOr<std::unique_ptr<Feed>> MakeFeed() const;
};

absl::StatusOr<std::unique_ptr<Feed>> Shared::TakeFeed() {
  EMA_RETURN_IF_ERROR(health.status());
  {
    absl::MutexLock lock(&mu);
    if (!idle_feeds.empty()) {
      std::unique_ptr<Feed> feed = std::move(idle_feeds.back());
      idle_feeds.pop_back();
      return feed;
    }
  }
  absl::StatusOr<std::unique_ptr<Feed>> feed = MakeFeed();
  if (!feed.ok()) return health.Check(feed.status());
  return feed;
}

absl::StatusOr<std::unique_ptr<Feed>> Shared::MakeFeed() const {
  auto feed = std::make_unique<Feed>();
  for (Feed::Slab& slab : feed->slabs) {
    EMA_ASSIGN_OR_RETURN(slab.host, accelerator->AllocatePinned(options.slab_bytes));
    EMA_ASSIGN_OR_RETURN(slab.device, accelerator->AllocateDevice(options.slab_bytes));
    slab.batch.emplace(slab.host->data(), slab.device->data(), options.slab_bytes);
  }
  EMA_ASSIGN_OR_RETURN(feed->host_flags, accelerator->AllocatePinned(kFlagBytes));
  EMA_ASSIGN_OR_RETURN(feed->device_flags, accelerator->AllocateDevice(kFlagBytes));
  EMA_ASSIGN_OR_RETURN(feed->queue, accelerator->NewQueue());
  EMA_RETURN_IF_ERROR(feed->queue->Zero(feed->device_flags->data(), kFlagBytes));
  return feed;
}

void Shared::GiveBack(std::unique_ptr<Feed> feed) {
  absl::MutexLock lock(&mu);
  idle_feeds.push_back(std::move(feed));
}

absl::Status Shared::DoWithFeed(absl::FunctionRef<absl::Status(Feed&)> work) {
  {
    absl::MutexLock lock(&mu);
    const auto is_free = [this]()
                             ABSL_SHARED_LOCKS_REQUIRED(mu) { return reader_count < kReaderFeeds; };
    mu.Await(absl::Condition(&is_free));
    ++reader_count;
  }
  const absl::Cleanup let_go = [this] {
    absl::MutexLock lock(&mu);
    --reader_count;
  };
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<Feed> feed, TakeFeed());
  EMA_RETURN_IF_ERROR(health.Check(work(*feed)));
  GiveBack(std::move(feed));
  return absl::OkStatus();
}

void Shared::FreeFeeds() {
  std::vector<std::unique_ptr<Feed>> freed;  // Destroyed after the lock.
  absl::MutexLock lock(&mu);
  freed.swap(idle_feeds);
}

class AcceleratorStream : public DeviceStream {
 public:
  AcceleratorStream(std::shared_ptr<Shared> shared, std::unique_ptr<Feed> feed)
      : shared_(std::move(shared)), feed_(std::move(feed)) {}
  // A session that was dropped gives its blocks back: nothing may write to them any more.
  ~AcceleratorStream() override {
    batch().Clear();
    if (!WaitForAll().ok()) return;
    for (Feed::Slab& slab : feed_->slabs) slab.batch->Clear();
    shared_->GiveBack(std::move(feed_));
  }

  absl::StatusOr<std::optional<int64_t>> Fold(const FoldOp& op) override {
    EMA_RETURN_IF_ERROR(CheckFold(op, shared_->accelerator->name()));
    for (int64_t first = 0; first < op.element_count;) {
      EMA_RETURN_IF_ERROR(shared_->health.status());
      const int64_t count =
          batch().Add(op, first, [this](std::atomic<bool>* differs) { return FlagOf(differs); });
      first += count;
      if (first < op.element_count) EMA_RETURN_IF_ERROR(Launch());
    }
    return std::nullopt;
  }

  absl::Status Zero(std::byte* data, int64_t size_bytes) override {
    return InOrder([&](Queue& queue) { return queue.Zero(data, size_bytes); });
  }
  absl::Status Copy(std::byte* to, const std::byte* from, int64_t size_bytes) override {
    return InOrder([&](Queue& queue) { return queue.CopyOnDevice(to, from, size_bytes); });
  }

  // Host memory that is not pinned goes by way of the slabs.
  absl::Status CopyToHost(std::byte* host, const std::byte* device, int64_t size_bytes) override {
    for (int64_t done = 0; done < size_bytes;) {
      const int64_t count = std::min(shared_->options.slab_bytes, size_bytes - done);
      EMA_RETURN_IF_ERROR(Launch());
      std::byte* const pinned = feed_->slabs[slab_].host->data();
      EMA_RETURN_IF_ERROR(
          shared_->health.Check(feed_->queue->CopyToHost(pinned, device + done, count)));
      arriving_.push_back({slab_, host + done, count});
      EMA_RETURN_IF_ERROR(NextSlab());
      done += count;
    }
    return absl::OkStatus();
  }
  absl::Status CopyFromHost(std::byte* device, const std::byte* host, int64_t size_bytes) override {
    for (int64_t done = 0; done < size_bytes;) {
      const int64_t count = std::min(shared_->options.slab_bytes, size_bytes - done);
      EMA_RETURN_IF_ERROR(Launch());
      std::byte* const pinned = feed_->slabs[slab_].host->data();
      std::memcpy(pinned, host + done, static_cast<size_t>(count));
      EMA_RETURN_IF_ERROR(
          shared_->health.Check(feed_->queue->CopyToDevice(device + done, pinned, count)));
      EMA_RETURN_IF_ERROR(NextSlab());
      done += count;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<NonFiniteElement>> Synchronize() override {
    EMA_RETURN_IF_ERROR(Launch());
    EMA_RETURN_IF_ERROR(WaitForAll());
    while (!arriving_.empty()) TakeArrived();
    for (Feed::Slab& slab : feed_->slabs) TakeNonFinite(*slab.batch);
    std::array<uint32_t, kMaxFlags> flags;
    std::memcpy(flags.data(), feed_->host_flags->data(), kFlagBytes);
    for (size_t i = 0; i < differs_.size(); ++i) {
      if (flags[i] != 0) differs_[i]->store(true, std::memory_order_relaxed);
    }
    differs_.clear();
    std::vector<NonFiniteElement> elements;
    for (const auto& [source_id, element] : non_finite_) elements.push_back({source_id, element});
    non_finite_.clear();
    return elements;
  }

 private:
  // A copy to host memory that is still in a slab, or on its way there.
  struct Arriving {
    int slab;
    std::byte* host;
    int64_t size_bytes;
  };

  FoldBatch& batch() { return *feed_->slabs[slab_].batch; }

  uint32_t* FlagOf(std::atomic<bool>* differs) {
    const auto it = std::find(differs_.begin(), differs_.end(), differs);
    const int64_t index = it - differs_.begin();
    if (it == differs_.end()) differs_.push_back(differs);
    return reinterpret_cast<uint32_t*>(feed_->device_flags->data()) + index;
  }

  // Waits for everything that is queued, and brings the flags, if there are any, to the host; they
  // are 0 after it.
  absl::Status WaitForAll() {
    Queue& queue = *feed_->queue;
    absl::Status status;
    if (!differs_.empty()) {
      std::byte* const device_flags = feed_->device_flags->data();
      status = queue.CopyToHost(feed_->host_flags->data(), device_flags, kFlagBytes);
      if (status.ok()) status = queue.Zero(device_flags, kFlagBytes);
    }
    if (status.ok()) status = queue.Mark(slab_);
    if (status.ok()) status = queue.Wait(slab_);
    return shared_->health.Check(status);
  }

  // After the folds that came before.
  template <typename Do>
  absl::Status InOrder(const Do& queue_work) {
    EMA_RETURN_IF_ERROR(Launch());
    return shared_->health.Check(queue_work(*feed_->queue));
  }

  // Sends the slab that is being filled on its way, if there is something in it.
  absl::Status Launch() {
    EMA_RETURN_IF_ERROR(shared_->health.status());
    if (batch().empty()) return absl::OkStatus();
    Feed::Slab& slab = feed_->slabs[slab_];
    const FoldTable table = batch().Finish();
    Queue& queue = *feed_->queue;
    absl::Status status =
        queue.CopyToDevice(slab.device->data(), slab.host->data(), batch().size_bytes());
    if (status.ok()) status = queue.Fold(table);
    if (!status.ok()) batch().Clear();
    EMA_RETURN_IF_ERROR(shared_->health.Check(status));
    return NextSlab();
  }

  // Goes on with the next slab, when what was in it has been done.
  absl::Status NextSlab() {
    EMA_RETURN_IF_ERROR(shared_->health.Check(feed_->queue->Mark(slab_)));
    slab_ = (slab_ + 1) % Queue::kSlots;
    EMA_RETURN_IF_ERROR(shared_->health.Check(feed_->queue->Wait(slab_)));
    if (!arriving_.empty() && arriving_.front().slab == slab_) TakeArrived();
    TakeNonFinite(batch());
    return absl::OkStatus();
  }

  void TakeArrived() {
    const Arriving& first = arriving_.front();
    std::memcpy(first.host, feed_->slabs[first.slab].host->data(),
                static_cast<size_t>(first.size_bytes));
    arriving_.pop_front();
  }

  // Empties a batch whose folds are done.
  void TakeNonFinite(FoldBatch& batch) {
    batch.ForEachNonFinite([this](const NonFiniteElement& found) {
      const auto [it, is_new] = non_finite_.try_emplace(found.source_id, found.element);
      it->second = std::min(it->second, found.element);
    });
    batch.Clear();
  }

  const std::shared_ptr<Shared> shared_;
  std::unique_ptr<Feed> feed_;
  int slab_ = 0;  // That is being filled.
  std::deque<Arriving> arriving_;
  std::vector<std::atomic<bool>*> differs_;       // By their flags.
  absl::btree_map<int64_t, int64_t> non_finite_;  // The first element of each source.
};

// Copies of blocks in pinned host memory: each made once, shared by all readers, kept for a while.
class HostCopies {
 public:
  HostCopies(std::shared_ptr<Shared> shared, int64_t kept_bytes)
      : shared_(std::move(shared)),
        kept_bytes_(kept_bytes),
        pinned_([accelerator = shared_->accelerator](
                    int64_t size_bytes) { return accelerator->AllocatePinned(size_bytes); },
                kept_bytes) {}

  // kNoFloat: as it is; else of float32s, cast.
  absl::StatusOr<std::shared_ptr<const std::byte>> Get(const BlockRef& block, SourceFormat format)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Frees what nobody reads.
  void Clear() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Copy {
    absl::Mutex mu;  // Held while it is made: others wait for it.
    std::shared_ptr<Block> memory ABSL_GUARDED_BY(mu);
  };
  struct Entry {
    std::weak_ptr<const Block> block;
    SourceFormat format = SourceFormat::kNoFloat;
    std::shared_ptr<Copy> copy;
    int64_t size_bytes = 0;
  };

  // Of the copy of a block.
  static int64_t SizeBytes(const Block& block, SourceFormat format) {
    return format == SourceFormat::kNoFloat ? block.size_bytes() : block.size_bytes() / 2;
  }
  absl::Status Fill(const Block& block, SourceFormat format, Copy& copy)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(copy.mu);
  absl::Status QueueCast(const Block& block, SourceFormat format, std::byte* host, Feed& feed);

  const std::shared_ptr<Shared> shared_;
  const int64_t kept_bytes_;
  // Copies of one version after another use the same memory: pinning it costs more than the copy,
  // and freeing it waits for the whole device.
  BlockPool pinned_;
  absl::Mutex mu_;
  std::list<Entry> entries_ ABSL_GUARDED_BY(mu_);  // Used last comes first.
};

absl::StatusOr<std::shared_ptr<const std::byte>> HostCopies::Get(const BlockRef& block,
                                                                 SourceFormat format) {
  std::shared_ptr<Copy> copy;
  std::list<Entry> dropped;  // Freed without the lock.
  {
    absl::MutexLock lock(&mu_);
    int64_t idle_bytes = 0;
    for (auto it = entries_.begin(); it != entries_.end();) {
      const auto entry = it++;
      if (entry->format == format && !entry->block.owner_before(block) &&
          !block.owner_before(entry->block)) {
        copy = entry->copy;
        entries_.splice(entries_.begin(), entries_, entry);
        continue;
      }
      // Its block has gone, or it has been idle for long.
      const bool is_idle = entry->copy.use_count() == 1;
      if (is_idle) idle_bytes += entry->size_bytes;
      if (entry->block.expired() || (is_idle && idle_bytes > kept_bytes_)) {
        dropped.splice(dropped.end(), entries_, entry);
      }
    }
    if (copy == nullptr) {
      copy = std::make_shared<Copy>();
      entries_.push_front({block, format, copy, SizeBytes(*block, format)});
    }
  }
  absl::MutexLock lock(&copy->mu);
  if (copy->memory == nullptr) EMA_RETURN_IF_ERROR(Fill(*block, format, *copy));
  return std::shared_ptr<const std::byte>(copy, copy->memory->data());
}

absl::Status HostCopies::Fill(const Block& block, SourceFormat format, Copy& copy) {
  EMA_RETURN_IF_ERROR(shared_->health.status());
  absl::StatusOr<std::shared_ptr<Block>> memory = pinned_.Allocate(SizeBytes(block, format));
  if (!memory.ok()) return shared_->health.Check(memory.status());
  std::byte* const host = (*memory)->data();
  const auto copy_to_host = [&](Feed& feed) -> absl::Status {
    if (format == SourceFormat::kNoFloat) {
      EMA_RETURN_IF_ERROR(feed.queue->CopyToHost(host, block.data(), block.size_bytes()));
    } else {
      EMA_RETURN_IF_ERROR(QueueCast(block, format, host, feed));
    }
    EMA_RETURN_IF_ERROR(feed.queue->Mark(0));
    return feed.queue->Wait(0);
  };
  EMA_RETURN_IF_ERROR(shared_->DoWithFeed(copy_to_host));
  copy.memory = *std::move(memory);
  return absl::OkStatus();
}

// By way of the feed's memory. Each piece waits in the queue for the one before.
absl::Status HostCopies::QueueCast(const Block& block, SourceFormat format, std::byte* host,
                                   Feed& feed) {
  std::byte* const narrow = feed.slabs[0].device->data();
  const int64_t piece_elements = shared_->options.slab_bytes / 2;
  const int64_t element_count = block.size_bytes() / 4;
  for (int64_t done = 0; done < element_count; done += piece_elements) {
    const int64_t count = std::min(piece_elements, element_count - done);
    EMA_RETURN_IF_ERROR(feed.queue->Cast(format, block.data() + 4 * done, narrow, count));
    EMA_RETURN_IF_ERROR(feed.queue->CopyToHost(host + 2 * done, narrow, 2 * count));
  }
  return absl::OkStatus();
}

void HostCopies::Clear() {
  {
    std::list<Entry> dropped;  // Freed without the lock.
    absl::MutexLock lock(&mu_);
    for (auto it = entries_.begin(); it != entries_.end();) {
      const auto entry = it++;
      if (entry->copy.use_count() == 1) dropped.splice(dropped.end(), entries_, entry);
    }
  }
  pinned_.Trim();
}

class AcceleratorDevice : public Device {
 public:
  AcceleratorDevice(std::shared_ptr<Accelerator> accelerator, const AcceleratorOptions& options)
      : shared_(std::make_shared<Shared>(std::move(accelerator), options)),
        pool_(
            [shared = shared_](int64_t size_bytes) -> absl::StatusOr<std::unique_ptr<Memory>> {
              EMA_RETURN_IF_ERROR(shared->health.status());
              absl::StatusOr<std::unique_ptr<Memory>> memory =
                  shared->accelerator->AllocateDevice(size_bytes);
              if (!memory.ok()) return shared->health.Check(memory.status());
              return memory;
            },
            options.kept_free_bytes),
        host_copies_(shared_, options.kept_host_bytes) {}

  std::string name() const override { return shared_->accelerator->name(); }
  absl::StatusOr<std::shared_ptr<Block>> Allocate(int64_t size_bytes) override {
    EMA_RETURN_IF_ERROR(shared_->health.status());
    return pool_.Allocate(size_bytes);
  }
  absl::StatusOr<std::unique_ptr<DeviceStream>> NewStream() override {
    EMA_ASSIGN_OR_RETURN(std::unique_ptr<Feed> feed, shared_->TakeFeed());
    return std::make_unique<AcceleratorStream>(shared_, std::move(feed));
  }
  bool is_host() const override { return false; }

  absl::StatusOr<std::shared_ptr<const std::byte>> HostView(const BlockRef& block) override {
    return host_copies_.Get(block, SourceFormat::kNoFloat);
  }
  absl::StatusOr<std::shared_ptr<const std::byte>> HostView(const BlockRef& block,
                                                            Dtype dtype) override {
    return host_copies_.Get(block, static_cast<SourceFormat>(dtype));
  }
  absl::StatusOr<SquareSums> SumSquares(std::span<const SumRun> runs) override {
    const auto memory = [&](const Feed::Slab& slab) {
      return SumMemory{slab.host->data(), slab.device->data(), shared_->options.slab_bytes};
    };
    SquareSums sums;
    const auto sum = [&](Feed& feed) -> absl::Status {
      EMA_ASSIGN_OR_RETURN(
          sums, SumOnQueue(*feed.queue, runs, memory(feed.slabs[0]), memory(feed.slabs[1])));
      return absl::OkStatus();
    };
    EMA_RETURN_IF_ERROR(shared_->DoWithFeed(sum));
    return sums;
  }
  int64_t total_memory_bytes() const override { return shared_->accelerator->total_memory_bytes(); }
  Overhead overhead(int64_t block_bytes) const override {
    const AcceleratorOptions& options = shared_->options;
    const int64_t feed_bytes = Queue::kSlots * options.slab_bytes + kFlagBytes;
    return {.bytes_per_stream = feed_bytes,
            .shared_bytes = kReaderFeeds * feed_bytes,
            .host_bytes_per_stream = feed_bytes,
            .host_bytes_per_reader = block_bytes,
            // Copies that nobody reads, and memory of those that have gone.
            .shared_host_bytes = 2 * options.kept_host_bytes + kReaderFeeds * feed_bytes};
  }
  void Trim() override {
    pool_.Trim();
    host_copies_.Clear();
    shared_->FreeFeeds();
    shared_->accelerator->Trim();
  }
  absl::Status health() const override { return shared_->health.status(); }

 private:
  const std::shared_ptr<Shared> shared_;
  BlockPool pool_;
  HostCopies host_copies_;
};

}  // namespace

std::unique_ptr<Device> MakeAcceleratorDevice(std::shared_ptr<Accelerator> accelerator,
                                              const AcceleratorOptions& options) {
  return std::make_unique<AcceleratorDevice>(std::move(accelerator), options);
}

}  // namespace ema
