// SPDX-License-Identifier: Apache-2.0
//
// How fast a push is, from its start to its commit, beside a plain TCP socket that carries the same
// bytes with the same checksums and the same fold. Both in turns, in one run: machines are noisy,
// only ratios of neighbours mean anything.
//
//   push_bench --server build/release/server/ema-server [--megabytes 400] [--rounds 9] [--chunk-kib
//   1024]
#include <arpa/inet.h>
#include <malloc.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "ema/client.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/device/ema_kernel.h"

namespace ema {
namespace {

constexpr size_t kPieceBytes = 1 << 20;
constexpr int kTensors = 400;

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "push_bench: %s\n", what.c_str());
  std::exit(1);
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) Die(value.status().ToString());
  return *std::move(value);
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
    if (n <= 0) Die("the peer's socket broke");
    done += static_cast<size_t>(n);
  }
}

// Memory like the server's blocks: huge pages where the system gives them, touched once.
std::byte* NewArena(size_t size) {
  void* const memory =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  madvise(memory, size, MADV_HUGEPAGE);
  std::memset(memory, 0, size);
  return static_cast<std::byte*>(memory);
}

// The peer: receives pieces, checks and folds each, answers when all are there.
[[noreturn]] void RunSocketServer(int listener, size_t total) {
  const int fd = accept(listener, nullptr, nullptr);
  std::byte* current = NewArena(total);
  std::byte* next = NewArena(total);
  std::vector<std::byte> piece(kPieceBytes);
  while (true) {
    for (size_t offset = 0; offset < total; offset += kPieceBytes) {
      uint32_t crc32c = 0;
      const size_t size = std::min(kPieceBytes, total - offset);
      if (!ReadAll(fd, reinterpret_cast<std::byte*>(&crc32c), sizeof(crc32c)) ||
          !ReadAll(fd, piece.data(), size)) {
        std::_Exit(0);
      }
      if (Crc32c(0, {piece.data(), size}) != crc32c) Die("the peer's bytes are damaged");
      const FoldTarget target{FoldTarget::Kind::kAverage, 0.25f, current + offset, next + offset};
      FoldOnCpu({Dtype::kFloat32,
                 piece.data(),
                 static_cast<int64_t>(size / sizeof(float)),
                 {&target, 1}});
    }
    std::swap(current, next);
    const std::byte done{1};
    WriteAll(fd, &done, 1);
  }
}

class SocketPeer {
 public:
  explicit SocketPeer(size_t total) : total_(total) {
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        listen(listener, 1) != 0) {
      Die("cannot listen for the socket peer");
    }
    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
    pid_ = fork();
    if (pid_ == 0) RunSocketServer(listener, total);
    close(listener);
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    // As our client does on loopback.
    setsockopt(fd_, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
    if (connect(fd_, reinterpret_cast<sockaddr*>(&address), size) != 0)
      Die("cannot reach the peer");
  }
  ~SocketPeer() {
    close(fd_);
    waitpid(pid_, nullptr, 0);
  }

  void Push(const std::byte* weights) const {
    for (size_t offset = 0; offset < total_; offset += kPieceBytes) {
      const size_t size = std::min(kPieceBytes, total_ - offset);
      const uint32_t crc32c = Crc32c(0, {weights + offset, size});
      WriteAll(fd_, reinterpret_cast<const std::byte*>(&crc32c), sizeof(crc32c));
      WriteAll(fd_, weights + offset, size);
    }
    std::byte done{};
    if (!ReadAll(fd_, &done, 1)) Die("the peer has gone");
  }

 private:
  const size_t total_;
  pid_t pid_ = 0;
  int fd_ = -1;
};

// A real ema-server on a free port.
class ServerProcess {
 public:
  explicit ServerProcess(const std::string& binary) {
    const std::string port_file = absl::StrCat("/tmp/push_bench.", getpid(), ".port");
    pid_ = fork();
    if (pid_ == 0) {
      execl(binary.c_str(), binary.c_str(), "--listen", "127.0.0.1:0", "--port-file",
            port_file.c_str(), "--log-level", "error", nullptr);
      std::_Exit(127);
    }
    const absl::Time deadline = absl::Now() + absl::Seconds(10);
    while (!(std::ifstream(port_file) >> port_)) {
      if (absl::Now() > deadline) Die(absl::StrCat(binary, " did not start"));
      absl::SleepFor(absl::Milliseconds(10));
    }
    unlink(port_file.c_str());
  }
  ~ServerProcess() {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

 private:
  pid_t pid_ = 0;
  int port_ = 0;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct Series {
  std::vector<double> gigabytes_per_second;
  std::vector<double> cpu_seconds_per_gigabyte;
};

void Print(const char* name, const Series& series) {
  const auto [low, high] =
      std::minmax_element(series.gigabytes_per_second.begin(), series.gigabytes_per_second.end());
  std::printf("%-34s %5.2f GB/s [%5.2f - %5.2f]   client CPU %.3f s/GB\n", name,
              Median(series.gigabytes_per_second), *low, *high,
              Median(series.cpu_seconds_per_gigabyte));
}

int Main(int argc, char** argv) {
  std::string binary;
  int megabytes = 400;
  int rounds = 9;
  int chunk_kib = 1024;
  CLI::App app("Speed of a push beside a plain TCP socket with the same fold and checksums");
  app.add_option("--server", binary, "The ema-server binary")->required();
  app.add_option("--megabytes", megabytes, "Size of the weights")->check(CLI::Range(1, 16000));
  app.add_option("--rounds", rounds, "Timed rounds")->check(CLI::Range(1, 1000));
  app.add_option("--chunk-kib", chunk_kib, "Size of a chunk")->check(CLI::Range(4, 4096));
  CLI11_PARSE(app, argc, argv);

  const int64_t elements = int64_t{megabytes} * 1'000'000 / 4 / kTensors;
  const size_t total = static_cast<size_t>(elements) * 4 * kTensors;
  const SocketPeer peer(total);  // Forks: before gRPC has threads.
  const ServerProcess server(binary);

  std::byte* const weights = NewArena(total);
  for (size_t i = 0; i < total / 4; ++i) {
    const float value = static_cast<float>(i % 1000) * 0.001f;
    std::memcpy(weights + i * 4, &value, 4);
  }
  std::vector<TensorSpec> specs;
  std::vector<std::span<const std::byte>> tensors;
  for (int i = 0; i < kTensors; ++i) {
    specs.push_back({absl::StrCat("layer", i), Dtype::kFloat32, {elements}});
    tensors.emplace_back(weights + i * elements * 4, elements * 4);
  }
  const auto client =
      Must(Client::Create(server.address(), {.chunk_bytes = int64_t{chunk_kib} << 10}));
  const std::vector<TrackConfig> tracks = {
      {.name = "ema", .schedule = Must(Schedule::Parse("100ba"))}};
  Must(client->CreateModel("bench", Must(Manifest::Create(specs)), tracks));
  const auto run = Must(client->OpenRun("bench", {}));

  Series ours, socket;
  std::vector<double> ratios;
  constexpr int kWarmUp = 4;  // All versions that are kept have been allocated then.
  for (int round = 0; round < kWarmUp + rounds; ++round) {
    const auto time = [&](Series& series, const auto& push) {
      const double cpu = CpuSeconds();
      const absl::Time begin = absl::Now();
      push();
      const double gigabytes = static_cast<double>(total) * 1e-9;
      const double speed = gigabytes / absl::ToDoubleSeconds(absl::Now() - begin);
      if (round >= kWarmUp) {
        series.gigabytes_per_second.push_back(speed);
        series.cpu_seconds_per_gigabyte.push_back((CpuSeconds() - cpu) / gigabytes);
      }
      return speed;
    };
    const auto push_ours = [&] {
      TrainingTime now;
      now.Set(TimeUnit::kBatch, round + 1);
      Must(run->Push(round + 1, now, tensors, absl::Seconds(60)));
    };
    const auto push_socket = [&] { peer.Push(weights); };
    // Who goes first changes, so that neither always finds the other's caches.
    const bool ours_first = round % 2 == 0;
    const double first = ours_first ? time(ours, push_ours) : time(socket, push_socket);
    const double second = ours_first ? time(socket, push_socket) : time(ours, push_ours);
    if (round >= kWarmUp) ratios.push_back(ours_first ? first / second : second / first);
  }
  const auto [low, high] = std::minmax_element(ratios.begin(), ratios.end());
  std::printf("%d MB float32 in %d tensors, %d rounds, median [range]\n", megabytes, kTensors,
              rounds);
  Print("push to commit over gRPC (ours)", ours);
  Print("plain TCP socket, same fold", socket);
  std::printf("ratio %.2f [%.2f - %.2f], goal 0.80\n", Median(ratios), *low, *high);
  return 0;
}

}  // namespace
}  // namespace ema

int main(int argc, char** argv) { return ema::Main(argc, argv); }
