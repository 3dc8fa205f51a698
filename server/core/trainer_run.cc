// SPDX-License-Identifier: Apache-2.0
#include "server/core/trainer_run.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "include/ema/internal/box_overlap.h"
#include "server/base/crc32c.h"

namespace ema {
namespace {

constexpr int64_t kMaxWorldSize = 65536;
constexpr size_t kMaxLaunchIdBytes = 128;

absl::Status Refuse(ErrorReason reason, const TensorSpec& spec, const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason,
                   absl::StrCat("tensor \"", spec.name, "\": ", message));
}

// Returns by tensor whether it is frozen, if the layouts, by rank, hold each element of the
// manifest once.
absl::StatusOr<std::vector<bool>> CheckLayouts(
    const Manifest& manifest, std::span<const std::shared_ptr<const RankLayout>> layouts) {
  std::vector<HeldBox> boxes;
  std::vector<int64_t> holders(manifest.tensors().size(), -1);  // A rank that holds some of it.
  std::vector<bool> frozen(manifest.tensors().size());
  for (size_t i = 0; i < layouts.size(); ++i) {
    const auto rank = static_cast<int64_t>(i);
    const Shard* const frozen_begin = layouts[i]->frozen_shards().data();
    for (const Shard& shard : layouts[i]->shards()) {
      if (shard.element_count() == 0) continue;
      boxes.push_back({&shard, rank});
      const bool is_frozen = &shard >= frozen_begin;
      int64_t& holder = holders[shard.tensor_index];
      if (holder < 0) {
        holder = rank;
        frozen[shard.tensor_index] = is_frozen;
      } else if (frozen[shard.tensor_index] != is_frozen) {
        return Refuse(
            ErrorReason::kBadLayout, manifest.tensor(shard.tensor_index),
            absl::StrCat("frozen on rank ", is_frozen ? rank : holder, ", but not on rank ",
                         is_frozen ? holder : rank, "; expected the same on all ranks"));
      }
    }
  }
  EMA_RETURN_IF_ERROR(CheckDisjoint(manifest, boxes, "rank"));
  // The boxes share no element, so their sizes show whether any is missing.
  std::vector<int64_t> missing;
  for (const TensorSpec& spec : manifest.tensors()) missing.push_back(spec.element_count());
  for (const HeldBox& box : boxes) missing[box.shard->tensor_index] -= box.shard->element_count();
  for (size_t i = 0; i < missing.size(); ++i) {
    if (missing[i] == 0) continue;
    const TensorSpec& spec = manifest.tensor(static_cast<int64_t>(i));
    return Refuse(
        ErrorReason::kLayoutHole, spec,
        absl::StrCat(missing[i], " of its ", spec.element_count(), " elements are in no shard"));
  }
  return frozen;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TrainerRun>> TrainerRun::Create(
    const Manifest* manifest, std::string launch_id, int64_t epoch, int64_t world_size,
    std::shared_ptr<MemoryBudget> memory) {
  if (launch_id.empty() || launch_id.size() > kMaxLaunchIdBytes) {
    return BadRequest(absl::StrCat("launch_id: ", launch_id.size(), " bytes given, expected 1 to ",
                                   kMaxLaunchIdBytes));
  }
  if (world_size < 1 || world_size > kMaxWorldSize) {
    return BadRequest(
        absl::StrCat("world_size: ", world_size, " given, expected 1 to ", kMaxWorldSize));
  }
  return std::unique_ptr<TrainerRun>(
      new TrainerRun(manifest, std::move(launch_id), epoch, world_size, std::move(memory)));
}

TrainerRun::TrainerRun(const Manifest* manifest, std::string launch_id, int64_t epoch,
                       int64_t world_size, std::shared_ptr<MemoryBudget> memory)
    : manifest_(manifest),
      launch_id_(std::move(launch_id)),
      epoch_(epoch),
      memory_(std::move(memory)),
      layouts_(world_size) {}

absl::Status TrainerRun::Join(int64_t rank, int64_t world_size, RankLayout layout) {
  if (world_size != this->world_size()) {
    return BadRequest(absl::StrCat("world_size: ", world_size,
                                   " given, but the run was opened with ", this->world_size()));
  }
  if (rank < 0 || rank >= world_size) {
    return BadRequest(absl::StrCat("rank: ", rank, " given, expected 0 to ", world_size - 1));
  }
  if (const RankLayout* joined = this->layout(rank); joined != nullptr) {
    if (joined->digest() == layout.digest()) return failure_;
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadLayout,
                     absl::StrCat("rank ", rank,
                                  " has joined this run with another layout; to "
                                  "change it, all ranks open a run with a new launch_id"));
  }
  absl::Status added = Add(rank, std::move(layout));
  if (failure_.ok() || rank == failed_rank_) {
    failure_ = added;
    failed_rank_ = rank;
  }
  return added;
}

absl::Status TrainerRun::Add(int64_t rank, RankLayout layout) {
  if (joined_count_ > 0 && layouts_[first_joined_]->wire_dtype() != layout.wire_dtype()) {
    const WireDtype joined = layouts_[first_joined_]->wire_dtype();
    return MakeError(
        absl::StatusCode::kInvalidArgument, ErrorReason::kBadLayout,
        absl::StrCat("wire_dtype: rank ", rank, " gives ",
                     std::string(WireDtypeName(layout.wire_dtype())), ", but rank ", first_joined_,
                     " joined with ", std::string(WireDtypeName(joined))));
  }
  const auto joining = std::make_shared<const RankLayout>(std::move(layout));
  const int64_t bytes = joining->memory_bytes();
  std::unique_ptr<MemoryBudget::Reservation> reserved;
  if (memory_ != nullptr && layout_bytes_ + bytes > kUnbudgetedBytes) {
    EMA_ASSIGN_OR_RETURN(reserved,
                         memory_->Reserve(absl::StrCat("rank ", rank, "'s layout"), bytes));
  }
  if (joined_count_ + 1 == world_size()) {
    std::vector<std::shared_ptr<const RankLayout>> layouts = layouts_;
    layouts[rank] = joining;
    EMA_ASSIGN_OR_RETURN(frozen_, CheckLayouts(*manifest_, layouts));
    if (std::find(frozen_.begin(), frozen_.end(), true) == frozen_.end()) frozen_.clear();
    std::vector<int64_t> frozen_set = {static_cast<int64_t>(joining->wire_dtype())};
    for (size_t i = 0; i < frozen_.size(); ++i) {
      if (frozen_[i]) frozen_set.push_back(static_cast<int64_t>(i));
    }
    frozen_set_digest_ = Crc32c(0, std::as_bytes(std::span(frozen_set)));
  }
  if (joined_count_ == 0) first_joined_ = rank;
  layouts_[rank] = joining;
  layout_bytes_ += bytes;
  if (reserved != nullptr) reserved_.push_back(std::move(reserved));
  ++joined_count_;
  while (first_missing_ < world_size() && layouts_[first_missing_] != nullptr) ++first_missing_;
  return absl::OkStatus();
}

std::vector<int64_t> TrainerRun::MissingRanks(int64_t limit) const {
  std::vector<int64_t> missing;
  for (int64_t rank = first_missing_; rank < world_size(); ++rank) {
    if (layouts_[rank] != nullptr) continue;
    if (static_cast<int64_t>(missing.size()) == limit) break;
    missing.push_back(rank);
  }
  return missing;
}

}  // namespace ema
