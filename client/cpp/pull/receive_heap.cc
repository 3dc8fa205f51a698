// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/pull/receive_heap.h"

#include <array>
#include <cstddef>
#include <cstdlib>

namespace ema::client_internal {
namespace {

// Smaller than the smallest block that glibc maps by itself, larger than a receive buffer.
constexpr size_t kPieceBytes = 112 << 10;
// As much as gRPC has received but the client has not copied yet, at full speed: 28 MiB.
constexpr size_t kPieces = 256;

}  // namespace

ReceiveHeap::ReceiveHeap() {
  // volatile: a compiler may omit allocations that nothing uses.
  std::array<void* volatile, kPieces> pieces;
  for (void* volatile& piece : pieces) piece = std::malloc(kPieceBytes);
  last_ = std::malloc(kPieceBytes);
  for (void* const piece : pieces) std::free(piece);
}

ReceiveHeap::~ReceiveHeap() { std::free(last_); }

}  // namespace ema::client_internal
