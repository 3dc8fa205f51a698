// SPDX-License-Identifier: Apache-2.0
//
// One average of a model: what it does with each tensor, and how its bytes lie in blocks.
#ifndef EMA_SERVER_CORE_TRACK_H_
#define EMA_SERVER_CORE_TRACK_H_

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "ema/track.h"
#include "server/core/memory_budget.h"

namespace ema {

// A track of a model, shared by the model, its sessions and its snapshots; immutable once it is one
// of them. Its bytes are its StorageLayout cut into blocks of at most `block_bytes`. A large tensor
// has blocks of its own, so that versions between which it does not change share them. An element
// never straddles two blocks.
//
// A track is made in two parts, since a request can ask for more bytes than the server has. The
// constructor makes only tables of one entry for each tensor. AddToModel() makes those of the
// blocks, after the memory for the track's bytes has been reserved.
class Track {
 public:
  // Bytes of the tables for each tensor of the manifest.
  static constexpr int64_t kBytesPerTensor =
      sizeof(TensorAction) + sizeof(int) + sizeof(StorageLayout::Entry) + sizeof(int32_t);

  // Matches the rules' patterns with all tensors, which may take long: not for a caller that holds
  // a lock. `table_memory`: the reservation for the tables; null: none. REQUIRES: ValidateTrack()
  // is OK.
  Track(TrackConfig config, const Manifest& manifest,
        std::shared_ptr<const MemoryBudget::Reservation> table_memory = nullptr)
      : config_(std::move(config)),
        config_text_(TrackText(config_)),
        tables_(std::make_shared<const Tables>(config_, manifest, std::move(table_memory))) {}

  // The same track with other schedules, or paused. REQUIRES: `before` HasFormOf() a track of
  // `config`.
  Track(const Track& before, TrackConfig config) : Track(before) {
    config_ = std::move(config);
    config_text_ = TrackText(config_);
  }

  // `id`: never used for another track of the model. `reservation` holds the memory of all its
  // versions. REQUIRES: called once, before the track is shared; block_bytes is a positive multiple
  // of 4 KiB.
  void AddToModel(int64_t id, std::shared_ptr<const MemoryBudget::Reservation> reservation,
                  int64_t block_bytes) {
    id_ = id;
    reservation_ = std::move(reservation);
    CutIntoBlocks(block_bytes);
  }
  // The part of AddToModel() for a track whose bytes exist already, as on a disk.
  void CutIntoBlocks(int64_t block_bytes) {
    blocks_ = std::make_shared<const BlockTable>(layout(), block_bytes);
  }

  // True: bytes of one track are valid as bytes of the other. REQUIRES: both are of the same
  // manifest.
  bool HasFormOf(const Track& other) const {
    return actions() == other.actions() &&
           tables_->schedule_indices == other.tables_->schedule_indices &&
           SchedulesOf(config_).size() == SchedulesOf(other.config_).size() &&
           config_.dtype == other.config_.dtype &&
           config_.schedule.kept_weights_count() == other.config_.schedule.kept_weights_count();
  }
  // The same for the config of a stored track, whose blocks may have another size.
  bool HasFormOf(const TrackConfig& stored, const Manifest& manifest) const {
    return HasFormOf(Track(stored, manifest));
  }

  // -1: not added to a model.
  int64_t id() const { return id_; }
  const TrackConfig& config() const { return config_; }
  const std::string& name() const { return config_.name; }
  // As shown in version records.
  const std::string& config_text() const { return config_text_; }
  TensorAction action(int64_t tensor_index) const { return tables_->actions[tensor_index]; }
  const std::vector<TensorAction>& actions() const { return tables_->actions; }
  // Index in SchedulesOf(config()) of the tensor's schedule.
  int schedule_index(int64_t tensor_index) const { return tables_->schedule_indices[tensor_index]; }
  const StorageLayout& layout() const { return tables_->layout; }
  // The end of the run of tensors, from this one on, that are adjacent in the track's bytes and
  // that a push treats in the same way.
  int64_t neighbours_end(int64_t tensor_index) const {
    return tables_->neighbours_ends[tensor_index];
  }
  // Memory of `version_count` versions at most, each of which may keep weights of its own;
  // INT64_MAX if it overflows.
  int64_t MemoryBytes(int64_t version_count) const {
    const int64_t copies = version_count * (1 + config_.schedule.kept_weights_count());
    int64_t bytes = 0;
    return __builtin_mul_overflow(layout().total_bytes(), copies, &bytes) ? INT64_MAX : bytes;
  }
  // REQUIRES: added to a model.
  int64_t reserved_bytes() const { return reservation_->bytes(); }

  // This and the functions below REQUIRE that the track has been cut into blocks.
  int64_t block_count() const { return static_cast<int64_t>(blocks_->starts.size()) - 1; }
  // In the track's bytes; `i` == block_count() gives their end.
  int64_t block_start(int64_t i) const { return blocks_->starts[i]; }
  int64_t block_size(int64_t i) const { return blocks_->starts[i + 1] - blocks_->starts[i]; }
  // True: the block holds nothing but float32s, gaps between tensors included.
  bool has_only_float32(int64_t i) const { return blocks_->has_only_float32[i]; }
  // The block that holds `byte` of the track's bytes. REQUIRES: there is one.
  int64_t FindBlock(int64_t byte) const { return blocks_->Find(byte); }

 private:
  // Shared by a track and those that differ from it only in their config.
  struct Tables {
    Tables(const TrackConfig& config, const Manifest& manifest,
           std::shared_ptr<const MemoryBudget::Reservation> memory)
        : memory(std::move(memory)),
          actions(ActionsOf(config, manifest)),
          schedule_indices(ScheduleIndicesOf(config, manifest)),
          layout(manifest, actions, config.dtype),
          neighbours_ends(FindNeighbours()) {}

    std::vector<int32_t> FindNeighbours() const {
      std::vector<int32_t> ends(actions.size());
      for (auto i = std::ssize(ends) - 1; i >= 0; --i) {
        const auto next = i + 1;
        bool continues = next < std::ssize(ends) && actions[i] == actions[next] &&
                         schedule_indices[i] == schedule_indices[next];
        if (continues && layout.entry(i).is_stored) {
          const StorageLayout::Entry& entry = layout.entry(i);
          continues = entry.dtype == layout.entry(next).dtype &&
                      entry.offset + entry.length_bytes == layout.entry(next).offset;
        }
        ends[i] = continues ? ends[next] : static_cast<int32_t>(next);
      }
      return ends;
    }

    std::shared_ptr<const MemoryBudget::Reservation> memory;
    std::vector<TensorAction> actions;
    std::vector<int> schedule_indices;
    StorageLayout layout;
    std::vector<int32_t> neighbours_ends;  // By tensor.
  };

  struct BlockTable {
    BlockTable(const StorageLayout& layout, int64_t block_bytes) {
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
      has_only_float32.assign(starts.size() - 1, true);
      for (const StorageLayout::Entry& entry : layout.entries()) {
        if (entry.length_bytes == 0 || entry.dtype == Dtype::kFloat32) continue;
        const int64_t last = Find(entry.offset + entry.length_bytes - 1);
        for (int64_t i = Find(entry.offset); i <= last; ++i) has_only_float32[i] = false;
      }
    }
    int64_t Find(int64_t byte) const {
      return std::upper_bound(starts.begin(), starts.end(), byte) - starts.begin() - 1;
    }

    std::vector<int64_t> starts;         // And the end.
    std::vector<bool> has_only_float32;  // By block.
  };

  Track(const Track&) = default;

  int64_t id_ = -1;
  TrackConfig config_;
  std::string config_text_;
  std::shared_ptr<const Tables> tables_;
  std::shared_ptr<const BlockTable> blocks_;  // Null until CutIntoBlocks().
  std::shared_ptr<const MemoryBudget::Reservation> reservation_;
};
using TrackRef = std::shared_ptr<const Track>;

}  // namespace ema

#endif  // EMA_SERVER_CORE_TRACK_H_
