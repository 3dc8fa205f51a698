// SPDX-License-Identifier: Apache-2.0
//
// Host copies, for readers, of blocks in an accelerator's memory.
#ifndef EMA_SERVER_DEVICE_HOST_COPIES_H_
#define EMA_SERVER_DEVICE_HOST_COPIES_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/device/block_pool.h"
#include "server/device/device.h"
#include "server/device/transfer_queue_pool.h"
#include "server/kernel/fold_element.h"

namespace ema {

// Copies of blocks in pinned host memory: each made once, shared by all readers, and kept for later
// readers as long as its block exists and there is room. Thread-safe.
class HostCopies {
 public:
  // `kept_bytes`: limit of the copies that are not being read and of memory kept for later copies.
  HostCopies(std::shared_ptr<TransferQueuePool> pool, int64_t kept_bytes)
      : pool_(std::move(pool)),
        kept_bytes_(kept_bytes),
        pinned_([accelerator = pool_->accelerator](
                    int64_t size_bytes) { return accelerator->AllocatePinned(size_bytes); },
                kept_bytes, kept_bytes) {}

  // `format`: the block's float32 values are cast to it; kNoFloat: they are copied unchanged.
  absl::StatusOr<std::shared_ptr<const std::byte>> Get(const BlockRef& block, SourceFormat format)
      ABSL_LOCKS_EXCLUDED(mu_);
  // True: Get() would not wait.
  bool Has(const BlockRef& block, SourceFormat format) ABSL_LOCKS_EXCLUDED(mu_);
  // Pinned bytes: of copies, and of memory kept for later ones.
  int64_t size_bytes() const { return pinned_.used_bytes() + pinned_.free_bytes(); }
  // Frees the memory kept for later copies, unless there are copies of blocks that still exist:
  // then others will follow, and unpinning waits for the whole device.
  void Trim() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Copy {
    absl::Mutex mu;  // Held while the copy is made: others wait for it.
    std::shared_ptr<Block> memory ABSL_GUARDED_BY(mu);
  };
  // The address alone does not identify a block: a freed one may have had it.
  using Key = std::pair<const Block*, SourceFormat>;
  struct Entry {
    std::weak_ptr<const Block> block;
    Key key;
    std::shared_ptr<Copy> copy;
    int64_t size_bytes = 0;
  };
  using Entries = std::list<Entry>;

  // Size of a copy of the block.
  static int64_t SizeBytes(const Block& block, SourceFormat format) {
    return format == SourceFormat::kNoFloat ? block.size_bytes() : block.size_bytes() / 2;
  }
  // entries_.end(): there is none.
  Entries::iterator FindLocked(const BlockRef& block, SourceFormat format)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Removes idle copies, least recently used first, until `needed_bytes` are removed; on the way
  // also all copies of freed blocks.
  Entries DropLocked(int64_t needed_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Removes `copy`, which could not be made.
  void Forget(const Key& key, const Copy& copy) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Fill(const Block& block, SourceFormat format, Copy& copy)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(copy.mu);
  absl::Status QueueCast(const Block& block, SourceFormat format, std::byte* host,
                         TransferQueue& transfer);

  const std::shared_ptr<TransferQueuePool> pool_;
  const int64_t kept_bytes_;
  // Copies of one version after another use the same memory: pinning it costs more than the copy,
  // and freeing it waits for the whole device.
  BlockPool pinned_;
  absl::Mutex mu_;
  Entries entries_ ABSL_GUARDED_BY(mu_);  // Most recently used first.
  absl::flat_hash_map<Key, Entries::iterator> by_key_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_HOST_COPIES_H_
