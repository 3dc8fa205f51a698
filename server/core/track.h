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

// A track as its model made it. Immutable from BelongToModel() on; shared by the model, its
// sessions and its snapshots. The track's bytes are its StorageLayout cut into blocks of at most
// `block_bytes`; a large tensor has blocks of its own, so that they can be shared by versions
// between which it does not change; an element never straddles two. A compensated track has such
// blocks twice: the second ones hold the low parts.
class Track {
 public:
  // One that no model has yet. Every pattern of a rule is looked for in the manifest, which may
  // take long: to be made without a lock. REQUIRES: ValidateTrack() is OK; block_bytes is a
  // positive multiple of 4 KiB.
  Track(TrackConfig config, const Manifest& manifest, int64_t block_bytes)
      : config_(std::move(config)),
        config_text_(TrackText(config_)),
        actions_(ActionsOf(config_, manifest)),
        schedule_indices_(ScheduleIndicesOf(config_, manifest)),
        layout_(manifest, actions_),
        neighbours_ends_(FindNeighbours()),
        block_starts_(CutIntoBlocks(layout_, block_bytes)),
        has_only_float32_(FindFloat32()) {}

  // The same track with other schedules, or paused. REQUIRES: HasFormOf() one of that config.
  Track(const Track& before, TrackConfig config) : Track(before) {
    config_ = std::move(config);
    config_text_ = TrackText(config_);
  }

  // `id`: of no other track that the model ever had. `reservation` holds the memory of all its
  // versions. REQUIRES: called once, before anybody shares it.
  void BelongToModel(int64_t id, std::shared_ptr<const MemoryBudget::Reservation> reservation) {
    id_ = id;
    reservation_ = std::move(reservation);
  }

  // Its bytes mean the same in the other. REQUIRES: both are of the same manifest.
  bool HasFormOf(const Track& other) const {
    return actions_ == other.actions_ && schedule_indices_ == other.schedule_indices_ &&
           SchedulesOf(config_).size() == SchedulesOf(other.config_).size() &&
           config_.compensated == other.config_.compensated && block_starts_ == other.block_starts_;
  }
  // The same of one that is stored, in whatever blocks.
  bool HasFormOf(const TrackConfig& stored, const Manifest& manifest) const {
    return actions_ == ActionsOf(stored, manifest) &&
           schedule_indices_ == ScheduleIndicesOf(stored, manifest) &&
           SchedulesOf(config_).size() == SchedulesOf(stored).size() &&
           config_.compensated == stored.compensated;
  }

  // -1: no model's.
  int64_t id() const { return id_; }
  const TrackConfig& config() const { return config_; }
  const std::string& name() const { return config_.name; }
  // As Version shows it.
  const std::string& config_text() const { return config_text_; }
  TensorAction action(int64_t tensor_index) const { return actions_[tensor_index]; }
  const std::vector<TensorAction>& actions() const { return actions_; }
  // By which of SchedulesOf(config()) a tensor goes.
  int schedule_index(int64_t tensor_index) const { return schedule_indices_[tensor_index]; }
  const StorageLayout& layout() const { return layout_; }
  // Behind the last of the tensors that go on from this one: what a push does with them is the
  // same, and their bytes are neighbours.
  int64_t neighbours_end(int64_t tensor_index) const { return neighbours_ends_[tensor_index]; }
  // That so many versions take at most; INT64_MAX: more than that.
  int64_t MemoryBytes(int64_t version_count) const {
    int64_t bytes = 0;
    const int64_t copies = (config_.compensated ? 2 : 1) * version_count;
    return __builtin_mul_overflow(layout_.total_bytes(), copies, &bytes) ? INT64_MAX : bytes;
  }
  // REQUIRES: it is a model's.
  int64_t reserved_bytes() const { return reservation_->bytes(); }

  int64_t block_count() const { return static_cast<int64_t>(block_starts_.size()) - 1; }
  // In the track's bytes; `i` == block_count() gives their end.
  int64_t block_start(int64_t i) const { return block_starts_[i]; }
  int64_t block_size(int64_t i) const { return block_starts_[i + 1] - block_starts_[i]; }
  // Every element of it, and between them, is a float32.
  bool has_only_float32(int64_t i) const { return has_only_float32_[i]; }
  // The block that holds `byte` of the track's bytes. REQUIRES: there is one.
  int64_t FindBlock(int64_t byte) const {
    return std::upper_bound(block_starts_.begin(), block_starts_.end(), byte) -
           block_starts_.begin() - 1;
  }

 private:
  Track(const Track&) = default;

  static std::vector<int64_t> CutIntoBlocks(const StorageLayout& layout, int64_t block_bytes) {
    std::vector<int64_t> starts;
    int64_t start = 0;
    const auto cut_until = [&](int64_t end) {
      for (; start < end; start += block_bytes) starts.push_back(start);
      start = end;
    };
    bool is_after_large = false;
    for (const StorageLayout::Entry& entry : layout.entries()) {
      if (entry.length_bytes == 0) continue;
      const bool is_large = entry.length_bytes >= kLargeTensorBytes;
      if (is_large || is_after_large) cut_until(entry.offset);
      is_after_large = is_large;
    }
    cut_until(layout.total_bytes());
    starts.push_back(layout.total_bytes());
    return starts;
  }

  std::vector<int32_t> FindNeighbours() const {
    std::vector<int32_t> ends(actions_.size());
    for (auto i = std::ssize(ends) - 1; i >= 0; --i) {
      const auto next = i + 1;
      bool goes_on = next < std::ssize(ends) && actions_[i] == actions_[next] &&
                     schedule_indices_[i] == schedule_indices_[next];
      if (goes_on && layout_.entry(i).is_stored) {
        const StorageLayout::Entry& entry = layout_.entry(i);
        goes_on = entry.dtype == layout_.entry(next).dtype &&
                  entry.offset + entry.length_bytes == layout_.entry(next).offset;
      }
      ends[i] = goes_on ? ends[next] : static_cast<int32_t>(next);
    }
    return ends;
  }

  std::vector<bool> FindFloat32() const {
    std::vector<bool> found(block_count(), true);
    for (const StorageLayout::Entry& entry : layout_.entries()) {
      if (entry.length_bytes == 0 || entry.dtype == Dtype::kFloat32) continue;
      const int64_t last = FindBlock(entry.offset + entry.length_bytes - 1);
      for (int64_t i = FindBlock(entry.offset); i <= last; ++i) found[i] = false;
    }
    return found;
  }

  int64_t id_ = -1;
  TrackConfig config_;
  std::string config_text_;
  std::vector<TensorAction> actions_;
  std::vector<int> schedule_indices_;
  StorageLayout layout_;
  std::vector<int32_t> neighbours_ends_;  // By tensor.
  std::vector<int64_t> block_starts_;     // And the end.
  std::vector<bool> has_only_float32_;    // By block.
  std::shared_ptr<const MemoryBudget::Reservation> reservation_;
};
using TrackRef = std::shared_ptr<const Track>;

// One of each, that no model has yet.
inline std::vector<std::shared_ptr<Track>> MakeTracks(const std::vector<TrackConfig>& configs,
                                                      const Manifest& manifest,
                                                      int64_t block_bytes) {
  std::vector<std::shared_ptr<Track>> tracks;
  tracks.reserve(configs.size());
  for (const TrackConfig& config : configs) {
    tracks.push_back(std::make_shared<Track>(config, manifest, block_bytes));
  }
  return tracks;
}

}  // namespace ema

#endif  // EMA_SERVER_CORE_TRACK_H_
