// SPDX-License-Identifier: Apache-2.0
//
// The bytes of a message, as gRPC has received them.
#ifndef EMA_CLIENT_CPP_PULL_MESSAGE_PIECES_H_
#define EMA_CLIENT_CPP_PULL_MESSAGE_PIECES_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "server/base/crc32c.h"
#include "server/base/stream_copy.h"

namespace ema::client_internal {

// Holds the slices of one received message. For one thread.
class MessagePieces {
 public:
  // Replaces the message. Returns false if `message` has no data.
  bool Set(const grpc::ByteBuffer& message) { return message.Dump(&slices_).ok(); }

  int64_t total_bytes() const {
    int64_t total = 0;
    for (const grpc::Slice& slice : slices_) total += static_cast<int64_t>(slice.size());
    return total;
  }

  // Copies the start of the message into `head`, and returns the number of bytes copied.
  size_t CopyHead(std::span<std::byte> head) const {
    size_t size = 0;
    for (const grpc::Slice& slice : slices_) {
      const size_t taken = std::min(slice.size(), head.size() - size);
      std::memcpy(head.data() + size, slice.begin(), taken);
      size += taken;
      if (size == head.size()) break;
    }
    return size;
  }

  // Copies all after the first `skipped` bytes to `to`, which has room for them; returns their
  // CRC32C.
  uint32_t CopyTail(int64_t skipped, std::byte* to) const {
    // The copied bytes are still in the first-level cache.
    constexpr size_t kPieceBytes = 8192;
    uint32_t crc = 0;
    for (const grpc::Slice& slice : slices_) {
      const int64_t size = static_cast<int64_t>(slice.size());
      const int64_t start = std::min(skipped, size);
      skipped -= start;
      if (start == size) continue;
      std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(slice.begin()), size);
      for (bytes = bytes.subspan(start); !bytes.empty();) {
        const std::span<const std::byte> piece = bytes.first(std::min(bytes.size(), kPieceBytes));
        StreamCopy(piece, to);
        crc = Crc32c(crc, piece);
        to += piece.size();
        bytes = bytes.subspan(piece.size());
      }
    }
    return crc;
  }

 private:
  std::vector<grpc::Slice> slices_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PULL_MESSAGE_PIECES_H_
