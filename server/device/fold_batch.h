// SPDX-License-Identifier: Apache-2.0
//
// Gathers folds in host memory, so that one copy and one launch do many of them.
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

// Fills a piece of (pinned) host memory with sources, and behind them with the table of what is to
// be done with them; the same bytes at `device` are what a kernel reads. What it finds not to be
// finite it notes in the host memory, behind all that. Not thread-safe.
class FoldBatch {
 public:
  // Both aligned to 64 bytes, of `capacity_bytes`, which takes a few thousand elements at least.
  FoldBatch(std::byte* host, std::byte* device, int64_t capacity_bytes)
      : host_(host), device_(device), capacity_bytes_(capacity_bytes) {}

  // Takes elements of `op` from `first` on, as many as there is room for in `limit_bytes`, or what
  // there is if that is less; copies them. How many; 0: the batch is full (an op without elements
  // takes no room and gives 0, too).
  int64_t Add(const FoldOp& op, int64_t first, int64_t limit_bytes);

  bool empty() const { return runs_.empty(); }

  // Writes the table. What is to be copied to `device` are the first size_bytes() of `host`; the
  // result has addresses there, but for the notes.
  FoldTable Finish();
  int64_t size_bytes() const { return used_bytes_; }

  // Calls `take` with the first element that is not finite of each run that has one. REQUIRES:
  // Finish() was called, and what was launched is done.
  void ForEachNonFinite(absl::FunctionRef<void(const NonFiniteElement&)> take) const;

  // Forgets what it has taken. It may be filled anew when what was launched is done.
  void Clear();

 private:
  // Neighbours of one op, in host memory.
  struct Run {
    int32_t note = 0;  // Which of the notes tells of it, and of its neighbours.
    Dtype dtype = Dtype::kFloat32;
    const std::byte* source = nullptr;
    int64_t element_count = 0;
    int64_t source_id = 0;
    int64_t first_element = 0;
  };

  int64_t note_count() const { return tiles_.empty() ? 0 : tiles_.back().run + 1; }
  // With one run more, which has so many targets and tiles.
  int64_t TableBytes(int64_t target_count, int64_t tile_count) const;
  // The targets of the last run that had targets of its own.
  struct Shared {
    int64_t element_bytes = 0;  // Of the source; 0: there was none.
    int32_t first_target = 0;
    bool is_aligned = false;
    std::vector<FoldTarget> targets;  // Of its first element.
  };
  // Where element `first` of `op` is in these: so many elements behind their first, in all of them.
  std::optional<int64_t> FindInShared(const FoldOp& op, int64_t first) const;
  // Gives `op` targets of its own, from element `first` on.
  void AddTargets(const FoldOp& op, int64_t first, int phase);

  std::byte* const host_;
  std::byte* const device_;
  const int64_t capacity_bytes_;
  int64_t used_bytes_ = 0;
  uint32_t* non_finite_ = nullptr;  // Of Finish().
  std::vector<Run> runs_;
  std::vector<FoldTile> tiles_;
  std::vector<DeviceFoldTarget> targets_;
  Shared shared_;
};

}  // namespace ema

#endif  // EMA_SERVER_DEVICE_FOLD_BATCH_H_
