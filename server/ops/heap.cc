// SPDX-License-Identifier: Apache-2.0
#include "server/ops/heap.h"

#include <malloc.h>

#include <algorithm>

#include "server/ops/process_stats.h"

namespace ema {
namespace {

// At the top of the heap.
constexpr int kPadBytes = 64 << 20;

// What the process has in memory beside what it has allocated: freed buffers, and the program's.
int64_t UnallocatedBytes() { return PrivateBytes() - AllocatedHeapBytes(); }

}  // namespace

int64_t AllocatedHeapBytes() {
  const struct mallinfo2 heap = mallinfo2();
  return static_cast<int64_t>(heap.uordblks + heap.hblkhd);
}

void SetUpHeap() {
  // gRPC frees and allocates read buffers all the time; with glibc's defaults the top of the heap
  // is given back and faulted in again, 20 to 30 thousand page faults a push.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, kKeptHeapBytes);
  mallopt(M_TOP_PAD, kPadBytes);
}

HeapTrimmer::HeapTrimmer() {
  malloc_trim(kPadBytes);
  unreturnable_bytes_ = UnallocatedBytes();
}

void HeapTrimmer::TrimHeap() {
  if (UnallocatedBytes() - unreturnable_bytes_ < kKeptHeapBytes) return;
  malloc_trim(kPadBytes);
  unreturnable_bytes_ = std::max(unreturnable_bytes_, UnallocatedBytes());
}

}  // namespace ema
