// SPDX-License-Identifier: Apache-2.0
#include "server/device/sum_queue.h"

#include <algorithm>
#include <new>

#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr int kSlot = 0;

// Writes `runs` to `table`, where there is room for them; how many tiles they have.
int64_t WriteRuns(std::span<const SumRun> runs, std::byte* table) {
  int64_t tile_count = 0;
  for (const SumRun& run : runs) {
    new (table)
        DeviceSumRun{.average = run.average,
                     .raw = run.raw,
                     .element_count = run.element_count,
                     .first_tile = tile_count,
                     .raw_format = run.raw != nullptr ? static_cast<SourceFormat>(run.raw_dtype)
                                                      : SourceFormat::kNoFloat,
                     .is_float64 = run.average_dtype == Dtype::kFloat64};
    table += sizeof(DeviceSumRun);
    tile_count += SumTileCount(run.element_count);
  }
  return tile_count;
}

}  // namespace

absl::StatusOr<SquareSums> SumOnQueue(Accelerator::Queue& queue, std::span<const SumRun> runs,
                                      const SumMemory& tables, const SumMemory& sums) {
  // So many are at work at once on the smallest GPU that this is for (108 processors): of more, the
  // last would run alone.
  constexpr int64_t kMaxBlocks = 512;
  const int64_t block_count = std::min(
      kMaxBlocks, sums.size_bytes / (kSumThreads * static_cast<int64_t>(sizeof(SquareSums))));
  const int64_t place_count = block_count * kSumThreads;
  const int64_t places_bytes = place_count * static_cast<int64_t>(sizeof(SquareSums));
  const size_t most_runs = static_cast<size_t>(tables.size_bytes) / sizeof(DeviceSumRun);
  EMA_RETURN_IF_ERROR(queue.Zero(sums.device, places_bytes));
  while (!runs.empty()) {
    const std::span<const SumRun> batch = runs.first(std::min(most_runs, runs.size()));
    runs = runs.subspan(batch.size());
    EMA_RETURN_IF_ERROR(queue.Wait(kSlot));  // Until the batch before has been copied.
    const int64_t tile_count = WriteRuns(batch, tables.host);
    EMA_RETURN_IF_ERROR(queue.CopyToDevice(
        tables.device, tables.host, static_cast<int64_t>(batch.size() * sizeof(DeviceSumRun))));
    EMA_RETURN_IF_ERROR(queue.Sum({.runs = reinterpret_cast<const DeviceSumRun*>(tables.device),
                                   .run_count = static_cast<int64_t>(batch.size()),
                                   .tile_count = tile_count,
                                   .block_count = block_count,
                                   .sums = reinterpret_cast<SquareSums*>(sums.device)}));
    EMA_RETURN_IF_ERROR(queue.Mark(kSlot));
  }
  EMA_RETURN_IF_ERROR(queue.CopyToHost(sums.host, sums.device, places_bytes));
  EMA_RETURN_IF_ERROR(queue.Mark(kSlot));
  EMA_RETURN_IF_ERROR(queue.Wait(kSlot));
  SquareSums total;
  const auto* const places = reinterpret_cast<const SquareSums*>(sums.host);
  for (int64_t i = 0; i < place_count; ++i) AddSums(total, places[i]);
  return total;
}

}  // namespace ema
