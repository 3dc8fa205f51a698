// SPDX-License-Identifier: Apache-2.0
//
// Shards: which part of each tensor a rank holds, and where it lies in the rank's bytes.
#ifndef EMA_SHARD_H_
#define EMA_SHARD_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/manifest.h"

namespace ema {

// A rectangular region of one tensor. `offsets` and `extents` are as long as the tensor's shape.
struct Shard {
  int64_t tensor_index = 0;
  std::vector<int64_t> offsets;
  std::vector<int64_t> extents;

  int64_t element_count() const;

  friend bool operator==(const Shard&, const Shard&) = default;
};

// The whole of tensor `tensor_index`.
Shard WholeTensor(const Manifest& manifest, int64_t tensor_index);

// What one rank pushes at each step: its shards in order, their elements row-major, in the dtypes
// in which they are sent, laid end to end without padding. Offsets in chunks are offsets in these
// bytes. The last shards may be of frozen tensors, which change seldom or never during a run: a
// push can omit them if the server has their values. Immutable once created; safe to read from any
// thread. Does not refer to the manifest.
class RankLayout {
 public:
  // INVALID_ARGUMENT, BAD_LAYOUT: more shards than a manifest may have tensors.
  static absl::Status CheckCount(int64_t shard_count);

  // INVALID_ARGUMENT: BAD_LAYOUT, an unknown tensor, a box that has another number of dimensions
  // than the tensor or does not fit its shape (the message names tensor, box and shape), too many
  // shards (CheckCount()), boxes of one tensor that are cut too irregularly to be compared, or a
  // bad frozen_shard_count: more than the shards, or tensors of the frozen shards that other shards
  // also hold. LAYOUT_OVERLAP, two shards share an element. A layout without shards is valid: a
  // rank may hold nothing.
  static absl::StatusOr<RankLayout> Create(const Manifest& manifest, std::vector<Shard> shards,
                                           int64_t frozen_shard_count = 0,
                                           WireDtype wire_dtype = WireDtype::kAsPushed);

  absl::Span<const Shard> shards() const { return shards_; }
  int64_t total_bytes() const { return starts_.back(); }
  // Start of shard `i` in the rank's bytes; `i` == shards().size() gives total_bytes().
  int64_t shard_start(int64_t i) const { return starts_[i]; }
  absl::Span<const Shard> frozen_shards() const {
    return shards().last(static_cast<size_t>(frozen_shard_count_));
  }
  // Size of the shards before the frozen ones.
  int64_t trained_bytes() const { return starts_[shards_.size() - frozen_shard_count_]; }
  WireDtype wire_dtype() const { return wire_dtype_; }
  // CRC32C over, per shard: tensor index, offsets, extents as little-endian int64; then the number
  // of frozen shards, unless it is 0; then -1, if the wire dtype is bfloat16.
  int64_t digest() const { return digest_; }

  // Approximate size in host memory.
  int64_t memory_bytes() const;

  // The shard that holds byte `offset`. REQUIRES: 0 <= offset < total_bytes().
  int64_t FindShard(int64_t offset) const;

  // True if `offset` lies between two elements (or at either end) of the rank's bytes.
  bool IsElementBoundary(int64_t offset) const;

  // A range of the rank's bytes that is also contiguous in its tensor.
  struct ContiguousRange {
    int64_t shard_index = 0;
    int64_t tensor_index = 0;
    int64_t byte_offset = 0;     // In the rank's bytes.
    int64_t tensor_element = 0;  // First element, in the tensor's row-major order.
    int64_t element_count = 0;
    Dtype dtype = Dtype::kFloat32;  // As sent.
  };

  // Calls `visit` for each contiguous range of the bytes [offset, offset + length_bytes), in order,
  // until it returns false. REQUIRES: both ends are element boundaries inside the rank's bytes.
  void ForEachRange(int64_t offset, int64_t length_bytes,
                    const std::function<bool(const ContiguousRange&)>& visit) const;
  // The same, but joins whole tensors of one dtype that are consecutive both in the layout and in
  // the manifest: such a range extends past the end of its tensor.
  void ForEachJoinedRange(int64_t offset, int64_t length_bytes,
                          const std::function<bool(const ContiguousRange&)>& visit) const;

 private:
  void JoinRanges(const Manifest& manifest, absl::Span<const Shard> shards);
  void Walk(int64_t offset, int64_t length_bytes, bool joined,
            const std::function<bool(const ContiguousRange&)>& visit) const;

  // Precomputed properties of a shard, for Walk().
  struct Geometry {
    int64_t range_elements = 0;  // Elements that are contiguous in both shard and tensor.
    int64_t first_element = 0;   // First element of the shard in the tensor.
    int32_t shape = 0;           // Index of the tensor's shape in shapes_.
    int32_t joined_end = 0;      // One past the last shard of its joined range.
    Dtype dtype = Dtype::kFloat32;
    int8_t element_size = 0;
  };

  std::vector<Shard> shards_;
  std::vector<Geometry> geometry_;
  std::vector<std::vector<int64_t>> shapes_;  // One for each tensor's successive shards.
  std::vector<int64_t> starts_ = {0};
  int64_t frozen_shard_count_ = 0;
  WireDtype wire_dtype_ = WireDtype::kAsPushed;
  int64_t digest_ = 0;
};

// A set of tensors: for each index whether it is in the set; empty: none.
using TensorSet = absl::Span<const bool>;

struct RankShare {
  std::vector<Shard> shards;
  int64_t frozen_shard_count = 0;  // As for RankLayout::Create().
};

// Splits `boxes` evenly among ranks that all hold all of them, and returns the shards of rank
// `rank`. All ranks get the same number of bytes of the `frozen` tensors, and the same number of
// bytes of all others, to within one element. Shards of frozen tensors come last. Boxes in
// `rank0_only` tensors (buffers that differ between ranks) go to rank 0 as a whole, count in its
// share, and are not frozen; if they exceed its share, the other ranks share the rest. A box may be
// cut at any element; a rank gets at most 2 x dimensions - 1 boxes of it, each contiguous in it.
// INVALID_ARGUMENT, BAD_LAYOUT.
absl::StatusOr<RankShare> EvenShare(const Manifest& manifest, absl::Span<const Shard> boxes,
                                    TensorSet rank0_only, TensorSet frozen, int64_t rank,
                                    int64_t world_size);

// The same for the whole model (data parallel).
absl::StatusOr<RankShare> EvenShare(const Manifest& manifest, TensorSet rank0_only,
                                    TensorSet frozen, int64_t rank, int64_t world_size);

}  // namespace ema

#endif  // EMA_SHARD_H_
