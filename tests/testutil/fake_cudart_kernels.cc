// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/fake_cudart_kernels.h"

#include <vector>

#include "server/kernel/cast_run.h"
#include "server/kernel/fold_op.h"
#include "server/kernel/fold_table.h"
#include "server/kernel/sum_table.h"
#include "tests/testutil/walk_grid.h"

namespace {

template <typename T>
T* FindItems(const FindKernelMemory& find, T* items, int64_t count, std::string_view what,
             bool may_be_pinned = false) {
  const int64_t size_bytes = count * static_cast<int64_t>(sizeof(T));
  return reinterpret_cast<T*>(find(items, size_bytes, may_be_pinned, what));
}

// One tile of a table, with all addresses as the CPU finds them.
struct FoundTile {
  ema::FoldTable table() const { return {&tile, targets.data(), 1, non_finite}; }

  ema::FoldTile tile;
  std::vector<ema::DeviceFoldTarget> targets;
  uint32_t* non_finite = nullptr;
};

FoundTile FindTile(const FindKernelMemory& find, const ema::FoldTable& table, int64_t index) {
  FoundTile found;
  ema::FoldTile& tile = found.tile;
  tile = *FindItems(find, table.tiles + index, 1, "a table's tiles");
  const int64_t count = tile.end - tile.begin;
  // Of `data` is used what begins `skipped_bytes` behind it, or before.
  const auto move = [&](auto*& data, int64_t skipped_bytes, int64_t element_bytes,
                        std::string_view what) {
    data = find(data + skipped_bytes, count * element_bytes, false, what) - skipped_bytes;
  };
  move(tile.source, int64_t{tile.begin} * tile.element_bytes, tile.element_bytes,
       "a tile's source");
  const ema::DeviceFoldTarget* const targets =
      FindItems(find, table.targets + tile.first_target, tile.target_count, "a table's targets");
  found.targets.assign(targets, targets + tile.target_count);
  tile.first_target = 0;
  for (ema::DeviceFoldTarget& target : found.targets) {
    const int64_t stored = ema::FoldTarget{.kind = target.kind}.StoredBytes(tile.element_bytes);
    const int64_t skipped = (tile.target_offset + tile.begin) * stored;
    move(target.next, skipped, stored, "a target's next");
    if (!ema::IsAverage(target.kind) && !ema::IsMean(target.kind)) continue;
    move(target.current, skipped, stored, "a target's current");
  }
  for (int t = 0; t < tile.target_count; ++t) {
    const ema::DeviceFoldTarget target = found.targets[t];
    if (target.more_weights == 0) continue;
    found.targets[t].first_weight = static_cast<int32_t>(found.targets.size());
    const ema::DeviceFoldTarget* const weights = FindItems(
        find, table.targets + target.first_weight, target.more_weights, "a mean's targets");
    const int64_t stored = ema::FoldTarget{.kind = target.kind}.StoredBytes(tile.element_bytes);
    for (int j = 0; j < target.more_weights; ++j) {
      found.targets.push_back(weights[j]);
      move(found.targets.back().current, (tile.target_offset + tile.begin) * stored, stored,
           "an earlier weight of a mean");
    }
  }
  if (table.non_finite != nullptr) {
    found.non_finite =
        FindItems(find, table.non_finite + tile.note, 1, "a note of what is not finite", true);
  }
  tile.note = 0;
  return found;
}

int64_t BytesOf(ema::SourceFormat format) {
  switch (format) {
    case ema::SourceFormat::kFloat16:
    case ema::SourceFormat::kBFloat16:
      return 2;
    case ema::SourceFormat::kFloat64:
      return 8;
    default:
      return 4;
  }
}

// The runs of a table, with all addresses as the CPU finds them.
std::vector<ema::DeviceSumRun> FindRuns(const FindKernelMemory& find, const ema::SumTable& table) {
  const ema::DeviceSumRun* const runs =
      FindItems(find, table.runs, table.run_count, "the runs of sums");
  std::vector<ema::DeviceSumRun> found(runs, runs + table.run_count);
  for (ema::DeviceSumRun& run : found) {
    run.average = find(run.average, run.element_count * (run.is_float64 ? 8 : 4), false,
                       "an average that is summed");
    if (run.raw_format == ema::SourceFormat::kNoFloat) continue;
    run.raw =
        find(run.raw, run.element_count * BytesOf(run.raw_format), false, "raw values of a sum");
  }
  return found;
}

}  // namespace

std::function<void(std::minstd_rand&)> FakeKernelWork(const FakeLaunch& launch,
                                                      const FindKernelMemory& find) {
  constexpr unsigned kMaxBlocks = 0x7fffffff;
  const auto is_flat = [](const dim3& of) { return of.y == 1 && of.z == 1; };
  const auto is_launch_of = [&](std::string_view name, int threads) {
    return launch.kernel.find(name) != std::string::npos &&
           launch.block.x == static_cast<unsigned>(threads);
  };
  if (launch.grid.x < 1 || launch.grid.x > kMaxBlocks || !is_flat(launch.grid) ||
      !is_flat(launch.block) || launch.shared_bytes != 0) {
    return nullptr;
  }
  const int64_t grid = launch.grid.x;
  if (is_launch_of("FoldKernel", ema::kFoldThreads)) {
    const auto table = *static_cast<const ema::FoldTable*>(launch.arguments[0]);
    return [=](std::minstd_rand& random) {
      FoundTile found;
      int64_t found_index = -1;
      ema::WalkGrid(grid, ema::kFoldThreads, random, [&](int64_t block, int thread) {
        for (int64_t tile = block; tile < table.tile_count; tile += grid) {
          if (tile != found_index) found = FindTile(find, table, found_index = tile);
          ema::FoldOfThread(found.table(), 0, thread);
        }
      });
    };
  }
  if (is_launch_of("SumKernel", ema::kSumThreads)) {
    const auto table = *static_cast<const ema::SumTable*>(launch.arguments[0]);
    return [=](std::minstd_rand& random) {
      const std::vector<ema::DeviceSumRun> runs = FindRuns(find, table);
      ema::SumTable found = table;
      found.runs = runs.data();
      found.sums =
          FindItems(find, table.sums, table.block_count * ema::kSumThreads, "the places of sums");
      ema::WalkGrid(grid, ema::kSumThreads, random,
                    [&](int64_t block, int thread) { ema::SumOfThread(found, block, thread); });
    };
  }
  if (is_launch_of("CastKernel", ema::kCastThreads)) {
    const auto cast = *static_cast<const ema::CastRun*>(launch.arguments[0]);
    return [=](std::minstd_rand& random) {
      ema::CastRun found = cast;
      found.from = find(cast.from, cast.element_count * 4, false, "what is cast");
      found.to = find(cast.to, cast.element_count * 2, false, "where a cast goes");
      ema::WalkGrid(grid, ema::kCastThreads, random, [&](int64_t block, int thread) {
        ema::CastOfThread(found, block * ema::kCastThreads + thread, grid * ema::kCastThreads);
      });
    };
  }
  return nullptr;
}
