// SPDX-License-Identifier: Apache-2.0
#include "server/core/reading.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "include/ema/internal/tensor_pattern.h"
#include "server/base/crc32c.h"

namespace ema {
namespace {

// Runs of at least this many bytes are sent without a copy. A chunk with shorter runs is copied
// into one buffer.
constexpr int64_t kCopyBelowBytes = int64_t{64} << 10;
constexpr int64_t kMaxGlobs = 256;
constexpr int64_t kMaxSlices = 4096;

absl::Status TooManyTensors(int64_t count) {
  return BadRequest(absl::StrCat("tensors: ", count, " given, expected at most ", kMaxTensorCount,
                                 ", ", kMaxGlobs, " of them with wildcards"));
}

}  // namespace

absl::Status Reading::CheckCounts(int64_t tensor_count, int64_t slice_count) {
  if (tensor_count > kMaxTensorCount) return TooManyTensors(tensor_count);
  if (slice_count <= kMaxSlices) return absl::OkStatus();
  return BadRequest(absl::StrCat("slices: ", slice_count, " given, expected at most ", kMaxSlices));
}

absl::Status Reading::CheckCounts(const Selection& selection) {
  const auto tensor_count = static_cast<int64_t>(selection.tensors.size());
  EMA_RETURN_IF_ERROR(CheckCounts(tensor_count, static_cast<int64_t>(selection.slices.size())));
  if (std::count_if(selection.tensors.begin(), selection.tensors.end(), IsGlob) > kMaxGlobs) {
    return TooManyTensors(tensor_count);
  }
  for (const TensorSlice& slice : selection.slices) {
    const size_t rank = std::max(slice.offsets.size(), slice.extents.size());
    if (rank <= kMaxDimensions) continue;
    return BadRequest(absl::StrCat("slices: \"", absl::CHexEscape(slice.tensor), "\": ", rank,
                                   " dimensions given, expected at most ", kMaxDimensions));
  }
  if (selection.dtype.has_value() && !IsCastTarget(*selection.dtype)) {
    return BadRequest(
        absl::StrCat("dtype: ", std::string(DtypeName(*selection.dtype)),
                     " given, expected float32, float16 or bfloat16; integers stay as they are"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Reading>> Reading::Create(SnapshotRef snapshot,
                                                         const TrackSnapshot& track,
                                                         const Manifest& manifest, Device& device,
                                                         MemoryBudget& budget,
                                                         Selection selection) {
  EMA_RETURN_IF_ERROR(CheckCounts(selection));
  std::shared_ptr<Reading> reading(
      new Reading(std::move(snapshot), track, manifest, device, budget, std::move(selection)));
  if (!reading->is_as_stored()) EMA_RETURN_IF_ERROR(reading->Select());
  if (const int64_t bytes = reading->TableBytes(); bytes > kUnbudgetedBytes) {
    EMA_ASSIGN_OR_RETURN(reading->table_memory_,
                         budget.Reserve("a pull with that many tensors", bytes));
  }
  const int64_t total_bytes = reading->total_bytes();
  const int64_t chunk_count = (total_bytes + kChunkBytes - 1) / kChunkBytes;
  reading->facts_ = std::make_unique<ChunkFacts[]>(chunk_count);
  if (reading->is_stored() || reading->selection_.dtype.has_value() ||
      !reading->selection_.slices.empty()) {
    auto reserved = budget.Reserve("data that is read, cast or sliced for readers", total_bytes);
    if (reserved.ok()) {
      reading->reservation_ = *std::move(reserved);
      reading->cached_chunks_ = std::make_unique<CachedChunk[]>(chunk_count);
    }
  }
  return reading;
}

absl::Status Reading::Select() {
  const Track& track = *track_.track;
  const auto is_stored = [&track](int64_t tensor) {
    return track.layout().entry(tensor).is_stored;
  };
  absl::btree_map<int64_t, const TensorSlice*> selected;  // Null: the whole tensor.
  if (selection_.selects_all()) {
    for (int64_t i = 0; i < manifest_.tensor_count(); ++i) {
      if (is_stored(i)) selected[i] = nullptr;
    }
  }
  GlobBudget budget;
  for (const std::string& pattern : selection_.tensors) {
    const absl::StatusOr<std::vector<int64_t>> matches = FindTensors(pattern, manifest_, budget);
    if (!matches.ok()) return BadRequest(absl::StrCat("tensors: ", matches.status().message()));
    if (std::none_of(matches->begin(), matches->end(), is_stored)) {
      return BadRequest(absl::StrCat("tensors: \"", absl::CHexEscape(pattern), "\": track \"",
                                     track.name(), "\" ignores every tensor of that name"));
    }
    for (const int64_t i : *matches) {
      if (is_stored(i)) selected[i] = nullptr;
    }
  }
  EMA_RETURN_IF_ERROR(SelectSlices(budget, selected));

  std::vector<Shard> boxes;
  boxes.reserve(selected.size());
  for (const auto& [i, slice] : selected) {
    boxes.push_back(slice != nullptr ? Shard{i, slice->offsets, slice->extents}
                                     : WholeTensor(manifest_, i));
    slices_.push_back(slice);
  }
  absl::StatusOr<RankLayout> layout = RankLayout::Create(manifest_, std::move(boxes));
  if (!layout.ok()) return WithPrefix(layout.status(), "slices: ");
  boxes_ = *std::move(layout);
  for (const Shard& box : boxes_.shards()) {
    const Dtype stored = track.layout().entry(box.tensor_index).dtype;
    const Dtype dtype = IsFloat(stored) ? selection_.dtype.value_or(stored) : stored;
    layout_.Append(dtype, box.element_count() * DtypeSize(dtype));
  }
  return absl::OkStatus();
}

absl::Status Reading::SelectSlices(GlobBudget& budget,
                                   absl::btree_map<int64_t, const TensorSlice*>& selected) const {
  for (const TensorSlice& slice : selection_.slices) {
    const absl::StatusOr<std::vector<int64_t>> matches =
        FindTensors(slice.tensor, manifest_, budget);
    if (!matches.ok()) return BadRequest(absl::StrCat("slices: ", matches.status().message()));
    const int64_t tensor = matches->front();
    const bool is_stored = track_.track->layout().entry(tensor).is_stored;
    const TensorSlice*& place = selected[tensor];
    if (matches->size() == 1 && is_stored && place == nullptr) {
      place = &slice;
      continue;
    }
    return BadRequest(absl::StrCat("slices: \"", absl::CHexEscape(slice.tensor),
                                   matches->size() > 1
                                       ? "\" matches several tensors; expected the name of one"
                                   : !is_stored ? "\" is a tensor that the track ignores"
                                                : "\" is given twice; pull each box by itself"));
  }
  return absl::OkStatus();
}

int64_t Reading::BytesOf(const Selection& selection) {
  size_t bytes = 0;
  for (const std::string& name : selection.tensors) bytes += sizeof(std::string) + name.capacity();
  for (const TensorSlice& slice : selection.slices) {
    bytes += sizeof(slice) + slice.tensor.capacity() + 2 * sizeof(int64_t) * slice.offsets.size();
  }
  return static_cast<int64_t>(bytes);
}

int64_t Reading::TableBytes() const {
  // Of an open file's tensor, beside its name: where it lies, its checksums, and its place in a
  // second layout.
  constexpr int64_t kStoredBytes = 200;
  int64_t bytes = 0;
  if (is_stored()) {
    for (const TensorSpec& tensor : manifest_.tensors()) {
      bytes += Track::kBytesPerTensor + kStoredBytes + static_cast<int64_t>(tensor.name.size());
    }
  }
  if (is_as_stored()) return bytes;
  constexpr int64_t kBoxBytes = sizeof(StorageLayout::Entry) + sizeof(void*);
  return bytes + boxes_.memory_bytes() + BytesOf(selection_) +
         static_cast<int64_t>(boxes_.shards().size()) * kBoxBytes;
}

absl::StatusOr<std::unique_ptr<MemoryBudget::Reservation>> Reading::ReserveHeader() const {
  constexpr int64_t kTensorBytes = 128;  // In the message, beside its names.
  int64_t bytes = 0;
  ForEachTensor([&](const Tensor& tensor) {
    const TensorSpec& spec = manifest_.tensor(tensor.index);
    bytes += kTensorBytes + static_cast<int64_t>(spec.name.size());
    for (const std::string& alias : spec.aliases) bytes += static_cast<int64_t>(alias.size());
  });
  if (bytes <= kUnbudgetedHeaderBytes) return nullptr;
  return budget_.Reserve("the header of a pull with that many tensors", bytes);
}

void Reading::ForEachTensor(absl::FunctionRef<void(const Tensor&)> visit) const {
  const absl::Span<const StorageLayout::Entry> entries = layout().entries();
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i].is_stored) continue;
    if (is_as_stored()) {
      visit({static_cast<int64_t>(i), entries[i]});
    } else {
      visit({boxes_.shards()[i].tensor_index, entries[i], slices_[i]});
    }
  }
}

std::vector<Reading::Run> Reading::RunsIn(int64_t offset, int64_t end) const {
  if (is_as_stored()) return {{offset, offset, end - offset, Dtype::kUInt8, Dtype::kUInt8}};
  const absl::Span<const StorageLayout::Entry> entries = layout_.entries();
  std::vector<Run> runs;
  auto entry = std::partition_point(entries.begin(), entries.end(), [offset](const auto& e) {
    return e.offset + e.length_bytes <= offset;
  });
  for (; entry != entries.end() && entry->offset < end; ++entry) {
    const int64_t from = std::max(offset, entry->offset);
    const int64_t count =
        (std::min(end, entry->offset + entry->length_bytes) - from) / DtypeSize(entry->dtype);
    if (count <= 0) continue;
    const int64_t i = entry - entries.begin();
    const int64_t tensor = boxes_.shards()[i].tensor_index;
    const StorageLayout::Entry& stored = track_.track->layout().entry(tensor);
    // The boxes count bytes of the dtype that was pushed.
    const int64_t pushed_size = DtypeSize(manifest_.tensor(tensor).dtype);
    const int64_t first = (from - entry->offset) / DtypeSize(entry->dtype);
    int64_t at = from;
    boxes_.ForEachRange(
        boxes_.shard_start(i) + first * pushed_size, count * pushed_size,
        [&](const RankLayout::ContiguousRange& contiguous) {
          runs.push_back({at, stored.offset + contiguous.tensor_element * DtypeSize(stored.dtype),
                          contiguous.element_count, stored.dtype, entry->dtype});
          at = runs.back().end();
          return true;
        });
  }
  return runs;
}

absl::StatusOr<std::shared_ptr<const std::byte>> Reading::MakeChunk(
    int64_t chunk, absl::Span<const Run> runs) const {
  const int64_t start = chunk * kChunkBytes;
  const int64_t length = std::min(kChunkBytes, total_bytes() - start);
  std::shared_ptr<std::byte[]> bytes(new std::byte[length]);
  std::byte* to = bytes.get();  // Behind what has been filled.
  const auto take = [&](const Run& run, std::span<const std::byte> piece, Dtype dtype) {
    std::byte* const run_begin = bytes.get() + run.offset - start;
    if (to < run_begin) {
      std::memset(to, 0, run_begin - to);
      to = run_begin;
    }
    const int64_t count = static_cast<int64_t>(piece.size()) / DtypeSize(dtype);
    if (dtype == run.dtype) {
      std::memcpy(to, piece.data(), piece.size());
    } else {
      CastOnCpu(dtype, piece.data(), run.dtype, to, count);
    }
    to += count * DtypeSize(run.dtype);
  };
  EMA_RETURN_IF_ERROR(VisitRuns(runs, take));
  std::memset(to, 0, bytes.get() + length - to);
  for (const Run& run : runs) {
    EMA_RETURN_IF_ERROR(TreatOverflow(run, bytes.get() + run.offset - start));
  }
  return std::shared_ptr<const std::byte>(bytes, bytes.get());
}

absl::Status Reading::TreatOverflow(const Run& run, std::byte* cast) const {
  if (!MustCheckOverflow(run)) return absl::OkStatus();
  int64_t i = FindInfinity(run.dtype, cast, 0, run.element_count);
  if (i == run.element_count) return absl::OkStatus();
  EMA_ASSIGN_OR_RETURN(const auto stored, ReadChunk(run.stored_offset, run.stored_bytes()));
  for (; i < run.element_count; ++i) {
    if (!std::isinf(ValueAt(run.dtype, cast, i))) continue;
    const double value = ValueAt(run.stored_dtype, stored.get(), i);
    if (std::isinf(value)) continue;
    if (selection_.overflow == OverflowPolicy::kError) return OverflowError(run, i, value);
    const auto largest = static_cast<float>(std::copysign(LargestValue(run.dtype), value));
    CastOnCpu(Dtype::kFloat32, reinterpret_cast<const std::byte*>(&largest), run.dtype,
              cast + i * DtypeSize(run.dtype), 1);
  }
  return absl::OkStatus();
}

absl::Status Reading::OverflowError(const Run& run, int64_t element, double value) const {
  const absl::Span<const StorageLayout::Entry> entries = layout_.entries();
  const auto entry = std::partition_point(entries.begin(), entries.end(), [&](const auto& e) {
    return e.offset + e.length_bytes <= run.offset;
  });
  const int64_t tensor = boxes_.shards()[entry - entries.begin()].tensor_index;
  const int64_t stored_begin = track_.track->layout().entry(tensor).offset;
  const int64_t first = (run.stored_offset - stored_begin) / DtypeSize(run.stored_dtype);
  const std::string dtype(DtypeName(run.dtype));
  return BadRequest(absl::StrCat("dtype: ", dtype, " given, but element ", first + element,
                                 " of tensor \"", manifest_.tensor(tensor).name, "\" is ", value,
                                 ", and ", dtype, " ends at ", LargestValue(run.dtype),
                                 "; expected a wider dtype, or overflow saturate or inf"));
}

absl::StatusOr<bool> Reading::MayHaveOverflown(int64_t chunk, absl::Span<const Run> runs) const {
  std::atomic<bool>& has_no_overflow = facts_[chunk].has_no_overflow;
  if (has_no_overflow.load(std::memory_order_relaxed) ||
      std::none_of(runs.begin(), runs.end(),
                   [this](const Run& run) { return MustCheckOverflow(run); })) {
    return false;
  }
  const int64_t start = runs.front().offset;
  EMA_ASSIGN_OR_RETURN(const std::vector<HostPiece> pieces,
                       ReadInPlace(runs, start, runs.back().end() - start));
  auto run = runs.begin();
  int64_t at = start;
  for (const HostPiece& piece : pieces) {
    while (at >= run->end()) ++run;
    const auto size = static_cast<int64_t>(piece.bytes.size());
    const int64_t count = size / DtypeSize(run->dtype);
    if (MustCheckOverflow(*run) && FindInfinity(run->dtype, piece.bytes.data(), 0, count) < count) {
      return true;
    }
    at += size;
  }
  has_no_overflow.store(true, std::memory_order_relaxed);
  return false;
}

absl::StatusOr<std::shared_ptr<const std::byte>> Reading::ReadChunk(int64_t offset,
                                                                    int64_t length_bytes) const {
  EMA_ASSIGN_OR_RETURN(const std::vector<HostPiece> pieces,
                       ReadTrack(device_, track_, offset, length_bytes));
  if (pieces.size() == 1) {
    return std::shared_ptr<const std::byte>(pieces[0].owner, pieces[0].bytes.data());
  }
  const std::shared_ptr<std::byte[]> bytes(new std::byte[length_bytes]);
  std::byte* to = bytes.get();
  for (const HostPiece& piece : pieces) {
    to = std::copy(piece.bytes.begin(), piece.bytes.end(), to);
  }
  return std::shared_ptr<const std::byte>(bytes, bytes.get());
}

std::optional<Dtype> Reading::CastOf(const Run& run) const {
  if (device_.is_host() || run.stored_dtype != Dtype::kFloat32 || run.dtype == run.stored_dtype) {
    return std::nullopt;
  }
  const Track& track = *track_.track;
  const int64_t last = track.FindBlock(run.stored_offset + run.stored_bytes() - 1);
  for (int64_t block = track.FindBlock(run.stored_offset); block <= last; ++block) {
    if (!track.has_only_float32(block)) return std::nullopt;
  }
  return run.dtype;
}

absl::Status Reading::VisitRunsInBlocks(absl::Span<const Run> runs, RunVisitor visit) const {
  const Track& track = *track_.track;
  std::shared_ptr<const std::byte> view;  // Of many runs, such as the rows of a box.
  int64_t viewed = -1;
  std::optional<Dtype> viewed_cast;
  for (const Run& run : runs) {
    const std::optional<Dtype> cast = CastOf(run);
    const Dtype dtype = cast.value_or(run.stored_dtype);
    const int64_t ratio = DtypeSize(run.stored_dtype) / DtypeSize(dtype);
    const int64_t run_end = run.stored_offset + run.stored_bytes();
    // No element straddles two blocks.
    for (int64_t at = run.stored_offset; at < run_end;) {
      const int64_t block = track.FindBlock(at);
      if (block != viewed || cast != viewed_cast) {
        EMA_ASSIGN_OR_RETURN(view, device_.HostView(track_.blocks[block], cast));
        viewed = block;
        viewed_cast = cast;
      }
      const int64_t end = std::min(run_end, track.block_start(block + 1));
      const std::byte* const from = view.get() + (at - track.block_start(block)) / ratio;
      visit(run, {from, static_cast<size_t>((end - at) / ratio)}, dtype);
      at = end;
    }
  }
  return absl::OkStatus();
}

absl::Status Reading::VisitRuns(absl::Span<const Run> runs, RunVisitor visit) const {
  if (!is_stored()) return VisitRunsInBlocks(runs, visit);
  // Runs of a few bytes that lie near each other, such as the rows of a box, are one read of the
  // disk.
  std::vector<std::byte> gathered;
  while (!runs.empty()) {
    const int64_t begin = runs.front().stored_offset;
    int64_t end = begin;
    size_t run_count = 0;
    do {
      end = runs[run_count].stored_offset + runs[run_count].stored_bytes();
      ++run_count;
    } while (run_count < runs.size() &&
             runs[run_count].stored_offset + runs[run_count].stored_bytes() - begin <= kChunkBytes);
    EMA_ASSIGN_OR_RETURN(const std::vector<HostPiece> pieces,
                         ReadTrack(device_, track_, begin, end - begin));
    gathered.clear();
    for (const HostPiece& piece : pieces) {
      gathered.insert(gathered.end(), piece.bytes.begin(), piece.bytes.end());
    }
    for (const Run& run : runs.first(run_count)) {
      visit(run, std::span(gathered).subspan(run.stored_offset - begin, run.stored_bytes()),
            run.stored_dtype);
    }
    runs.remove_prefix(run_count);
  }
  return absl::OkStatus();
}

bool Reading::CanReadInPlace(absl::Span<const Run> runs, int64_t offset, int64_t end) const {
  if (is_stored()) return false;
  for (const Run& run : runs) {
    if (std::exchange(offset, run.end()) != run.offset) return false;
    if (run.end() - run.offset < kCopyBelowBytes) return false;
    if (run.stored_dtype != run.dtype && !CastOf(run).has_value()) return false;
  }
  return offset == end && (device_.is_host() || FitsReaderMemory(runs));
}

bool Reading::FitsReaderMemory(absl::Span<const Run> runs) const {
  int64_t held_bytes = 0;
  int64_t largest_block = 0;
  AllBlocks(runs, [&](int64_t block, std::optional<Dtype> cast) {
    const int64_t size_bytes = track_.track->block_size(block);
    held_bytes += cast.has_value() ? size_bytes / 2 : size_bytes;
    largest_block = std::max(largest_block, size_bytes);
    return true;
  });
  return held_bytes <= largest_block + kChunkBytes;
}

absl::StatusOr<std::vector<HostPiece>> Reading::Read(int64_t offset, int64_t length_bytes) {
  if (is_as_stored() && cached_chunks_ == nullptr) {
    if (device_.is_host()) return ReadTrack(device_, track_, offset, length_bytes);
    // Of two blocks: put together, so that it holds the copy of neither.
    EMA_ASSIGN_OR_RETURN(auto bytes, ReadChunk(offset, length_bytes));
    const std::span<const std::byte> range(bytes.get(), length_bytes);
    return std::vector<HostPiece>{{std::move(bytes), range}};
  }
  const int64_t chunk = offset / kChunkBytes;
  const int64_t start = chunk * kChunkBytes;
  const int64_t end = ChunkEnd(offset);
  CachedChunk not_kept;
  CachedChunk& made = cached_chunks_ != nullptr ? cached_chunks_[chunk] : not_kept;
  absl::MutexLock lock(&made.mu);
  if (made.bytes == nullptr && is_as_stored()) {
    EMA_ASSIGN_OR_RETURN(made.bytes, ReadChunk(start, end - start));
  } else if (made.bytes == nullptr) {
    const std::vector<Run> runs = RunsIn(start, end);
    if (CanReadInPlace(runs, start, end)) {
      EMA_ASSIGN_OR_RETURN(const bool may_have_overflown, MayHaveOverflown(chunk, runs));
      if (!may_have_overflown) return ReadInPlace(runs, offset, length_bytes);
    }
    EMA_ASSIGN_OR_RETURN(made.bytes, MakeChunk(chunk, runs));
  }
  const std::span<const std::byte> range(made.bytes.get() + (offset - start), length_bytes);
  return std::vector<HostPiece>{{made.bytes, range}};
}

absl::StatusOr<std::vector<HostPiece>> Reading::ReadInPlace(absl::Span<const Run> runs,
                                                            int64_t offset,
                                                            int64_t length_bytes) const {
  std::vector<HostPiece> pieces;
  int64_t at = runs.front().offset;
  const auto take = [&](std::shared_ptr<const std::byte> owner, std::span<const std::byte> bytes) {
    // A reader may continue in the middle of an element.
    const int64_t begin = std::clamp<int64_t>(offset - at, 0, bytes.size());
    const int64_t end = std::clamp<int64_t>(offset + length_bytes - at, 0, bytes.size());
    at += static_cast<int64_t>(bytes.size());
    if (begin < end) pieces.push_back({std::move(owner), bytes.subspan(begin, end - begin)});
  };
  for (const Run& run : runs) {
    EMA_ASSIGN_OR_RETURN(std::vector<HostPiece> found,
                         ReadBlocks(device_, *track_.track, track_.blocks, run.stored_offset,
                                    run.stored_bytes(), CastOf(run)));
    for (HostPiece& piece : found) take(std::move(piece.owner), piece.bytes);
  }
  return pieces;
}

bool Reading::AllBlocks(
    absl::Span<const Run> runs,
    absl::FunctionRef<bool(int64_t block, std::optional<Dtype> cast)> predicate) const {
  const Track& track = *track_.track;
  int64_t asked = -1;
  std::optional<Dtype> asked_cast;
  for (const Run& run : runs) {
    const std::optional<Dtype> cast = CastOf(run);
    const int64_t last = track.FindBlock(run.stored_offset + run.stored_bytes() - 1);
    for (int64_t block = track.FindBlock(run.stored_offset); block <= last; ++block) {
      if (block == asked && cast == asked_cast) continue;
      if (!predicate(block, cast)) return false;
      asked = block;
      asked_cast = cast;
    }
  }
  return true;
}

bool Reading::CanReadWithoutWaiting(int64_t offset) const {
  if (is_stored()) return false;
  if (device_.is_host()) return true;
  const int64_t chunk = offset / kChunkBytes;
  if (cached_chunks_ != nullptr) {
    CachedChunk& made = cached_chunks_[chunk];
    if (!made.mu.TryLock()) return false;
    const bool is_made = made.bytes != nullptr;
    made.mu.Unlock();
    if (is_made) return true;
  }
  return AllBlocks(RunsIn(chunk * kChunkBytes, ChunkEnd(offset)),
                   [this](int64_t block, std::optional<Dtype> cast) {
                     return device_.HasHostView(track_.blocks[block], cast);
                   });
}

uint32_t Reading::Checksum(int64_t offset, absl::Span<const HostPiece> pieces) const {
  std::atomic<uint64_t>& known = facts_[offset / kChunkBytes].checksum;
  const bool is_whole = offset % kChunkBytes == 0;
  if (const uint64_t value = known.load(std::memory_order_relaxed); is_whole && value != 0) {
    return static_cast<uint32_t>(value);
  }
  uint32_t crc32c = 0;
  for (const HostPiece& piece : pieces) crc32c = Crc32c(crc32c, piece.bytes);
  if (is_whole) known.store(ChunkFacts::kKnown | crc32c, std::memory_order_relaxed);
  return crc32c;
}

bool Reading::ChunkChangedSince(int64_t version, int64_t offset) const {
  if (is_stored()) return true;
  return !AllBlocks(RunsIn(offset / kChunkBytes * kChunkBytes, ChunkEnd(offset)),
                    [this, version](int64_t block, std::optional<Dtype>) {
                      return track_.block_versions[block] <= version;
                    });
}

}  // namespace ema
