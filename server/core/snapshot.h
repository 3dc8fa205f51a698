// SPDX-License-Identifier: Apache-2.0
//
// The immutable weights of one version, and the record of how it came about.
#ifndef EMA_SERVER_CORE_SNAPSHOT_H_
#define EMA_SERVER_CORE_SNAPSHOT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ema/schedule.h"
#include "ema/version.h"
#include "server/core/track.h"
#include "server/device/device.h"

namespace ema {

// Blocks as Track cuts them.
using Blocks = std::vector<BlockRef>;

// A piece of a track's bytes in host memory, valid while `owner` is held.
struct HostPiece {
  std::shared_ptr<const std::byte> owner;
  std::span<const std::byte> bytes;
};

// The bytes of a track that are in a checkpoint's files instead of in blocks. Thread-safe.
class StoredTrack {
 public:
  virtual ~StoredTrack() = default;

  // The bytes [offset, offset + length_bytes) of the track as its StorageLayout places them, in
  // order and verified; bytes between tensors are zero. Waits for the disk. REQUIRES: the range is
  // inside the layout. DATA_LOSS, CHECKPOINT_CORRUPT: names the tensor. UNAVAILABLE: the disk
  // failed.
  virtual absl::StatusOr<std::vector<HostPiece>> Read(int64_t offset, int64_t length_bytes) = 0;
};

// Shared by the versions that keep the same weights.
using BlocksRef = std::shared_ptr<const Blocks>;

// One track at one version: its values and the state of its schedules.
struct TrackSnapshot {
  TrackRef track;
  Blocks blocks;
  // The bytes of a version that is read from the disk, which has no blocks; else null.
  std::shared_ptr<StoredTrack> stored;
  // Only for a track with mean_of_last=k: the weights of the last k - 1 updates (of all updates, if
  // these are fewer), oldest first. Up to the first update after ema_start: the track's values.
  std::vector<BlocksRef> latest_weights;
  // At which version each block was made; 0: before the server started.
  std::vector<int64_t> block_versions;
  TrackState state;
  // The trainer's step of the last update, for each schedule.
  std::vector<int64_t> last_steps;
  // The digest of the frozen tensors that the average equals bit for bit, but for the sign of 0.
  // See NextSnapshot::FrozenDigest(). 0: none.
  int64_t frozen_digest = 0;
};

// All tracks of a model at one version; a track that has no value yet is not among them. Immutable,
// so any thread may read it; exists while it is referenced. Blocks that did not change are
// shared with other versions.
struct Snapshot {
  Version record;
  std::vector<TrackSnapshot> tracks;
  // The digest of the frozen tensors that the run record.run_epoch pushed last; 0: none.
  int64_t frozen_digest = 0;

  // Null: there is no such track.
  const TrackSnapshot* Find(std::string_view name) const;
  const TrackSnapshot* FindId(int64_t track_id) const;
};
using SnapshotRef = std::shared_ptr<const Snapshot>;

// Returns the owner of the memory that snapshots are in.
using KeepAlive = std::function<std::shared_ptr<const void>()>;
// Returns the same snapshot as a reference that keeps `owner` alive, and is dropped before it.
SnapshotRef WithOwner(SnapshotRef snapshot, std::shared_ptr<const void> owner);

// The states of a version's tracks, by name; those without a value are not among them.
using TrackStates = std::map<std::string, TrackState, std::less<>>;
TrackStates TrackStatesOf(const Snapshot& version);

// The bytes [offset, offset + length_bytes) of a track's `blocks`, in order, as pieces that need no
// copy on the CPU device. `cast`: the device casts the elements to float16 or bfloat16; the blocks
// must hold only float32s. REQUIRES: the range is inside track.layout().total_bytes(), and cuts no
// element that is cast. INTERNAL, DEVICE: the device has failed.
absl::StatusOr<std::vector<HostPiece>> ReadBlocks(Device& device, const Track& track,
                                                  const Blocks& blocks, int64_t offset,
                                                  int64_t length_bytes,
                                                  std::optional<Dtype> cast = std::nullopt);

// The same bytes of `track`, from its blocks or from the disk. If they are on the disk, waits for
// it, and fails like StoredTrack::Read().
absl::StatusOr<std::vector<HostPiece>> ReadTrack(Device& device, const TrackSnapshot& track,
                                                 int64_t offset, int64_t length_bytes);

// Builds a track's blocks from bytes in host memory (restoring). Thread-safe, but for Finish().
class BlocksWriter {
 public:
  // RESOURCE_EXHAUSTED: no memory.
  static absl::StatusOr<std::unique_ptr<BlocksWriter>> Create(Device& device, const Track& track);

  // The memory of the bytes [offset, offset + length_bytes), for the caller to fill: Write() of
  // these bytes then copies nothing. Empty: the bytes are in device memory, or in more than one
  // block. REQUIRES: as Write().
  std::span<std::byte> InPlace(int64_t offset, int64_t length_bytes) const;

  // REQUIRES: inside track.layout().total_bytes().
  absl::Status Write(int64_t offset, std::span<const std::byte> bytes) ABSL_LOCKS_EXCLUDED(mu_);

  // The blocks, in which bytes that were never written are zero. Ends the writer.
  absl::StatusOr<Blocks> Finish() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
  };

  BlocksWriter(const Track& track, bool is_host, std::vector<std::shared_ptr<Block>> blocks,
               std::unique_ptr<DeviceStream> stream)
      : track_(track), is_host_(is_host), blocks_(std::move(blocks)), stream_(std::move(stream)) {}

  // Calls `visit(memory, length_bytes)` for each block's part of `range`, in order.
  absl::Status ForEachPart(
      Range range, absl::FunctionRef<absl::Status(std::byte* memory, int64_t length_bytes)> visit);

  const Track& track_;
  const bool is_host_;
  const std::vector<std::shared_ptr<Block>> blocks_;
  absl::Mutex mu_;  // Held across calls of the device.
  const std::unique_ptr<DeviceStream> stream_ ABSL_PT_GUARDED_BY(mu_);
  // In the order of the writes; adjacent ranges are merged.
  std::vector<Range> written_ ABSL_GUARDED_BY(mu_);
};

// New blocks for all of a track. RESOURCE_EXHAUSTED: no memory; none stay allocated.
absl::StatusOr<std::vector<std::shared_ptr<Block>>> AllocateBlocks(Device& device,
                                                                   const Track& track);

}  // namespace ema

#endif  // EMA_SERVER_CORE_SNAPSHOT_H_
