// SPDX-License-Identifier: Apache-2.0
//
// Heap memory for what gRPC receives during a pull.
#ifndef EMA_CLIENT_CPP_PULL_RECEIVE_HEAP_H_
#define EMA_CLIENT_CPP_PULL_RECEIVE_HEAP_H_

namespace ema::client_internal {

// Keeps free memory in the heap of the calling thread, which receives a pull, for as long as this
// object exists. gRPC allocates and frees receive buffers of 64 KiB all the time. If 128 KiB or
// more are free at the end of a heap, glibc returns them to the system. So nearly every buffer
// would cause page faults, and a pull would run at half its speed. This object keeps one allocation
// at the end of the heap, so glibc keeps the free memory before it. The free memory is not touched,
// so it costs nothing until gRPC writes to it.
//
// mallopt() could do the same, but it affects the whole program: the freed tensors of a training
// program would then stay in the heap, too.
//
// For one thread. Has no effect with a malloc that does not return memory to the system.
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
