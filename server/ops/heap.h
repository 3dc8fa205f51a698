// SPDX-License-Identifier: Apache-2.0
//
// Returns freed memory from the heap to the system.
#ifndef EMA_SERVER_OPS_HEAP_H_
#define EMA_SERVER_OPS_HEAP_H_

#include <cstdint>

namespace ema {

// Freed memory that the heap may keep for reuse.
inline constexpr int64_t kKeptHeapBytes = int64_t{256} << 20;

// Memory that the process has allocated from the heap and not freed; 0 in builds with sanitizers.
int64_t AllocatedHeapBytes();

// Configures glibc's allocator for receive buffers, which are freed and allocated all the time. To
// be called before other threads start.
void SetUpHeap();

// Returns freed memory that the heap has kept. Not thread-safe.
class HeapTrimmer {
 public:
  // Returns freed memory to the system at once.
  HeapTrimmer();

  // Returns freed memory to the system if there are more than kKeptHeapBytes of it. glibc by itself
  // returns only memory at the top of the heap.
  void TrimHeap();

 private:
  // Memory that cannot be returned, such as the program's and the tops of other threads' heaps. Not
  // counted.
  int64_t unreturnable_bytes_ = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_OPS_HEAP_H_
