// SPDX-License-Identifier: Apache-2.0
//
// How a rank's bytes are cut into chunks, and the messages that carry these.
#ifndef EMA_CLIENT_CPP_PUSH_CHUNK_PLAN_H_
#define EMA_CLIENT_CPP_PUSH_CHUNK_PLAN_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/push/shard_weights.h"
#include "client/cpp/push/weights_gate.h"
#include "ema/client.h"
#include "ema/shard.h"

namespace ema::client_internal {

// The cut of one layout: always the same, so that a chunk that is sent again has the bounds it had.
// Immutable.
class ChunkPlan {
 public:
  // As many bytes in each chunk as fit into `chunk_bytes` and end between elements; none has both
  // frozen and other bytes. REQUIRES: chunk_bytes >= 8.
  ChunkPlan(const RankLayout& layout, int64_t chunk_bytes);

  int64_t max_chunk_bytes() const { return max_chunk_bytes_; }
  int64_t chunk_count() const { return static_cast<int64_t>(starts_.size()) - 1; }
  int64_t offset(int64_t chunk) const { return starts_[chunk]; }
  int64_t length_bytes(int64_t chunk) const { return starts_[chunk + 1] - starts_[chunk]; }

  // The chunks that make up the first `end` bytes. REQUIRES: a chunk ends there.
  int64_t ChunksBefore(int64_t end) const {
    return std::lower_bound(starts_.begin(), starts_.end(), end) - starts_.begin();
  }
  // Those with at least one byte in `ranges`, in order, each once.
  std::vector<int64_t> ChunksIn(absl::Span<const PushProgress::Range> ranges) const;

 private:
  int64_t max_chunk_bytes_;
  std::vector<int64_t> starts_;  // And the end.
};

// Calls `visit(shard, in_shard, length_bytes)` for each shard's stretch of a chunk, in order; both
// count the bytes that travel.
template <typename Visitor>
void ForEachPiece(const RankLayout& layout, const ChunkPlan& plan, int64_t chunk, Visitor visit) {
  int64_t offset = plan.offset(chunk);
  const int64_t end = offset + plan.length_bytes(chunk);
  for (int64_t shard = layout.FindShard(offset); offset < end; ++shard) {
    const int64_t in_shard = offset - layout.shard_start(shard);
    const int64_t length = std::min(end, layout.shard_start(shard + 1)) - offset;
    if (length > 0) visit(shard, in_shard, length);
    offset += length;
  }
}

class StagedChunks;

// Makes the messages of one push. The weights go by reference: each large piece is a slice that
// `gate` counts until gRPC has dropped it; pieces below 4 KiB are copied, which is cheaper than a
// slice; where weights are rounded for the wire, or have to be gathered, the whole chunk is.
// Weights on a GPU come through pinned buffers, which gRPC has instead. Several threads may write
// at once, each other chunks.
class ChunkWriter {
 public:
  // All outlive this object; `gate` and what `shards` point to also the messages.
  // The first `chunk_count` chunks are pushed. `staged`: where chunks come from instead; null: from
  // `shards`, which are in host memory. `strides`: as for Run::StartPush().
  ChunkWriter(const RankLayout* layout, const ChunkPlan* plan, int64_t chunk_count,
              absl::Span<const std::span<const std::byte>> shards, WeightsGate* gate,
              StagedChunks* staged = nullptr, absl::Span<const Strides> strides = {});

  // What Write() works with; kept for its capacity. Each thread has its own.
  struct Scratch {
    std::vector<std::span<const std::byte>> pieces;
    std::vector<grpc::Slice> slices;
  };
  // The message of one chunk, checksum included. Allocates nothing but what gRPC needs. With
  // `copies` no piece points to the weights, or to where they are staged. Absent: these have been
  // released, or cannot be read (StagedChunks::status()).
  std::optional<grpc::ByteBuffer> Write(int64_t chunk, Scratch& scratch, bool copies = false);

  // Copies a chunk into shared memory, and gives its checksum. Absent: as Write().
  std::optional<uint32_t> Copy(int64_t chunk, std::byte* to);

  // CRC32C of each chunk, by chunk. Absent: as Digest().
  std::optional<std::vector<uint32_t>> Checksums();

  // CRC32C of all that is pushed. Reads none, if every chunk has been written. Absent: the weights
  // would have to be read, but have been released.
  std::optional<uint32_t> Digest();

 private:
  // Copies a chunk, rounding what is rounded for the wire; gives the CRC32C of what it has written.
  // `from`: its weights, end to end; null: where the shards are.
  uint32_t CopyInto(int64_t chunk, const std::byte* from, std::byte* to) const;
  // True: its bytes lie in memory as they travel.
  bool IsInPlace(int64_t chunk) const;
  // REQUIRES: IsInPlace(chunk).
  grpc::ByteBuffer Encode(int64_t chunk, Scratch& scratch, bool copies);
  grpc::ByteBuffer EncodeCopy(int64_t chunk, const std::byte* from);
  std::optional<grpc::ByteBuffer> WriteStaged(int64_t chunk, bool copies);
  std::optional<uint32_t> CopyStaged(int64_t chunk, std::byte* to);
  // Sets a chunk's CRC32C, and puts the message together.
  grpc::ByteBuffer Assemble(int64_t chunk, uint32_t crc32c, grpc::Slice data);
  // False: as Write().
  bool Checksum(int64_t chunk);

  const RankLayout* const layout_;
  const ChunkPlan* const plan_;
  const ShardWeights weights_;
  WeightsGate* const gate_;
  StagedChunks* const staged_;

  struct Crc {
    uint32_t value = 0;
    bool known = false;
  };
  std::vector<Crc> crcs_;  // By chunk.
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_CHUNK_PLAN_H_
