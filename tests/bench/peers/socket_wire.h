// SPDX-License-Identifier: Apache-2.0
//
// What the two ends of the plain TCP socket share: blocking sockets with our congestion control,
// and pieces of weights, each behind its checksum.
#ifndef EMA_TESTS_BENCH_PEERS_SOCKET_WIRE_H_
#define EMA_TESTS_BENCH_PEERS_SOCKET_WIRE_H_

#include <cstddef>
#include <cstdint>

namespace ema::bench {

// As the chunks of our client.
inline constexpr size_t kPieceBytes = size_t{1} << 20;

// What is asked for: one byte, before the pieces.
enum class Command : uint8_t {
  kPush = 1,
  kPushUnchecked,  // Without checksums.
  kPull,
  kPullBfloat16,  // Cast by the sender, half the bytes.
};

// Listens on a free port of loopback, with reno there, which connections inherit: the host's choice
// may be bbr, which paces loopback. Ours do the same.
int ListenOnLoopback();
int PortOf(int socket);
int Accept(int listener);
int ConnectOnLoopback(int port);

// False: the other end has gone.
bool ReadAll(int fd, std::byte* data, size_t size);
void WriteAll(int fd, const std::byte* data, size_t size);

void SendPiece(int fd, const std::byte* data, size_t size, bool is_checked);
// False: the other end has gone.
bool ReceivePiece(int fd, std::byte* data, size_t size, bool is_checked);

// Calls `visit(offset, size)` for each piece of `total` bytes.
template <typename Visit>
void ForEachPiece(size_t total, const Visit& visit) {
  for (size_t offset = 0; offset < total; offset += kPieceBytes) {
    visit(offset, total - offset < kPieceBytes ? total - offset : kPieceBytes);
  }
}

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_PEERS_SOCKET_WIRE_H_
