// SPDX-License-Identifier: Apache-2.0
//
// Heap memory for what gRPC receives during a pull.
#ifndef EMA_CLIENT_CPP_PULL_RECEIVE_HEAP_H_
#define EMA_CLIENT_CPP_PULL_RECEIVE_HEAP_H_

namespace ema::client_internal {

// Keeps free memory in the heap of the calling thread, which receives a pull, while it exists. gRPC
// allocates and frees receive buffers of 64 KiB all the time. glibc returns freed memory at the end
// of a heap to the system from 128 KiB on, so nearly every buffer would cause page faults, and a
// pull would run at half its speed. The memory here is not at the end, because the last piece of it
// stays allocated. It is never touched, so it uses no memory until gRPC writes to it.
//
// malloc's bounds would do the same, but they are the whole program's: the tensors of a training
// would then stay in the heap, too, when they are freed.
//
// For one thread. Does nothing for a malloc that does not return memory.
class ReceiveHeap {
 public:
  ReceiveHeap();
  // From here on, glibc may return the memory to the system.
  ~ReceiveHeap();
  ReceiveHeap(const ReceiveHeap&) = delete;
  ReceiveHeap& operator=(const ReceiveHeap&) = delete;

 private:
  void* last_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PULL_RECEIVE_HEAP_H_
