// SPDX-License-Identifier: Apache-2.0
//
// What the heap keeps of memory that has been freed.
#ifndef EMA_SERVER_OPS_HEAP_H_
#define EMA_SERVER_OPS_HEAP_H_

#include <cstdint>

namespace ema {

// Freed buffers that may stay.
inline constexpr int64_t kKeptHeapBytes = int64_t{256} << 20;

// Sets glibc's allocator up for receive buffers, which come and go. To be called before there are
// other threads.
void SetUpHeap();

// For one thread.
class FreedMemory {
 public:
  // Gives all of it back.
  FreedMemory();

  // Gives freed memory back to the system if there are more than kKeptHeapBytes of it. glibc does
  // so by itself only with what lies at the top of the heap.
  void GiveBack();

 private:
  // What stays all the same, such as the tops of other threads' heaps: not to be tried each time.
  int64_t lasting_bytes_ = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_OPS_HEAP_H_
