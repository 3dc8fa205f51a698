// SPDX-License-Identifier: Apache-2.0
//
// A CUDA runtime over host memory: the functions of libcudart.so.13 that LibTorch's half for CUDA
// and the server call, for two GPUs that are not there. A program that is linked to it, or has it
// in LD_PRELOAD, is not given the real one: all but the instructions of the kernels then runs as on
// a GPU.
//
// Streams are threads, which pause at random, so that what nothing orders comes in another order.
// Kernels are walked on the CPU, blocks and threads in any order. What a caller does wrong ends the
// process: work on the default stream, copies of memory that is not pinned or not the device's,
// kernels that are given such memory, launches that a GPU refuses, objects that have been destroyed
// or are another GPU's. So does host code that reads or writes memory of the device, by a
// segmentation fault.
#ifndef EMA_TESTS_TESTUTIL_FAKE_CUDART_H_
#define EMA_TESTS_TESTUTIL_FAKE_CUDART_H_

#include <cstdint>

extern "C" {

// The `n`-th call from now on (1: the next) finds that a kernel has made an illegal access, and so
// do all after it, whatever they are; work that has been queued is not done. As with a GPU, there
// is no way back.
void ema_fake_cudart_break(int64_t n);
bool ema_fake_cudart_is_broken();
// The `n`-th call from now on, of those that take memory, finds none.
void ema_fake_cudart_refuse(int64_t n);
// Calls so far that take memory.
int64_t ema_fake_cudart_memory_calls();
// Calls so far that wait for the whole device, or for a stream by name and not by an event.
int64_t ema_fake_cudart_synchronizations();
// Kernels that have been launched.
int64_t ema_fake_cudart_launches();
// From now on memory that is mapped cannot be used, whatever the GPUs say of themselves.
void ema_fake_cudart_refuse_mapped(bool refuses);
// Of each GPU from now on.
void ema_fake_cudart_set_memory(int64_t size_bytes);
// What there is now: device and pinned memory in bytes, streams and events.
int64_t ema_fake_cudart_device_bytes();
int64_t ema_fake_cudart_pinned_bytes();
int64_t ema_fake_cudart_events();

}  // extern "C"

#endif  // EMA_TESTS_TESTUTIL_FAKE_CUDART_H_
