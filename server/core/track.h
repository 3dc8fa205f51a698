// SPDX-License-Identifier: Apache-2.0
//
// One average of a model: what it does with each tensor, and how its bytes lie in blocks.
#ifndef EMA_SERVER_CORE_TRACK_H_
#define EMA_SERVER_CORE_TRACK_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ema/manifest.h"
#include "ema/track.h"
#include "server/core/memory_budget.h"

namespace ema {

// A track as its model made it. Immutable; shared by the model, its sessions and its snapshots. The
// track's bytes are its StorageLayout cut into blocks of `block_bytes`, the last one shorter; an
// element never straddles two of them. A compensated track has such blocks twice: the second ones
// hold the low parts.
class Track {
 public:
  // `id`: of no other track that the model ever had. `reservation` holds the memory of all its
  // versions. REQUIRES: block_bytes is a positive multiple of 4 KiB.
  Track(int64_t id, TrackConfig config, const Manifest& manifest, int64_t block_bytes,
        std::shared_ptr<const MemoryBudget::Reservation> reservation)
      : id_(id),
        config_(std::move(config)),
        config_text_(TrackText(config_)),
        actions_(ActionsOf(config_, manifest)),
        layout_(manifest, actions_),
        block_bytes_(block_bytes),
        reservation_(std::move(reservation)) {}

  // The same track with another schedule, or paused. REQUIRES: the same tensors in the same form.
  Track(const Track& before, TrackConfig config) : Track(before) {
    config_ = std::move(config);
    config_text_ = TrackText(config_);
  }

  int64_t id() const { return id_; }
  const TrackConfig& config() const { return config_; }
  const std::string& name() const { return config_.name; }
  // As VersionRecord shows it.
  const std::string& config_text() const { return config_text_; }
  TensorAction action(int64_t tensor_index) const { return actions_[tensor_index]; }
  const std::vector<TensorAction>& actions() const { return actions_; }
  const StorageLayout& layout() const { return layout_; }
  int64_t reserved_bytes() const { return reservation_->bytes(); }
  int64_t block_bytes() const { return block_bytes_; }
  int64_t block_count() const { return (layout_.total_bytes() + block_bytes_ - 1) / block_bytes_; }
  int64_t block_size(int64_t i) const {
    return std::min(block_bytes_, layout_.total_bytes() - i * block_bytes_);
  }

 private:
  Track(const Track&) = default;

  int64_t id_;
  TrackConfig config_;
  std::string config_text_;
  std::vector<TensorAction> actions_;
  StorageLayout layout_;
  int64_t block_bytes_;
  std::shared_ptr<const MemoryBudget::Reservation> reservation_;
};
using TrackRef = std::shared_ptr<const Track>;

}  // namespace ema

#endif  // EMA_SERVER_CORE_TRACK_H_
