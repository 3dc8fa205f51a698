// SPDX-License-Identifier: Apache-2.0
//
// Collects folds in host memory, so that one copy and one launch do many of them.
#ifndef EMA_SERVER_DEVICE_FOLD_BATCH_H_
#define EMA_SERVER_DEVICE_FOLD_BATCH_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "server/device/device.h"
#include "server/kernel/fold_table.h"

namespace ema {

// Fills a piece of (pinned) host memory with sources, followed by the table of the folds to do; a
// kernel reads the same bytes at `device`. Which runs are not finite is noted in the host memory
// behind that. Not thread-safe.
class FoldBatch {
 public:
  // Both aligned to 64 bytes, of `capacity_bytes`, enough for a few thousand elements.
  FoldBatch(std::byte* host, std::byte* device, int64_t capacity_bytes)
      : host_(host), device_(device), capacity_bytes_(capacity_bytes) {}

  // Copies elements of `op` from `first` on, as many as fit in `limit_bytes` and in the memory.
  // Returns how many; 0: the batch is full (or `op` has no elements).
  int64_t Add(const FoldOp& op, int64_t first, int64_t limit_bytes);

  bool empty() const { return runs_.empty(); }

  // Writes the table. The first size_bytes() of `host` must then be copied to `device`. The result
  // has device addresses, except for the notes.
  FoldTable Finish();
  int64_t size_bytes() const { return used_bytes_; }

  // Calls `take` with the first non-finite element of each run that has one. REQUIRES: Finish() was
  // called, and the launched work is done.
  void ForEachNonFinite(absl::FunctionRef<void(const NonFiniteElement&)> take) const;

  // Empties the batch. It may be filled again when the launched work is done.
  void Clear();

 private:
  // Adjacent elements of one op, in host memory.
  struct Run {
    int32_t note = 0;  // Index of the note for it and for adjacent runs.
    Dtype dtype = Dtype::kFloat32;
    bool rounds_to_float32 = false;
    const std::byte* source = nullptr;
    int64_t element_count = 0;
    int64_t source_id = 0;
    int64_t first_element = 0;
  };

  int64_t note_count() const { return tiles_.empty() ? 0 : tiles_.back().note + 1; }
  // Size of the table with one more run of `target_count` targets and `tile_count` tiles.
  int64_t TableBytes(int64_t target_count, int64_t tile_count) const;
  // The targets of the last run that did not share those of an earlier one.
  struct Shared {
    int64_t element_bytes = 0;  // Of the source; 0: there was none.
    int32_t first_target = 0;
    bool is_aligned = false;
    std::vector<FoldTarget> targets;  // Of its first element.
  };
  // The distance, in elements, from these targets to those of `op` at its element `first`. nullopt:
  // it is not the same for all of them.
  std::optional<int64_t> FindInShared(const FoldOp& op, int64_t first) const;
  // Adds targets for `op`, from element `first` on.
  void AddTargets(const FoldOp& op, int64_t first, int phase);

  std::byte* const host_;
  std::byte* const device_;
  const int64_t capacity_bytes_;
  int64_t used_bytes_ = 0;
  uint32_t* non_finite_ = nullptr;  // Set by Finish().
  std::vector<Run> runs_;
  std::vector<FoldTile> tiles_;
  std::vector<DeviceFoldTarget> targets_;
  Shared shared_;
};

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_FOLD_BATCH_H_
