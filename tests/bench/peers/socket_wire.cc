// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/peers/socket_wire.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/base/crc32c.h"
#include "tests/bench/bench_util.h"

namespace ema::bench {
namespace {

int NewSocket() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
  return fd;
}

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

}  // namespace

int ListenOnLoopback() {
  const int fd = NewSocket();
  const sockaddr_in address = Loopback(0);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(fd, 1) != 0) {
    Die("cannot listen on loopback");
  }
  return fd;
}

int PortOf(int socket) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

int Accept(int listener) { return accept4(listener, nullptr, nullptr, SOCK_CLOEXEC); }

int ConnectOnLoopback(int port) {
  const int fd = NewSocket();
  const sockaddr_in address = Loopback(port);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    Die("cannot reach a peer");
  }
  return fd;
}

bool ReadAll(int fd, std::byte* data, size_t size) {
  for (size_t done = 0; done < size;) {
    const ssize_t n = recv(fd, data + done, size - done, 0);
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

void WriteAll(int fd, const std::byte* data, size_t size) {
  for (size_t done = 0; done < size;) {
    const ssize_t n = send(fd, data + done, size - done, MSG_NOSIGNAL);
    if (n <= 0) Die("a peer's socket broke");
    done += static_cast<size_t>(n);
  }
}

void SendPiece(int fd, const std::byte* data, size_t size, bool is_checked) {
  if (is_checked) {
    const uint32_t crc32c = Crc32c(0, {data, size});
    WriteAll(fd, reinterpret_cast<const std::byte*>(&crc32c), sizeof(crc32c));
  }
  WriteAll(fd, data, size);
}

bool ReceivePiece(int fd, std::byte* data, size_t size, bool is_checked) {
  uint32_t crc32c = 0;
  if (is_checked && !ReadAll(fd, reinterpret_cast<std::byte*>(&crc32c), sizeof(crc32c))) {
    return false;
  }
  if (!ReadAll(fd, data, size)) return false;
  if (is_checked && Crc32c(0, {data, size}) != crc32c) Die("a peer's bytes are damaged");
  return true;
}

}  // namespace ema::bench
