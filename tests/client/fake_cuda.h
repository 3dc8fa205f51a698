// SPDX-License-Identifier: Apache-2.0
//
// A CUDA driver over host memory: the functions of libcuda.so.1 that the client calls, with streams
// that are threads. A program that is linked to it, or has opened it, is not given the real one.
//
// Streams run beside each other, and pause at random, so whatever is not ordered by events comes in
// another order. The default stream (null) is the calling thread itself. What a caller does wrong
// ends the process: a call without a current context, copies to memory that is not pinned, objects
// that have been destroyed, calls that another thread's capture forbids.
#ifndef EMA_TESTS_CLIENT_FAKE_CUDA_H_
#define EMA_TESTS_CLIENT_FAKE_CUDA_H_

#include <cstdint>

extern "C" {

// Copies of all streams wait from now on; and go on.
void ema_fake_cuda_hold();
void ema_fake_cuda_release();
// The `n`-th call from now on (1: the next), of those that can fail, gives `result`. 0: none does.
void ema_fake_cuda_fail(int64_t n, int result);
// There is no memory for a piece of pinned memory that is larger. 0: no limit.
void ema_fake_cuda_limit_pinned(int64_t size_bytes);
// Registering existing memory fails with this result. 0: it succeeds.
void ema_fake_cuda_refuse_registration(int result);
// To pin memory takes so long.
void ema_fake_cuda_delay_pinned(int64_t milliseconds);
// Calls so far that could have failed.
int64_t ema_fake_cuda_calls();
// Copies that have been queued, and those that have been made.
int64_t ema_fake_cuda_queued_copies();
int64_t ema_fake_cuda_made_copies();
// What there is now: bytes of pinned memory (also of registered memory), streams and events,
// contexts that are retained.
int64_t ema_fake_cuda_pinned_bytes();
int64_t ema_fake_cuda_registered_bytes();  // The part of these that was registered.
int64_t ema_fake_cuda_objects();
int64_t ema_fake_cuda_contexts();
// Another thread captures in the global mode, or has ended that.
void ema_fake_cuda_capture(bool captures);
// A stream as a trainer has one. Work that is queued on it runs in its thread.
void* ema_fake_cuda_new_stream();
void ema_fake_cuda_queue(void* stream, void (*work)(void* argument), void* argument);
void ema_fake_cuda_end_stream(void* stream);  // Waits for it, and destroys it.

}  // extern "C"

#endif  // EMA_TESTS_CLIENT_FAKE_CUDA_H_
