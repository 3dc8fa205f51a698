// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/pull/receive_heap.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace ema::client_internal {
namespace {

constexpr int kRounds = 100;
constexpr size_t kBufferBytes = 64 << 10;
constexpr size_t kBuffers = 16;
constexpr int64_t kPages = kBuffers * kBufferBytes / 4096;

int64_t PageFaults() {
  struct rusage usage;
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_minflt;
}

// Page faults of buffers that are allocated, written and freed, as gRPC does with what it receives.
int64_t FaultsOfBuffers() {
  const int64_t before = PageFaults();
  for (int round = 0; round < kRounds; ++round) {
    std::array<void* volatile, kBuffers> buffers;
    for (void* volatile& buffer : buffers) {
      buffer = std::malloc(kBufferBytes);
      std::memset(buffer, round, kBufferBytes);
    }
    for (void* const buffer : buffers) std::free(buffer);
  }
  return PageFaults() - before;
}

TEST(ReceiveHeapTest, BuffersAreReusedWhileItExists) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer has a malloc of its own";
#endif
  // The defaults, which glibc raises when a program frees large blocks, as other tests do.
  mallopt(M_MMAP_THRESHOLD, 128 << 10);
  mallopt(M_TRIM_THRESHOLD, 128 << 10);
  // A thread has a heap of its own, in which nothing else stays allocated.
  int64_t faults_with = 0, faults_after = 0;
  std::thread([&] {
    {
      const ReceiveHeap heap;
      faults_with = FaultsOfBuffers();
    }
    faults_after = FaultsOfBuffers();
  }).join();
  EXPECT_LT(faults_with, 4 * kPages);
  // Its memory has been returned: without it, each round has page faults.
  EXPECT_GT(faults_after, kRounds * kPages / 2);
}

}  // namespace
}  // namespace ema::client_internal
