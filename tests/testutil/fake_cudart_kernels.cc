// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/fake_cudart_kernels.h"

#include <algorithm>

#include "server/device/cast_run.h"
#include "server/device/fold_table.h"
#include "server/device/sum_table.h"
#include "tests/testutil/walk_grid.h"

namespace {

template <typename T>
void CheckItems(const CheckKernelMemory& check, const T* items, int64_t count,
                std::string_view what) {
  check(items, count * static_cast<int64_t>(sizeof(T)), /*may_be_pinned=*/false, what);
}

void CheckTile(const ema::FoldTable& table, const ema::FoldTile& tile,
               const CheckKernelMemory& check) {
  const int64_t count = tile.end - tile.begin;
  check(tile.source + int64_t{tile.begin} * tile.element_bytes, count * tile.element_bytes, false,
        "a tile's source");
  CheckItems(check, table.targets + tile.first_target, tile.target_count, "a table's targets");
  if (table.non_finite != nullptr) {
    check(table.non_finite + tile.run, sizeof(uint32_t), true, "a note of what is not finite");
  }
  for (int t = 0; t < tile.target_count; ++t) {
    const ema::DeviceFoldTarget& target = table.targets[tile.first_target + t];
    const int64_t stored = target.kind == ema::FoldKind::kCopy ? tile.element_bytes : 4;
    const int64_t first = (tile.target_offset + tile.begin) * stored;
    const auto check_average = [&](const std::byte* data, bool is_used) {
      if (is_used) check(data + first, count * stored, false, "a target of a tile");
    };
    const bool is_average = ema::fold_internal::IsAverage(target.kind);
    const bool is_compensated = ema::fold_internal::IsCompensated(target.kind);
    check_average(target.current, is_average);
    check_average(target.next, true);
    check_average(target.current_low, is_average && is_compensated);
    check_average(target.next_low, is_compensated);
    if (target.differs != nullptr) {
      check(target.differs, sizeof(uint32_t), true, "a note of what differs");
    }
  }
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

void CheckSums(const ema::SumTable& table, const CheckKernelMemory& check) {
  CheckItems(check, table.runs, table.run_count, "the runs of sums");
  CheckItems(check, table.sums, table.block_count * ema::kSumThreads, "the places of sums");
  for (int64_t i = 0; i < table.run_count; ++i) {
    const ema::DeviceSumRun& run = table.runs[i];
    CheckItems(check, run.average, run.element_count, "an average that is summed");
    if (run.raw_format == ema::SourceFormat::kNoFloat) continue;
    check(run.raw, run.element_count * BytesOf(run.raw_format), false, "raw values of a sum");
  }
}

}  // namespace

std::function<void(std::minstd_rand&)> FakeKernelWork(const FakeLaunch& launch,
                                                      const CheckKernelMemory& check) {
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
      CheckItems(check, table.tiles, table.tile_count, "a table's tiles");
      std::for_each_n(table.tiles, table.tile_count,
                      [&](const ema::FoldTile& tile) { CheckTile(table, tile, check); });
      ema::WalkGrid(grid, ema::kFoldThreads, random, [&](int64_t block, int thread) {
        for (int64_t tile = block; tile < table.tile_count; tile += grid) {
          ema::FoldOfThread(table, tile, thread);
        }
      });
    };
  }
  if (is_launch_of("SumKernel", ema::kSumThreads)) {
    const auto table = *static_cast<const ema::SumTable*>(launch.arguments[0]);
    return [=](std::minstd_rand& random) {
      CheckSums(table, check);
      ema::WalkGrid(grid, ema::kSumThreads, random,
                    [&](int64_t block, int thread) { ema::SumOfThread(table, block, thread); });
    };
  }
  if (is_launch_of("CastKernel", ema::kCastThreads)) {
    const auto cast = *static_cast<const ema::CastRun*>(launch.arguments[0]);
    return [=](std::minstd_rand& random) {
      check(cast.from, cast.element_count * 4, false, "what is cast");
      check(cast.to, cast.element_count * 2, false, "where a cast goes");
      ema::WalkGrid(grid, ema::kCastThreads, random, [&](int64_t block, int thread) {
        ema::CastOfThread(cast, block * ema::kCastThreads + thread, grid * ema::kCastThreads);
      });
    };
  }
  return nullptr;
}
