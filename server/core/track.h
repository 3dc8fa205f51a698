// SPDX-License-Identifier: Apache-2.0
//
// One average of a model: its schedule, and how its bytes lie in blocks.
#ifndef EMA_SERVER_CORE_TRACK_H_
#define EMA_SERVER_CORE_TRACK_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "ema/schedule.h"

namespace ema {

struct TrackConfig {
  std::string name;
  Schedule schedule;
  friend bool operator==(const TrackConfig&, const TrackConfig&) = default;
};

// INVALID_ARGUMENT: no tracks, a bad name, or a name twice.
absl::Status ValidateTracks(const std::vector<TrackConfig>& tracks);

// A track as its model made it. Immutable. The track's bytes are its StorageLayout cut into blocks
// of `block_bytes`, the last one shorter; an element never straddles two of them.
class Track {
 public:
  // REQUIRES: block_bytes is a positive multiple of 4 KiB.
  Track(TrackConfig config, const Manifest& manifest, int64_t block_bytes)
      : config_(std::move(config)),
        layout_(manifest, /*as_pushed=*/config_.schedule.is_copy()),
        block_bytes_(block_bytes) {}

  const TrackConfig& config() const { return config_; }
  const std::string& name() const { return config_.name; }
  const StorageLayout& layout() const { return layout_; }
  int64_t block_bytes() const { return block_bytes_; }
  int64_t block_count() const { return (layout_.total_bytes() + block_bytes_ - 1) / block_bytes_; }
  int64_t block_size(int64_t i) const {
    return std::min(block_bytes_, layout_.total_bytes() - i * block_bytes_);
  }

 private:
  const TrackConfig config_;
  const StorageLayout layout_;
  const int64_t block_bytes_;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_TRACK_H_
