// SPDX-License-Identifier: Apache-2.0
//
// What a reader gets of one track at one version: its bytes laid end to end.
#ifndef EMA_SERVER_CORE_READING_H_
#define EMA_SERVER_CORE_READING_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ema/manifest.h"
#include "ema/selection.h"
#include "ema/shard.h"
#include "server/core/memory_budget.h"
#include "server/core/snapshot.h"
#include "server/device/device.h"

namespace ema {

struct GlobBudget;

// The selected boxes of a track's tensors in the manifest's order, as StorageLayout places them.
// Where that is how they are stored, or an accelerator has cast them, its memory is given, but for
// chunks that would hold many blocks' copies; what else is cast, cut out, or read from a
// StoredTrack is made on demand, a chunk at a time, and once for all who hold this object, if the
// memory budget has room for all of it (else for each anew). Holds the snapshot, so the version
// stays pinned. Thread-safe.
class Reading {
 public:
  // What a list of tensors, boxes and names may take that no budget counts.
  static constexpr int64_t kFreeBytes = int64_t{1} << 20;
  // Chunks lie at multiples of this. 4 MiB is 2 to 5 % faster on loopback; 1 MiB stays in the
  // second-level cache between the cast and the socket.
  static constexpr int64_t kChunkBytes = int64_t{1} << 20;

  // `track` is one of `snapshot`'s; `manifest`, `device` and `budget` live while that is held.
  // INVALID_ARGUMENT: BAD_REQUEST, a tensor that the track has not, one twice, or a dtype that
  // floats cannot be cast to; BAD_LAYOUT, a box that does not fit its tensor. RESOURCE_EXHAUSTED,
  // MEMORY_BUDGET: it is of so many tensors that `budget` has no room for the list.
  static absl::StatusOr<std::shared_ptr<Reading>> Create(SnapshotRef snapshot,
                                                         const TrackSnapshot& track,
                                                         const Manifest& manifest, Device& device,
                                                         MemoryBudget& budget, Selection selection);

  // What Create() asks of any selection, whatever the tensors: for one that waits until a version
  // is there. INVALID_ARGUMENT, BAD_REQUEST: more than a model can have, or a dtype as above.
  static absl::Status CheckCounts(const Selection& selection);
  // The part of it that needs no Selection to be made.
  static absl::Status CheckCounts(int64_t tensor_count, int64_t slice_count);

  // What its names and boxes take.
  static int64_t BytesOf(const Selection& selection);

  const SnapshotRef& snapshot() const { return snapshot_; }
  const TrackSnapshot& track() const { return track_; }
  const Selection& selection() const { return selection_; }
  // Read() blocks on the disk.
  bool is_stored() const { return track_.stored != nullptr; }
  // False: Read() of the chunk that holds `offset` would wait, for the disk or for a copy from the
  // device. REQUIRES: offset < total_bytes().
  bool IsAtHand(int64_t offset) const;

  int64_t total_bytes() const { return layout().total_bytes(); }
  // What is read of one tensor, and where it lies in the bytes.
  struct Tensor {
    int64_t index = 0;  // In the manifest.
    const StorageLayout::Entry& place;
    const TensorSlice* slice = nullptr;  // Null: all of it.
  };
  void ForEachTensor(absl::FunctionRef<void(const Tensor&)> visit) const;

  // The bytes [offset, offset + length_bytes), in order, in pieces that are valid while their
  // owners are held, and this object. REQUIRES: they are of one chunk. INTERNAL, DEVICE. If
  // is_stored(): as StoredTrack::Read().
  absl::StatusOr<std::vector<HostPiece>> Read(int64_t offset, int64_t length_bytes);

  // CRC32C of `pieces`, which Read() gave from `offset` to the chunk's end. That of a whole chunk
  // is computed once for all who hold this object.
  uint32_t Checksum(int64_t offset, absl::Span<const HostPiece> pieces) const;

  // Where the chunk that holds `offset` ends. REQUIRES: offset < total_bytes().
  int64_t ChunkEnd(int64_t offset) const {
    return std::min((offset / kChunkBytes + 1) * kChunkBytes, total_bytes());
  }
  // False: the chunk that holds `offset` is as it was at `version`, which was committed, or loaded,
  // in this life of the server. Of what is_stored() nothing is known: true.
  bool ChunkChangedSince(int64_t version, int64_t offset) const;

 private:
  // Elements that are contiguous both where they are stored and where they are read.
  struct Run {
    int64_t offset = 0;  // Where they are read.
    int64_t stored_offset = 0;
    int64_t element_count = 0;
    Dtype stored_dtype = Dtype::kFloat32;
    Dtype dtype = Dtype::kFloat32;

    int64_t stored_bytes() const { return element_count * DtypeSize(stored_dtype); }
    int64_t end() const { return offset + element_count * DtypeSize(dtype); }
  };
  struct MadeChunk {
    absl::Mutex mu;  // Held while it is made, which others that want it wait for.
    // Null: it has not been made, or that has failed.
    std::shared_ptr<const std::byte> bytes ABSL_GUARDED_BY(mu);
  };

  // Absent until it is computed. Several may compute it at once: all get the same.
  struct ChunkChecksum {
    static constexpr uint64_t kKnown = uint64_t{1} << 32;
    std::atomic<uint64_t> value = 0;
  };

  Reading(SnapshotRef snapshot, const TrackSnapshot& track, const Manifest& manifest,
          Device& device, Selection selection)
      : snapshot_(std::move(snapshot)),
        track_(track),
        manifest_(manifest),
        device_(device),
        selection_(std::move(selection)) {}

  bool is_as_stored() const { return selection_.is_default(); }
  const StorageLayout& layout() const { return is_as_stored() ? track_.track->layout() : layout_; }
  // Finds which elements the selection takes, and in which layout they are read. For a selection
  // that is not the default.
  absl::Status Select();
  // Host memory of what Select() has found, and of the header that lists it.
  int64_t ListBytes() const;
  absl::Status SelectSlices(GlobBudget& budget,
                            absl::btree_map<int64_t, const TensorSlice*>& selected) const;
  // The runs whose bytes make up [offset, end) as it is read. Where all is read as it is stored,
  // one run of bytes. REQUIRES: neither end lies inside an element.
  std::vector<Run> RunsIn(int64_t offset, int64_t end) const;
  absl::StatusOr<std::shared_ptr<const std::byte>> MakeChunk(int64_t chunk,
                                                             absl::Span<const Run> runs) const;
  // Reads bytes as they are stored, into one piece of memory.
  absl::StatusOr<std::shared_ptr<const std::byte>> ReadChunk(int64_t offset,
                                                             int64_t length_bytes) const;
  // Called with the elements of each run, in order, in one or more pieces, none of which ends
  // inside an element. `dtype` says what they are: the stored dtype, or already that which is read.
  using RunVisitor =
      absl::FunctionRef<void(const Run&, std::span<const std::byte> bytes, Dtype dtype)>;
  absl::Status VisitRuns(absl::Span<const Run> runs, RunVisitor visit) const;
  // REQUIRES: !is_stored().
  absl::Status VisitRunsInBlocks(absl::Span<const Run> runs, RunVisitor visit) const;
  // What an accelerator casts the elements of a run to; absent: it gives them as they are stored.
  std::optional<Dtype> CastOf(const Run& run) const;
  // True: the bytes [offset, end), whose runs these are, can be sent from where they lie, which
  // ReadInPlace() says.
  bool AreInPlace(absl::Span<const Run> runs, int64_t offset, int64_t end) const;
  // What an accelerator copies for `runs` is as much as one block and their own bytes. The memory
  // formula counts that for each reader, which holds it until gRPC has sent the chunk; a few bytes
  // here and there may be of many blocks.
  bool HoldsLittle(absl::Span<const Run> runs) const;
  absl::StatusOr<std::vector<HostPiece>> ReadInPlace(absl::Span<const Run> runs, int64_t offset,
                                                     int64_t length_bytes) const;
  // Whether `is_so` of each block that `runs` are in, and what it is cast to. One that many runs in
  // a row are in, such as the rows of a box, is asked about once.
  bool AllBlocks(absl::Span<const Run> runs,
                 absl::FunctionRef<bool(int64_t block, std::optional<Dtype> cast)> is_so) const;

  const SnapshotRef snapshot_;
  const TrackSnapshot& track_;
  const Manifest& manifest_;
  Device& device_;
  const Selection selection_;
  // Of a part, by the tensors' order in it. What is read as it is stored needs none of these.
  RankLayout boxes_;
  StorageLayout layout_;
  std::vector<const TensorSlice*> slices_;
  std::unique_ptr<MemoryBudget::Reservation> list_memory_;  // Null: it is short.
  std::unique_ptr<MemoryBudget::Reservation> reservation_;
  std::unique_ptr<MadeChunk[]> made_chunks_;  // Null: nothing is kept.
  std::unique_ptr<ChunkChecksum[]> checksums_;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_READING_H_
