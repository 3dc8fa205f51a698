// SPDX-License-Identifier: Apache-2.0
//
// The run of one trainer: which ranks it has, and which shards each of them pushes.
#ifndef EMA_SERVER_CORE_TRAINER_RUN_H_
#define EMA_SERVER_CORE_TRAINER_RUN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "ema/shard.h"
#include "server/core/memory_budget.h"

namespace ema {

// How many missing ranks a message, and QueryPushResponse.missing_ranks, name.
inline constexpr int64_t kNamedRanks = 16;

// Collects the layouts of a run's ranks until they cover the manifest exactly once. Not
// thread-safe: its model locks it. Once ready() it does not change any more.
class TrainerRun {
 public:
  // Layouts up to this size together are not counted by any budget.
  static constexpr int64_t kUnbudgetedBytes = int64_t{1} << 20;

  // `manifest` outlives the run. `memory` counts the layouts' bytes beyond kUnbudgetedBytes; null:
  // they are not counted. INVALID_ARGUMENT: launch_id or world_size out of range.
  static absl::StatusOr<std::unique_ptr<TrainerRun>> Create(
      const Manifest* manifest, std::string launch_id, int64_t epoch, int64_t world_size,
      std::shared_ptr<MemoryBudget> memory = nullptr);

  // Joins a rank. The same layout again is OK. INVALID_ARGUMENT: rank or world_size does not fit,
  // another layout than this rank joined with, or another wire dtype than the other ranks'. When
  // the last rank joins, the layouts of all ranks are compared: LAYOUT_OVERLAP, two ranks hold an
  // element; LAYOUT_HOLE, no rank holds it; BAD_LAYOUT, a tensor is frozen on one rank, but not on
  // another, or is cut too irregularly to be compared. The message names the tensor and, if two
  // conflict, both ranks. RESOURCE_EXHAUSTED, MEMORY_BUDGET. On an error the rank has not joined,
  // and the ranks that have get the same error, until it joins.
  absl::Status Join(int64_t rank, int64_t world_size, RankLayout layout);

  const std::string& launch_id() const { return launch_id_; }
  int64_t epoch() const { return epoch_; }
  int64_t world_size() const { return static_cast<int64_t>(layouts_.size()); }
  bool is_ready() const { return joined_count_ == world_size(); }
  // Why a rank could not join. OK: none failed, or it has joined since.
  const absl::Status& failure() const { return failure_; }
  // Ranks that have not joined, at most `limit`.
  std::vector<int64_t> MissingRanks(int64_t limit) const;
  // Null before the rank has joined.
  const RankLayout* layout(int64_t rank) const { return layouts_[rank].get(); }
  // Tensors that change seldom or never while the run lasts. REQUIRES: is_ready().
  bool has_frozen() const { return !frozen_.empty(); }
  bool is_frozen(int64_t tensor_index) const { return has_frozen() && frozen_[tensor_index]; }
  // Identifies the set of frozen tensors and the dtype in which they are pushed.
  uint32_t frozen_set_digest() const { return frozen_set_digest_; }

 private:
  TrainerRun(const Manifest* manifest, std::string launch_id, int64_t epoch, int64_t world_size,
             std::shared_ptr<MemoryBudget> memory);

  // Joins a rank that has not joined.
  absl::Status Add(int64_t rank, RankLayout layout);

  const Manifest* const manifest_;
  const std::string launch_id_;
  const int64_t epoch_;
  const std::shared_ptr<MemoryBudget> memory_;
  std::vector<std::shared_ptr<const RankLayout>> layouts_;            // By rank.
  int64_t layout_bytes_ = 0;                                          // Memory of layouts_.
  std::vector<std::unique_ptr<MemoryBudget::Reservation>> reserved_;  // For layouts_.
  std::vector<bool> frozen_;  // By tensor, once ready; empty: none.
  uint32_t frozen_set_digest_ = 0;
  absl::Status failure_;
  int64_t failed_rank_ = 0;  // The rank of `failure_`.
  int64_t joined_count_ = 0;
  int64_t first_joined_ = 0;   // The first rank that joined, if any has.
  int64_t first_missing_ = 0;  // The lowest missing rank; kept, as a search of many ranks is slow.
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_TRAINER_RUN_H_
