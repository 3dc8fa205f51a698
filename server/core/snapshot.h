// SPDX-License-Identifier: Apache-2.0
//
// The immutable weights of one version, and the record of how it came about.
#ifndef EMA_SERVER_CORE_SNAPSHOT_H_
#define EMA_SERVER_CORE_SNAPSHOT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ema/schedule.h"
#include "ema/time.h"
#include "server/core/track.h"
#include "server/device/device.h"

namespace ema {

// Mirrors ema.v1.TrackRecord, which says what each field means.
struct TrackRecord {
  bool updated = false;
  float update_weight = 0;
  double elapsed = 0;
  int64_t update_count = 0;
};

// Mirrors ema.v1.VersionRecord.
struct VersionRecord {
  int64_t incarnation = 0;
  int64_t version = 0;
  int64_t step = 0;
  TrainingTime time;
  int64_t run_epoch = 0;
  std::vector<TrackRecord> tracks;  // As the model's tracks.
  absl::Time commit_time;
};

// One track at one version: its blocks (as Track cuts them) and where its schedule stands.
struct TrackSnapshot {
  std::vector<BlockRef> blocks;
  Schedule::State state;
};

// All tracks of a model at one version. Immutable, so any thread may read it; alive while somebody
// holds a reference. Blocks that did not change are shared with other versions.
struct Snapshot {
  VersionRecord record;
  std::vector<TrackSnapshot> tracks;  // As the model's tracks.
};
using SnapshotRef = std::shared_ptr<const Snapshot>;

// A piece of a track's bytes in host memory, valid while `owner` is held.
struct HostPiece {
  std::shared_ptr<const std::byte> owner;
  std::span<const std::byte> bytes;
};

// The bytes [offset, offset + length_bytes) of a track, in order, as pieces that need no copy on
// the CPU device. REQUIRES: the range is inside track.layout().total_bytes(). INTERNAL, DEVICE: the
// device has failed.
absl::StatusOr<std::vector<HostPiece>> ReadTrack(Device& device, const Track& track,
                                                 const TrackSnapshot& snapshot, int64_t offset,
                                                 int64_t length_bytes);

// Builds a track's blocks from bytes in host memory (restoring). Not thread-safe.
class TrackWriter {
 public:
  // RESOURCE_EXHAUSTED: no memory. Bytes that are never written are zero.
  static absl::StatusOr<std::unique_ptr<TrackWriter>> Create(Device& device, const Track& track);

  // REQUIRES: inside track.layout().total_bytes().
  absl::Status Write(int64_t offset, std::span<const std::byte> bytes);

  // The blocks. Ends the writer.
  absl::StatusOr<std::vector<BlockRef>> Finish();

 private:
  TrackWriter(const Track& track, std::vector<std::shared_ptr<Block>> blocks,
              std::unique_ptr<DeviceStream> stream)
      : track_(track), blocks_(std::move(blocks)), stream_(std::move(stream)) {}

  const Track& track_;
  std::vector<std::shared_ptr<Block>> blocks_;
  std::unique_ptr<DeviceStream> stream_;
};

// New blocks for all of a track. RESOURCE_EXHAUSTED: no memory; none stay allocated.
absl::StatusOr<std::vector<std::shared_ptr<Block>>> AllocateBlocks(Device& device,
                                                                   const Track& track);

}  // namespace ema

#endif  // EMA_SERVER_CORE_SNAPSHOT_H_
