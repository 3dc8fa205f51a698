// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tests/bench/peers/peer_server.h"
#include "tests/bench/peers/socket_wire.h"

namespace ema::bench {
namespace {

// Rounded to the nearest, ties to even. The averages here are finite.
uint16_t ToBfloat16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void SendBfloat16(int fd, const PeerAverage& average) {
  std::vector<uint16_t> piece(kPieceBytes / sizeof(uint16_t));
  const auto* values = reinterpret_cast<const float*>(average.data());
  ForEachPiece(average.size() / 2, [&](size_t, size_t size) {
    const size_t count = size / sizeof(uint16_t);
    for (size_t i = 0; i < count; ++i) piece[i] = ToBfloat16(values[i]);
    values += count;
    SendPiece(fd, reinterpret_cast<const std::byte*>(piece.data()), size, /*is_checked=*/true);
  });
}

void SendAll(int fd, const PeerAverage& average) {
  ForEachPiece(average.size(), [&](size_t offset, size_t size) {
    SendPiece(fd, average.data() + offset, size, /*is_checked=*/true);
  });
}

void ReceivePush(int fd, PeerAverage& average, bool is_checked) {
  std::vector<std::byte> piece(kPieceBytes);
  ForEachPiece(average.size(), [&](size_t offset, size_t size) {
    if (!ReceivePiece(fd, piece.data(), size, is_checked)) Die("the client has gone");
    average.Fold(offset, piece.data(), size);
  });
  average.Commit();
  const std::byte done{1};
  WriteAll(fd, &done, 1);
}

}  // namespace

void ServeSocket(size_t total) {
  const int listener = ListenOnLoopback();
  PeerAverage average(total);
  std::printf("%d\n", PortOf(listener));
  std::fflush(stdout);
  const int fd = Accept(listener);
  Command command{};
  while (ReadAll(fd, reinterpret_cast<std::byte*>(&command), sizeof(command))) {
    switch (command) {
      case Command::kPush:
      case Command::kPushUnchecked:
        ReceivePush(fd, average, command == Command::kPush);
        break;
      case Command::kPull:
        SendAll(fd, average);
        break;
      case Command::kPullBfloat16:
        SendBfloat16(fd, average);
        break;
    }
  }
}

}  // namespace ema::bench
