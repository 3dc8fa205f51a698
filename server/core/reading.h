// SPDX-License-Identifier: Apache-2.0
//
// The bytes of one track at one version, as a reader gets them.
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
#include "server/kernel/cast.h"

namespace ema {

struct GlobBudget;

// The selected boxes of a track's tensors in the manifest's order, as StorageLayout places them.
// A chunk is served without a copy if its bytes are stored as they are read, or if an accelerator
// casts them, unless these bytes are in many blocks. All other chunks (cast, cut out, or read from
// a StoredTrack) are made on demand: once for all holders of this object if the memory budget has
// room for all of them, otherwise once for each read. Holds the snapshot, so the version stays
// pinned. Thread-safe.
class Reading {
 public:
  // Tables of tensors, boxes and names up to this size are not counted by any budget.
  static constexpr int64_t kUnbudgetedBytes = int64_t{1} << 20;
  // The same for a pull's header, which is sent before there is a chunk.
  static constexpr int64_t kUnbudgetedHeaderBytes = int64_t{4} << 20;
  // Chunks begin at multiples of this. 4 MiB is 2 to 5 % faster on loopback; 1 MiB stays in the
  // second-level cache between the cast and the socket.
  static constexpr int64_t kChunkBytes = int64_t{1} << 20;

  // `track` is one of `snapshot`'s; `manifest`, `device` and `budget` live while that is held.
  // INVALID_ARGUMENT: BAD_REQUEST, a tensor that the track lacks, a tensor given twice, or a dtype
  // that floats cannot be cast to; BAD_LAYOUT, a box that does not fit its tensor.
  // RESOURCE_EXHAUSTED, MEMORY_BUDGET: `budget` has no room for the tables of the tensors.
  static absl::StatusOr<std::shared_ptr<Reading>> Create(SnapshotRef snapshot,
                                                         const TrackSnapshot& track,
                                                         const Manifest& manifest, Device& device,
                                                         MemoryBudget& budget, Selection selection);

  // The checks of Create() that need no track, for a selection that waits for its version to be
  // opened. INVALID_ARGUMENT, BAD_REQUEST: more entries than allowed, or a dtype as above.
  static absl::Status CheckCounts(const Selection& selection);
  // The part of it that needs only the counts.
  static absl::Status CheckCounts(int64_t tensor_count, int64_t slice_count);

  // Memory of its names and boxes.
  static int64_t BytesOf(const Selection& selection);

  const SnapshotRef& snapshot() const { return snapshot_; }
  const TrackSnapshot& track() const { return track_; }
  const Selection& selection() const { return selection_; }
  // True: Read() blocks on the disk.
  bool is_stored() const { return track_.stored != nullptr; }
  // False: Read() of the chunk that holds `offset` would wait, for the disk or for a copy from the
  // device. REQUIRES: offset < total_bytes().
  bool CanReadWithoutWaiting(int64_t offset) const;

  int64_t total_bytes() const { return layout().total_bytes(); }
  // The part of one tensor that is read, and where it lies in the bytes.
  struct Tensor {
    int64_t index = 0;  // In the manifest.
    const StorageLayout::Entry& place;
    const TensorSlice* slice = nullptr;  // Null: all of it.
  };
  void ForEachTensor(absl::FunctionRef<void(const Tensor&)> visit) const;
  // Reserves the memory of one pull header, which lists these tensors. Null: none is needed.
  // RESOURCE_EXHAUSTED, MEMORY_BUDGET.
  absl::StatusOr<std::unique_ptr<MemoryBudget::Reservation>> ReserveHeader() const;

  // The bytes [offset, offset + length_bytes), in order, in pieces that are valid while both their
  // owners and this object are held. REQUIRES: the range is inside one chunk. INVALID_ARGUMENT,
  // BAD_REQUEST: a value overflows in the cast, see OverflowPolicy. INTERNAL, DEVICE. If
  // is_stored(): errors as StoredTrack::Read().
  absl::StatusOr<std::vector<HostPiece>> Read(int64_t offset, int64_t length_bytes);

  // CRC32C of `pieces`, which Read() gave from `offset` to the chunk's end. Computed once for a
  // whole chunk, for all holders of this object.
  uint32_t Checksum(int64_t offset, absl::Span<const HostPiece> pieces) const;

  // Where the chunk that holds `offset` ends. REQUIRES: offset < total_bytes().
  int64_t ChunkEnd(int64_t offset) const {
    return std::min((offset / kChunkBytes + 1) * kChunkBytes, total_bytes());
  }
  // False: the chunk that holds `offset` has not changed since `version`, which was committed or
  // loaded since the server's start. Always true if is_stored(), whose history is unknown.
  bool ChunkChangedSince(int64_t version, int64_t offset) const;

 private:
  // Elements that are contiguous both where they are stored and where they are read.
  struct Run {
    int64_t offset = 0;  // In the bytes that are read.
    int64_t stored_offset = 0;
    int64_t element_count = 0;
    Dtype stored_dtype = Dtype::kFloat32;
    Dtype dtype = Dtype::kFloat32;

    int64_t stored_bytes() const { return element_count * DtypeSize(stored_dtype); }
    int64_t end() const { return offset + element_count * DtypeSize(dtype); }
  };
  struct CachedChunk {
    absl::Mutex mu;  // Held while the chunk is made: other readers wait for it.
    // Null: it has not been made, or making it failed.
    std::shared_ptr<const std::byte> bytes ABSL_GUARDED_BY(mu);
  };

  // What has been found out about a chunk. Several threads may do so at once, with the same result.
  struct ChunkFacts {
    static constexpr uint64_t kKnown = uint64_t{1} << 32;
    std::atomic<uint64_t> checksum = 0;  // 0: not computed.
    std::atomic<bool> has_no_overflow = false;
  };

  Reading(SnapshotRef snapshot, const TrackSnapshot& track, const Manifest& manifest,
          Device& device, MemoryBudget& budget, Selection selection)
      : snapshot_(std::move(snapshot)),
        track_(track),
        manifest_(manifest),
        device_(device),
        budget_(budget),
        selection_(std::move(selection)) {}

  bool is_as_stored() const { return selection_.is_default(); }
  const StorageLayout& layout() const { return is_as_stored() ? track_.track->layout() : layout_; }
  // Resolves a selection other than the default: the boxes, and the layout in which they are read.
  absl::Status Select();
  // Host memory of the result of Select(), and of what was read from the disk to open the track.
  int64_t TableBytes() const;
  absl::Status SelectSlices(GlobBudget& budget,
                            absl::btree_map<int64_t, const TensorSlice*>& selected) const;
  // The runs whose bytes make up [offset, end) as it is read; one run of bytes if is_as_stored().
  // REQUIRES: neither end lies inside an element.
  std::vector<Run> RunsIn(int64_t offset, int64_t end) const;
  absl::StatusOr<std::shared_ptr<const std::byte>> MakeChunk(int64_t chunk,
                                                             absl::Span<const Run> runs) const;
  // True: the reader does not want infinity in place of values that are too large, and the cast of
  // `run` may have produced infinity.
  bool MustCheckOverflow(const Run& run) const {
    return selection_.overflow != OverflowPolicy::kInfinity &&
           CanOverflow(run.stored_dtype, run.dtype);
  }
  // Applies the selection's OverflowPolicy to `cast`, the elements of `run` as they are read. Waits
  // for the stored ones if there is an infinite element. INVALID_ARGUMENT, BAD_REQUEST: a value is
  // too large.
  absl::Status TreatOverflow(const Run& run, std::byte* cast) const;
  absl::Status OverflowError(const Run& run, int64_t element, double value) const;
  // False: no element of the chunk, which consists of `runs`, has overflowed. REQUIRES:
  // CanReadInPlace().
  absl::StatusOr<bool> MayHaveOverflown(int64_t chunk, absl::Span<const Run> runs) const;
  // Reads bytes as they are stored, into one piece of memory.
  absl::StatusOr<std::shared_ptr<const std::byte>> ReadChunk(int64_t offset,
                                                             int64_t length_bytes) const;
  // Called with the elements of each run, in order, in one or more pieces, none of which ends
  // inside an element. `dtype`: that of `bytes`, either the stored dtype or already the one that is
  // read.
  using RunVisitor =
      absl::FunctionRef<void(const Run&, std::span<const std::byte> bytes, Dtype dtype)>;
  absl::Status VisitRuns(absl::Span<const Run> runs, RunVisitor visit) const;
  // REQUIRES: !is_stored().
  absl::Status VisitRunsInBlocks(absl::Span<const Run> runs, RunVisitor visit) const;
  // The dtype that an accelerator casts the elements of a run to; nullopt: it copies them as
  // stored.
  std::optional<Dtype> CastOf(const Run& run) const;
  // True: ReadInPlace() can give the bytes [offset, end), which consist of `runs`, without a copy
  // by this class.
  bool CanReadInPlace(absl::Span<const Run> runs, int64_t offset, int64_t end) const;
  // True: an accelerator's copies of the blocks that `runs` are in take at most one block and a
  // chunk. The memory formula counts that much per reader, which holds the copies until gRPC has
  // sent the chunk; scattered runs may be in many blocks.
  bool FitsReaderMemory(absl::Span<const Run> runs) const;
  absl::StatusOr<std::vector<HostPiece>> ReadInPlace(absl::Span<const Run> runs, int64_t offset,
                                                     int64_t length_bytes) const;
  // Whether `predicate` is true of each block that `runs` are in, and the dtype that it is cast to.
  // Asks only once about a block that consecutive runs share, such as the rows of a box.
  bool AllBlocks(absl::Span<const Run> runs,
                 absl::FunctionRef<bool(int64_t block, std::optional<Dtype> cast)> predicate) const;

  const SnapshotRef snapshot_;
  const TrackSnapshot& track_;
  const Manifest& manifest_;
  Device& device_;
  MemoryBudget& budget_;
  const Selection selection_;
  // The result of Select(), in the order of the tensors read; unused if is_as_stored().
  RankLayout boxes_;
  StorageLayout layout_;
  std::vector<const TensorSlice*> slices_;
  std::unique_ptr<MemoryBudget::Reservation> table_memory_;  // Null: the tables are small.
  std::unique_ptr<MemoryBudget::Reservation> reservation_;
  std::unique_ptr<CachedChunk[]> cached_chunks_;  // Null: made chunks are not kept.
  std::unique_ptr<ChunkFacts[]> facts_;           // One for each chunk.
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_READING_H_
