// SPDX-License-Identifier: Apache-2.0
//
// What every part of the benchmark of the data plane uses: memory, clocks, and an end for errors.
#ifndef EMA_TESTS_BENCH_BENCH_UTIL_H_
#define EMA_TESTS_BENCH_BENCH_UTIL_H_

#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace ema::bench {

// A benchmark that cannot go on ends at once: destructors would wait for what has just failed.
[[noreturn]] inline void Die(const std::string& what) {
  std::fprintf(stderr, "bench: %s\n", what.c_str());
  std::_Exit(1);
}

inline void Must(const absl::Status& status) {
  if (!status.ok()) Die(status.ToString());
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

// Memory like the server's blocks: huge pages where the system gives them, touched once.
class Arena {
 public:
  explicit Arena(size_t size) : size_(size) {
    void* const memory =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) Die("no memory");
    madvise(memory, size, MADV_HUGEPAGE);
    std::memset(memory, 0, size);
    data_ = static_cast<std::byte*>(memory);
  }
  ~Arena() { munmap(data_, size_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }

 private:
  const size_t size_;
  std::byte* data_ = nullptr;
};

inline double Gigabytes(size_t bytes) { return static_cast<double>(bytes) * 1e-9; }

// How long `work` takes.
inline double SecondsOf(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_BENCH_UTIL_H_
