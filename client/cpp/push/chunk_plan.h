// SPDX-License-Identifier: Apache-2.0
//
// Cuts a rank's bytes into chunks, and makes the messages that carry them.
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

// The chunk boundaries of one layout. They depend only on the layout and the chunk size, so a
// resent chunk has the same bounds. Immutable.
class ChunkPlan {
 public:
  // Each chunk is as long as `chunk_bytes` allows, ends between elements, and does not mix frozen
  // and other bytes. REQUIRES: chunk_bytes >= 8.
  ChunkPlan(const RankLayout& layout, int64_t chunk_bytes);

  int64_t max_chunk_bytes() const { return max_chunk_bytes_; }
  int64_t chunk_count() const { return static_cast<int64_t>(starts_.size()) - 1; }
  int64_t offset(int64_t chunk) const { return starts_[chunk]; }
  int64_t length_bytes(int64_t chunk) const { return starts_[chunk + 1] - starts_[chunk]; }

  // The number of chunks in the first `end` bytes. REQUIRES: a chunk ends there.
  int64_t ChunksBefore(int64_t end) const {
    return std::lower_bound(starts_.begin(), starts_.end(), end) - starts_.begin();
  }
  // The chunks with at least one byte in `ranges`, in order, each once.
  std::vector<int64_t> ChunksIn(absl::Span<const PushProgress::Range> ranges) const;

 private:
  int64_t max_chunk_bytes_;
  std::vector<int64_t> starts_;  // Start of each chunk, and the end of the last.
};

// Calls `visit(shard, offset, length_bytes)` for each shard's part of a chunk, in order. The part
// begins at `offset` in the shard. Both count bytes as sent.
template <typename Visitor>
void ForEachPiece(const RankLayout& layout, const ChunkPlan& plan, int64_t chunk, Visitor visit) {
  int64_t offset = plan.offset(chunk);
  const int64_t end = offset + plan.length_bytes(chunk);
  for (int64_t shard = layout.FindShard(offset); offset < end; ++shard) {
    const int64_t offset_in_shard = offset - layout.shard_start(shard);
    const int64_t length = std::min(end, layout.shard_start(shard + 1)) - offset;
    if (length > 0) visit(shard, offset_in_shard, length);
    offset += length;
  }
}

class StagedChunks;

// Makes the messages of one push. Weights are passed by reference: each large piece is a slice that
// `gate` counts until gRPC has dropped it. Pieces below 4 KiB are copied, which is cheaper than a
// slice. The whole chunk is copied if its weights are rounded for the wire or gathered. Weights on
// a GPU come through pinned buffers, which are lent to gRPC instead. Several threads may write
// different chunks at once.
class ChunkWriter {
 public:
  // All pointers outlive this object; `gate` and the memory of `shards` also outlive the messages.
  // The first `chunk_count` chunks are pushed. `staged` provides the chunks; if it is null, they
  // are read from `shards`, which are in host memory. `strides`: see PushOptions.
  ChunkWriter(const RankLayout* layout, const ChunkPlan* plan, int64_t chunk_count,
              absl::Span<const std::span<const std::byte>> shards, WeightsGate* gate,
              StagedChunks* staged = nullptr, absl::Span<const Strides> strides = {});

  // Scratch space of Write(), kept for its capacity. Each thread has its own.
  struct Scratch {
    std::vector<std::span<const std::byte>> pieces;
    std::vector<grpc::Slice> slices;
  };
  // The message of one chunk, with its checksum. Allocates only what gRPC needs. With `copies` no
  // piece refers to the weights or to the memory where they are staged. Absent: the weights have
  // been released or cannot be read (StagedChunks::status()).
  std::optional<grpc::ByteBuffer> Write(int64_t chunk, Scratch& scratch, bool copies = false);

  // Copies a chunk into shared memory, and returns its checksum. Absent: as Write().
  std::optional<uint32_t> Copy(int64_t chunk, std::byte* to);

  // A staged chunk as it is sent from the memory where it is staged.
  struct Loan {
    int slot = 0;  // The number of the ring's buffer.
    std::span<const std::byte> bytes;
    uint32_t crc32c = 0;
  };
  // Borrows a staged chunk; the caller ends the loan (StagedChunks::EndLoan()). REQUIRES: weights
  // are not rounded for the wire. Absent: as Write().
  std::optional<Loan> Borrow(int64_t chunk);

  // CRC32C of each chunk. Absent: as Digest().
  std::optional<std::vector<uint32_t>> Checksums();

  // CRC32C of all pushed bytes. Reads only chunks that have not been written. Absent: weights would
  // have to be read, but have been released.
  std::optional<uint32_t> Digest();

 private:
  // Copies a chunk, rounding weights for the wire; returns the CRC32C of the written bytes. `from`:
  // the chunk's weights, end to end; null: they are read from the shards.
  uint32_t CopyInto(int64_t chunk, const std::byte* from, std::byte* to) const;
  // True: the bytes are in memory in the form in which they are sent.
  bool IsInPlace(int64_t chunk) const;
  // REQUIRES: IsInPlace(chunk).
  grpc::ByteBuffer Encode(int64_t chunk, Scratch& scratch, bool copies);
  grpc::ByteBuffer EncodeCopy(int64_t chunk, const std::byte* from);
  std::optional<grpc::ByteBuffer> WriteStaged(int64_t chunk, bool copies);
  std::optional<uint32_t> CopyStaged(int64_t chunk, std::byte* to);
  // Records a chunk's CRC32C, and builds its message.
  grpc::ByteBuffer Assemble(int64_t chunk, uint32_t crc32c, grpc::Slice data);
  // Computes the CRC32C of a chunk. False: Write() would return nullopt.
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
  std::vector<Crc> crcs_;  // One for each chunk.
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_CHUNK_PLAN_H_
