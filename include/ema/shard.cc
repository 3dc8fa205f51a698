// SPDX-License-Identifier: Apache-2.0
#include "ema/shard.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "include/ema/internal/box_overlap.h"
#include "server/base/crc32c.h"

namespace ema {
namespace {

absl::Status Refuse(ErrorReason reason, std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message);
}
std::string Label(const TensorSpec& spec) { return absl::StrCat("tensor \"", spec.name, "\""); }

absl::Status ValidateShard(const Manifest& manifest, const Shard& shard) {
  if (shard.tensor_index < 0 || shard.tensor_index >= manifest.tensor_count()) {
    return Refuse(ErrorReason::kBadLayout,
                  absl::StrCat("shard of tensor ", shard.tensor_index,
                               ": the manifest has tensors 0 to ", manifest.tensor_count() - 1));
  }
  const TensorSpec& spec = manifest.tensor(shard.tensor_index);
  const size_t rank = spec.shape.size();
  bool fits = shard.offsets.size() == rank && shard.extents.size() == rank;
  for (size_t d = 0; fits && d < rank; ++d) {
    fits = shard.offsets[d] >= 0 && shard.extents[d] >= 0 &&
           shard.extents[d] <= spec.shape[d] - shard.offsets[d];
  }
  if (fits) return absl::OkStatus();
  // A client may send any number of them.
  const auto quote = [](const std::vector<int64_t>& values) {
    return absl::StrJoin(absl::MakeConstSpan(values).subspan(0, kMaxDimensions + 1), ", ");
  };
  return Refuse(
      ErrorReason::kBadLayout,
      absl::StrCat(Label(spec), ": shard with offsets [", quote(shard.offsets), "] and extents [",
                   quote(shard.extents), "] is not inside ", spec.TypeString()));
}

absl::Status CheckFrozen(const Manifest& manifest, absl::Span<const Shard> shards,
                         int64_t frozen_shard_count) {
  if (frozen_shard_count < 0 || frozen_shard_count > static_cast<int64_t>(shards.size())) {
    return Refuse(ErrorReason::kBadLayout,
                  absl::StrCat("frozen_shard_count: ", frozen_shard_count, " given, expected 0 to ",
                               shards.size(), ", the number of shards"));
  }
  if (frozen_shard_count == 0) return absl::OkStatus();
  std::vector<bool> is_live(manifest.tensors().size());
  const size_t live_count = shards.size() - static_cast<size_t>(frozen_shard_count);
  for (const Shard& shard : shards.first(live_count)) is_live[shard.tensor_index] = true;
  for (const Shard& shard : shards.subspan(live_count)) {
    if (!is_live[shard.tensor_index]) continue;
    return Refuse(ErrorReason::kBadLayout,
                  absl::StrCat(Label(manifest.tensor(shard.tensor_index)), ": shard ",
                               BoxText(shard), " is frozen, another is not; expected all or none"));
  }
  return absl::OkStatus();
}

void AppendNumbers(std::vector<std::byte>& bytes, absl::Span<const int64_t> values) {
  for (const int64_t value : values) {
    for (int shift = 0; shift < 64; shift += 8) {
      bytes.push_back(static_cast<std::byte>((value >> shift) & 0xff));
    }
  }
}

// Full trailing dimensions and the first partial one before them lie in one piece.
int64_t RangeElements(const Shard& shard, absl::Span<const int64_t> shape) {
  int64_t elements = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    elements *= shard.extents[d];
    if (shard.extents[d] != shape[d]) break;
  }
  return elements;
}

std::array<int64_t, kMaxDimensions> Strides(absl::Span<const int64_t> shape) {
  std::array<int64_t, kMaxDimensions> strides = {};
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= shape[d];
  }
  return strides;
}

// Where the runs of a shard begin in its tensor, in order.
class RangeCursor {
 public:
  RangeCursor(const Shard& shard, absl::Span<const int64_t> shape, int64_t range_elements,
              int64_t run_index)
      : shard_(shard), strides_(Strides(shape)), outer_(shape.size()) {
    for (int64_t inside = 1; inside != range_elements;) inside *= shard.extents[--outer_];
    for (size_t d = 0; d < shape.size(); ++d) tensor_element_ += shard.offsets[d] * strides_[d];
    for (size_t d = outer_; d-- > 0; run_index /= shard.extents[d]) {
      position_[d] = run_index % shard.extents[d];
      tensor_element_ += position_[d] * strides_[d];
    }
  }

  int64_t tensor_element() const { return tensor_element_; }

  void Next() {
    for (size_t d = outer_; d-- > 0;) {
      tensor_element_ += strides_[d];
      if (++position_[d] < shard_.extents[d]) return;
      tensor_element_ -= position_[d] * strides_[d];
      position_[d] = 0;
    }
  }

 private:
  const Shard& shard_;
  const std::array<int64_t, kMaxDimensions> strides_;
  size_t outer_ = 0;  // Dimensions that a run does not span.
  std::array<int64_t, kMaxDimensions> position_ = {};
  int64_t tensor_element_ = 0;
};

// Appends the boxes that elements [begin, end) of `whole` make up, in its row-major order, each as
// large as it can be: rows up to the next whole slab, whole slabs, rows of the last one.
void AppendBoxes(const Shard& whole, int64_t begin, int64_t end, std::vector<Shard>& shards) {
  const std::vector<int64_t>& shape = whole.extents;
  const std::array<int64_t, kMaxDimensions> strides = Strides(shape);
  while (begin < end) {
    size_t d = 0;
    while (d < shape.size() && (begin % strides[d] != 0 || end - begin < strides[d])) ++d;
    Shard shard{whole.tensor_index, {}, {}};
    int64_t box_elements = 1;
    for (size_t i = 0; i < shape.size(); ++i) {
      const int64_t offset = i <= d ? begin / strides[i] % shape[i] : 0;
      int64_t extent = i < d ? 1 : shape[i];
      if (i == d) extent = std::min(shape[i] - offset, (end - begin) / strides[i]);
      shard.offsets.push_back(whole.offsets[i] + offset);
      shard.extents.push_back(extent);
      box_elements *= extent;
    }
    shards.push_back(std::move(shard));
    begin += box_elements;
  }
}

// floor(total * part / parts), without forming the product.
int64_t Share(int64_t total, int64_t part, int64_t parts) {
  return total / parts * part + total % parts * part / parts;
}

// Appends rank `rank`'s part of an even split of `boxes`, of which the first `rank0_count` go to
// rank 0.
void AppendShare(const Manifest& manifest, std::span<const Shard* const> boxes, int64_t rank0_count,
                 int64_t rank, int64_t world_size, std::vector<Shard>& shards) {
  const auto size_of = [&](const Shard& box) {
    return DtypeSize(manifest.tensor(box.tensor_index).dtype);
  };
  int64_t total = 0;
  int64_t rank0_bytes = 0;
  for (const Shard* const box : boxes) {
    const int64_t bytes = box->element_count() * size_of(*box);
    if (rank0_count-- > 0) rank0_bytes += bytes;
    total += bytes;
  }
  const bool rank0_is_full = rank0_bytes > Share(total, 1, world_size);
  const auto boundary = [&](int64_t r) {
    if (r == 0 || !rank0_is_full) return Share(total, r, world_size);
    return rank0_bytes + Share(total - rank0_bytes, r - 1, world_size - 1);
  };
  const int64_t begin = boundary(rank);
  const int64_t end = boundary(rank + 1);
  int64_t start = 0;
  for (const Shard* const box : boxes) {
    const int64_t size = size_of(*box);
    const int64_t bytes = box->element_count() * size;
    // Rounded down to an element, at this rank's end as at the next rank's begin.
    AppendBoxes(*box, std::clamp<int64_t>(begin - start, 0, bytes) / size,
                std::clamp<int64_t>(end - start, 0, bytes) / size, shards);
    start += bytes;
  }
}

}  // namespace

int64_t Shard::element_count() const {
  int64_t count = 1;
  for (const int64_t extent : extents) {
    if (extent == 0) return 0;
    // Only a box that Create() refuses can be so large.
    if (__builtin_mul_overflow(count, extent, &count)) return std::numeric_limits<int64_t>::max();
  }
  return count;
}

Shard WholeTensor(const Manifest& manifest, int64_t tensor_index) {
  const std::vector<int64_t>& shape = manifest.tensor(tensor_index).shape;
  return {tensor_index, std::vector<int64_t>(shape.size(), 0), shape};
}

absl::Status RankLayout::CheckCount(int64_t shard_count) {
  // Empty shards would be without limit.
  if (shard_count <= kMaxTensorCount) return absl::OkStatus();
  return Refuse(
      ErrorReason::kBadLayout,
      absl::StrCat("layout: ", shard_count, " shards given, expected at most ", kMaxTensorCount));
}

absl::StatusOr<RankLayout> RankLayout::Create(const Manifest& manifest, std::vector<Shard> shards,
                                              int64_t frozen_shard_count, WireDtype wire_dtype) {
  EMA_RETURN_IF_ERROR(CheckCount(static_cast<int64_t>(shards.size())));
  for (const Shard& shard : shards) EMA_RETURN_IF_ERROR(ValidateShard(manifest, shard));
  // Shards without common elements are at most the manifest's bytes, so no sum below overflows.
  std::vector<HeldBox> boxes;
  boxes.reserve(shards.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    if (shards[i].element_count() > 0) boxes.push_back({&shards[i], static_cast<int64_t>(i)});
  }
  EMA_RETURN_IF_ERROR(CheckDisjoint(manifest, boxes, "shard"));
  EMA_RETURN_IF_ERROR(CheckFrozen(manifest, shards, frozen_shard_count));

  RankLayout layout;
  layout.geometry_.reserve(shards.size());
  layout.starts_.reserve(shards.size() + 1);
  std::vector<std::byte> digest_bytes;
  uint32_t crc = 0;
  for (const Shard& shard : shards) {
    const TensorSpec& spec = manifest.tensor(shard.tensor_index);
    const Dtype dtype = OnTheWire(spec.dtype, wire_dtype);
    const int64_t element_size = DtypeSize(dtype);
    const bool is_next = layout.shapes_.empty() || (&shard)[-1].tensor_index != shard.tensor_index;
    if (is_next) layout.shapes_.push_back(spec.shape);
    const std::array<int64_t, kMaxDimensions> strides = Strides(spec.shape);
    const bool is_empty = shard.element_count() == 0;  // It may be anywhere.
    layout.geometry_.push_back(
        {.range_elements = RangeElements(shard, spec.shape),
         .first_element = is_empty ? 0
                                   : std::inner_product(shard.offsets.begin(), shard.offsets.end(),
                                                        strides.begin(), int64_t{0}),
         .shape = static_cast<int32_t>(layout.shapes_.size() - 1),
         .dtype = dtype,
         .element_size = static_cast<int8_t>(element_size)});
    layout.starts_.push_back(layout.starts_.back() + shard.element_count() * element_size);
    digest_bytes.clear();
    AppendNumbers(digest_bytes, {shard.tensor_index});
    AppendNumbers(digest_bytes, shard.offsets);
    AppendNumbers(digest_bytes, shard.extents);
    crc = Crc32c(crc, digest_bytes);
  }
  layout.JoinRanges(manifest, shards);
  digest_bytes.clear();
  if (frozen_shard_count > 0) AppendNumbers(digest_bytes, {frozen_shard_count});
  if (wire_dtype == WireDtype::kBFloat16) AppendNumbers(digest_bytes, {-1});
  crc = Crc32c(crc, digest_bytes);
  layout.shards_ = std::move(shards);
  layout.frozen_shard_count_ = frozen_shard_count;
  layout.wire_dtype_ = wire_dtype;
  layout.digest_ = crc;
  return layout;
}

void RankLayout::JoinRanges(const Manifest& manifest, absl::Span<const Shard> shards) {
  const auto is_whole = [&](const Shard& shard) {
    return shard.extents == manifest.tensor(shard.tensor_index).shape;
  };
  const auto goes_on = [&](size_t i) {
    return i + 1 < shards.size() && shards[i].tensor_index + 1 == shards[i + 1].tensor_index &&
           geometry_[i].dtype == geometry_[i + 1].dtype && is_whole(shards[i]) &&
           is_whole(shards[i + 1]);
  };
  for (size_t i = shards.size(); i-- > 0;) {
    geometry_[i].joined_end =
        goes_on(i) ? geometry_[i + 1].joined_end : static_cast<int32_t>(i + 1);
  }
}

int64_t RankLayout::memory_bytes() const {
  // Besides its extents a vector's piece of the heap.
  constexpr size_t kHeapBytes = 16;
  size_t bytes = geometry_.size() * sizeof(Geometry) + starts_.size() * sizeof(int64_t);
  for (const std::vector<int64_t>& shape : shapes_) {
    bytes += sizeof(std::vector<int64_t>) + kHeapBytes + shape.size() * sizeof(int64_t);
  }
  for (const Shard& shard : shards_) {
    bytes += sizeof(shard) + 2 * kHeapBytes + 2 * shard.offsets.size() * sizeof(int64_t);
  }
  return static_cast<int64_t>(bytes);
}

int64_t RankLayout::FindShard(int64_t offset) const {
  return std::upper_bound(starts_.begin(), starts_.end(), offset) - starts_.begin() - 1;
}

bool RankLayout::IsElementBoundary(int64_t offset) const {
  if (offset < 0 || offset > total_bytes()) return false;
  if (offset == total_bytes()) return true;
  const int64_t i = FindShard(offset);
  return (offset - starts_[i]) % geometry_[i].element_size == 0;
}

void RankLayout::ForEachRange(int64_t offset, int64_t length_bytes,
                              const std::function<bool(const ContiguousRange&)>& visit) const {
  Walk(offset, length_bytes, /*joined=*/false, visit);
}

void RankLayout::ForEachJoinedRange(
    int64_t offset, int64_t length_bytes,
    const std::function<bool(const ContiguousRange&)>& visit) const {
  Walk(offset, length_bytes, /*joined=*/true, visit);
}

void RankLayout::Walk(int64_t offset, int64_t length_bytes, bool joined,
                      const std::function<bool(const ContiguousRange&)>& visit) const {
  if (length_bytes == 0) return;
  const int64_t end = offset + length_bytes;
  for (int64_t i = FindShard(offset), next; offset < end; i = next) {
    const Geometry& geometry = geometry_[i];
    next = i + 1;
    if (offset >= starts_[next]) continue;  // An empty shard.
    if (joined) next = geometry.joined_end;
    const int64_t shards_end = std::min(end, starts_[next]);
    const Shard& shard = shards_[i];
    const int64_t element = (offset - starts_[i]) / geometry.element_size;
    ContiguousRange range = {.shard_index = i,
                             .tensor_index = shard.tensor_index,
                             .byte_offset = offset,
                             .dtype = geometry.dtype};
    if (starts_[i + 1] - starts_[i] == geometry.range_elements * geometry.element_size) {
      // Most shards are one range. The other data of a shard are in separate pieces of the heap.
      range.tensor_element = geometry.first_element + element;
      range.element_count = (shards_end - offset) / geometry.element_size;
      if (!visit(range)) return;
      offset = shards_end;
      continue;
    }
    int64_t skipped = element % geometry.range_elements;
    RangeCursor cursor(shard, shapes_[geometry.shape], geometry.range_elements,
                       element / geometry.range_elements);
    for (; offset < shards_end; cursor.Next()) {
      range.byte_offset = offset;
      range.tensor_element = cursor.tensor_element() + skipped;
      range.element_count = std::min(geometry.range_elements - skipped,
                                     (shards_end - offset) / geometry.element_size);
      if (!visit(range)) return;
      offset += range.element_count * geometry.element_size;
      skipped = 0;
    }
  }
}

absl::StatusOr<RankShare> EvenShare(const Manifest& manifest, absl::Span<const Shard> boxes,
                                    TensorSet rank0_only, TensorSet frozen, int64_t rank,
                                    int64_t world_size) {
  constexpr int64_t kMaxWorldSize = 65536;
  if (world_size < 1 || world_size > kMaxWorldSize || rank < 0 || rank >= world_size) {
    return Refuse(ErrorReason::kBadLayout,
                  absl::StrCat("rank ", rank, " of world_size ", world_size,
                               ": expected 0 <= rank < world_size <= ", kMaxWorldSize));
  }
  const int64_t tensor_count = manifest.tensor_count();
  for (const auto& [name, set] : {std::pair("rank0_only", rank0_only), {"frozen", frozen}}) {
    if (set.empty() || static_cast<int64_t>(set.size()) == tensor_count) continue;
    return Refuse(
        ErrorReason::kBadLayout,
        absl::StrCat(name, " has ", set.size(), " entries; expected none or ", tensor_count));
  }
  std::vector<const Shard*> order;
  for (const Shard& box : boxes) {
    EMA_RETURN_IF_ERROR(ValidateShard(manifest, box));
    order.push_back(&box);
  }
  const auto is_rank0_only = [&](const Shard* box) {
    return !rank0_only.empty() && rank0_only[box->tensor_index];
  };
  const auto is_live = [&](const Shard* box) {
    return frozen.empty() || !frozen[box->tensor_index] || is_rank0_only(box);
  };
  const auto frozen_begin = std::stable_partition(order.begin(), order.end(), is_live);
  const auto rest = std::stable_partition(order.begin(), frozen_begin, is_rank0_only);
  RankShare share;
  AppendShare(manifest, {order.begin(), frozen_begin}, rest - order.begin(), rank, world_size,
              share.shards);
  const size_t live_count = share.shards.size();
  AppendShare(manifest, {frozen_begin, order.end()}, 0, rank, world_size, share.shards);
  share.frozen_shard_count = static_cast<int64_t>(share.shards.size() - live_count);
  return share;
}

absl::StatusOr<RankShare> EvenShare(const Manifest& manifest, TensorSet rank0_only,
                                    TensorSet frozen, int64_t rank, int64_t world_size) {
  std::vector<Shard> tensors;
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    tensors.push_back(WholeTensor(manifest, i));
  }
  return EvenShare(manifest, tensors, rank0_only, frozen, rank, world_size);
}

}  // namespace ema
