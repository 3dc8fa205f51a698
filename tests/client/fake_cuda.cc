// SPDX-License-Identifier: Apache-2.0
#include "tests/client/fake_cuda.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#if __has_include(<cuda.h>)
#include <cuda.h>

#include <type_traits>

#include "client/cpp/gpu/cuda_driver.h"
// Then the compiler compares what follows with the toolkit's declarations.
#else
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUstreamCaptureMode = int;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
#define cuMemHostRegister cuMemHostRegister_v2
#define cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2
#define cuCtxPushCurrent cuCtxPushCurrent_v2
#define cuCtxPopCurrent cuCtxPopCurrent_v2
#define cuMemcpyDtoHAsync cuMemcpyDtoHAsync_v2
#define cuStreamDestroy cuStreamDestroy_v2
#define cuEventDestroy cuEventDestroy_v2
#endif

namespace {

// std:: and not Abseil: nothing here may meet another copy of it in the process of Python.
using Lock = std::unique_lock<std::mutex>;

constexpr int kDevices = 2;
constexpr int kRelaxed = 2;
constexpr int kNotReady = 600;

[[noreturn]] void Die(const char* what) {
  std::fprintf(stderr, "fake CUDA: %s\n", what);
  std::abort();
}

struct Stream {
  bool is_idle() const { return work.empty() && !is_running; }

  std::thread thread;
  std::deque<std::function<void()>> work;
  bool is_running = false;
  bool ends = false;
};

struct Event {
  int64_t recorded = 0;
  int64_t reached = 0;
};

struct State {
  std::mutex mu;
  std::condition_variable changed;
  std::map<Stream*, std::unique_ptr<Stream>> streams;
  // Shared with what is queued: an event may be destroyed before it is reached.
  std::map<Event*, std::shared_ptr<Event>> events;
  std::map<std::byte*, size_t> pinned;  // Allocated and registered memory.
  std::map<std::byte*, size_t> registered;
  int registration_failure = 0;
  int contexts[kDevices] = {};
  bool holds = false;
  bool captures = false;
  int64_t calls = 0;
  int64_t fails_at = 0;
  int failure = 0;
  size_t max_pinned_bytes = 0;
  int64_t pinned_delay_ms = 0;
  int64_t queued_copies = 0;
  int64_t made_copies = 0;
  std::minstd_rand random{20240607};
};

// Never destroyed: threads may outlive main().
State& state() {
  static State* const result = new State;
  return *result;
}

thread_local std::vector<CUcontext> contexts;
thread_local int capture_mode = 0;

CUcontext ContextOf(int device) {
  static char places[kDevices];
  return reinterpret_cast<CUcontext>(&places[device]);
}

// Counts a call. Not 0: it fails with that.
int Count() {
  Lock lock(state().mu);
  ++state().calls;
  if (state().fails_at == 0 || state().calls != state().fails_at) return 0;
  return state().failure;
}

CUresult Result(int result) { return static_cast<CUresult>(result); }

void NeedContext() {
  if (contexts.empty()) Die("no context is current");
}

// A potentially unsafe call, as CUDA calls those that a capture elsewhere forbids.
void NeedNoCapture() {
  const Lock lock(state().mu);
  if (state().captures && capture_mode != kRelaxed) Die("another thread's capture forbids this");
}

void RunStream(Stream* stream) {
  State& s = state();
  Lock lock(s.mu);
  while (true) {
    s.changed.wait(lock, [&] { return !stream->work.empty() || stream->ends; });
    if (stream->work.empty()) return;
    const std::function<void()> work = std::move(stream->work.front());
    stream->work.pop_front();
    stream->is_running = true;
    const auto pause = std::chrono::microseconds(s.random() % 200);
    lock.unlock();
    std::this_thread::sleep_for(pause);
    work();
    lock.lock();
    stream->is_running = false;
    s.changed.notify_all();
  }
}

Stream* NewStream() {
  State& s = state();
  auto stream = std::make_unique<Stream>();
  Stream* const result = stream.get();
  const Lock lock(s.mu);
  result->thread = std::thread(RunStream, result);
  s.streams[result] = std::move(stream);
  return result;
}

// The default stream is the caller.
void Queue(Stream* stream, std::function<void()> work) {
  if (stream == nullptr) return work();
  State& s = state();
  const Lock lock(s.mu);
  if (s.streams.count(stream) == 0) Die("no such stream");
  stream->work.push_back(std::move(work));
  s.changed.notify_all();
}

void Await(Stream* stream) {
  State& s = state();
  Lock lock(s.mu);
  if (s.streams.count(stream) == 0) Die("no such stream");
  s.changed.wait(lock, [&] { return stream->is_idle(); });
}

void EndStream(Stream* stream) {
  Await(stream);
  State& s = state();
  std::unique_ptr<Stream> ended;
  {
    const Lock lock(s.mu);
    stream->ends = true;
    ended = std::move(s.streams[stream]);
    s.streams.erase(stream);
    s.changed.notify_all();
  }
  ended->thread.join();
}

Stream* ToStream(CUstream stream) { return reinterpret_cast<Stream*>(stream); }
std::shared_ptr<Event> ToEvent(CUevent event) {
  const Lock lock(state().mu);
  const auto found = state().events.find(reinterpret_cast<Event*>(event));
  if (found == state().events.end()) Die("no such event");
  return found->second;
}

bool IsPinned(std::byte* to, size_t size_bytes) {
  const auto after = state().pinned.upper_bound(to);
  if (after == state().pinned.begin()) return false;
  const auto& [begin, length] = *std::prev(after);
  return to + size_bytes <= begin + length;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned int) { return Result(0); }

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return Result(ordinal >= 0 && ordinal < kDevices ? Count() : 101);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (const int failure = Count()) return Result(failure);
  *context = ContextOf(device);
  const Lock lock(state().mu);
  ++state().contexts[device];
  return Result(0);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  const Lock lock(state().mu);
  if (state().contexts[device]-- == 0) Die("a context is released too often");
  return Result(0);
}

CUresult cuCtxPushCurrent(CUcontext context) {
  contexts.push_back(context);
  return Result(0);
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  NeedContext();
  *context = contexts.back();
  contexts.pop_back();
  return Result(0);
}

CUresult cuMemHostAlloc(void** memory, size_t size_bytes, unsigned int flags) {
  NeedContext();
  NeedNoCapture();
  if (flags != 1) Die("pinned memory that not every GPU reaches");
  if (const int failure = Count()) return Result(failure);
  int64_t delay_ms = 0;
  {
    const Lock lock(state().mu);
    delay_ms = state().pinned_delay_ms;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
  const Lock lock(state().mu);
  if (state().max_pinned_bytes > 0 && size_bytes > state().max_pinned_bytes) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *memory = std::malloc(size_bytes);
  state().pinned[static_cast<std::byte*>(*memory)] = size_bytes;
  return Result(0);
}

CUresult cuMemFreeHost(void* memory) {
  NeedContext();
  NeedNoCapture();
  const Lock lock(state().mu);
  auto* const place = static_cast<std::byte*>(memory);
  if (state().registered.count(place) != 0) Die("registered memory is freed");
  if (state().pinned.erase(place) == 0) Die("not pinned memory");
  std::free(memory);
  return Result(0);
}

CUresult cuMemHostRegister(void* memory, size_t size_bytes, unsigned int flags) {
  NeedContext();
  NeedNoCapture();
  if (flags != 1) Die("registered memory that not every GPU reaches");
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  auto* const place = static_cast<std::byte*>(memory);
  if (reinterpret_cast<uintptr_t>(place) % page_bytes != 0 || size_bytes % page_bytes != 0) {
    Die("registered memory that is not whole pages");
  }
  // It fails for pages that are not mapped.
  if (msync(memory, size_bytes, MS_ASYNC) != 0) Die("registered memory that is not mapped");
  if (const int failure = Count()) return Result(failure);
  const Lock lock(state().mu);
  if (state().registration_failure != 0) return Result(state().registration_failure);
  const auto next = state().pinned.lower_bound(place);
  if ((next != state().pinned.end() && next->first < place + size_bytes) || IsPinned(place, 1)) {
    Die("memory is registered twice");
  }
  state().pinned[place] = state().registered[place] = size_bytes;
  return Result(0);
}

CUresult cuMemHostUnregister(void* memory) {
  NeedContext();
  NeedNoCapture();
  const Lock lock(state().mu);
  if (state().registered.erase(static_cast<std::byte*>(memory)) == 0) Die("not registered memory");
  state().pinned.erase(static_cast<std::byte*>(memory));
  return Result(0);
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t size_bytes, CUstream stream) {
  NeedContext();
  if (const int failure = Count()) return Result(failure);
  State& s = state();
  {
    const Lock lock(s.mu);
    if (!IsPinned(static_cast<std::byte*>(to), size_bytes)) Die("a copy to other memory");
    ++s.queued_copies;
  }
  Queue(ToStream(stream), [&s, to, from, size_bytes] {
    {
      Lock lock(s.mu);
      s.changed.wait(lock, [&] { return !s.holds; });
    }
    // NOLINTNEXTLINE(performance-no-int-to-ptr): CUDA's type.
    std::memcpy(to, reinterpret_cast<const void*>(static_cast<uintptr_t>(from)), size_bytes);
    const Lock lock(s.mu);
    ++s.made_copies;
    s.changed.notify_all();
  });
  return Result(0);
}

CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  NeedContext();
  NeedNoCapture();
  if (flags != 1) Die("a stream that the default stream waits for");
  if (const int failure = Count()) return Result(failure);
  *stream = reinterpret_cast<CUstream>(NewStream());
  return Result(0);
}

CUresult cuStreamDestroy(CUstream stream) {
  NeedContext();
  EndStream(ToStream(stream));
  return Result(0);
}

// Only the answers that end a wait count as calls: how many there are before is chance.
CUresult cuStreamQuery(CUstream stream) {
  NeedContext();
  NeedNoCapture();
  {
    const Lock lock(state().mu);
    if (!ToStream(stream)->is_idle()) return Result(kNotReady);
  }
  return Result(Count());
}

CUresult cuEventCreate(CUevent* event, unsigned int) {
  NeedContext();
  NeedNoCapture();
  if (const int failure = Count()) return Result(failure);
  const auto made = std::make_shared<Event>();
  *event = reinterpret_cast<CUevent>(made.get());
  const Lock lock(state().mu);
  state().events[made.get()] = made;
  return Result(0);
}

CUresult cuEventDestroy(CUevent event) {
  NeedContext();
  ToEvent(event);
  const Lock lock(state().mu);
  state().events.erase(reinterpret_cast<Event*>(event));
  return Result(0);
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  NeedContext();
  if (const int failure = Count()) return Result(failure);
  State& s = state();
  const std::shared_ptr<Event> recorded = ToEvent(event);
  int64_t number = 0;
  {
    const Lock lock(s.mu);
    number = ++recorded->recorded;
  }
  Queue(ToStream(stream), [&s, recorded, number] {
    const Lock lock(s.mu);
    recorded->reached = std::max(recorded->reached, number);
    s.changed.notify_all();
  });
  return Result(0);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
  NeedContext();
  if (const int failure = Count()) return Result(failure);
  State& s = state();
  const std::shared_ptr<Event> awaited = ToEvent(event);
  int64_t number = 0;
  {
    const Lock lock(s.mu);
    number = awaited->recorded;
  }
  Queue(ToStream(stream), [&s, awaited, number] {
    Lock lock(s.mu);
    s.changed.wait(lock, [&] { return awaited->reached >= number; });
  });
  return Result(0);
}

CUresult cuEventQuery(CUevent event) {
  NeedContext();
  NeedNoCapture();
  const std::shared_ptr<Event> awaited = ToEvent(event);
  {
    const Lock lock(state().mu);
    if (awaited->reached < awaited->recorded) return Result(kNotReady);
  }
  return Result(Count());
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  const int before = std::exchange(capture_mode, static_cast<int>(*mode));
  *mode = static_cast<CUstreamCaptureMode>(before);
  return Result(0);
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = static_cast<int>(error) == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : nullptr;
  return Result(*name == nullptr ? 1 : 0);
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = static_cast<int>(error) == 700 ? "an illegal memory access was encountered" : nullptr;
  return Result(*text == nullptr ? 1 : 0);
}

void ema_fake_cuda_hold() {
  const Lock lock(state().mu);
  state().holds = true;
}

void ema_fake_cuda_release() {
  const Lock lock(state().mu);
  state().holds = false;
  state().changed.notify_all();
}

void ema_fake_cuda_fail(int64_t n, int result) {
  const Lock lock(state().mu);
  state().fails_at = n == 0 ? 0 : state().calls + n;
  state().failure = result;
}

int64_t ema_fake_cuda_calls() {
  const Lock lock(state().mu);
  return state().calls;
}

void ema_fake_cuda_limit_pinned(int64_t size_bytes) {
  const Lock lock(state().mu);
  state().max_pinned_bytes = static_cast<size_t>(size_bytes);
}

void ema_fake_cuda_refuse_registration(int result) {
  const Lock lock(state().mu);
  state().registration_failure = result;
}

void ema_fake_cuda_delay_pinned(int64_t milliseconds) {
  const Lock lock(state().mu);
  state().pinned_delay_ms = milliseconds;
}

int64_t ema_fake_cuda_queued_copies() {
  const Lock lock(state().mu);
  return state().queued_copies;
}

int64_t ema_fake_cuda_made_copies() {
  const Lock lock(state().mu);
  return state().made_copies;
}

int64_t ema_fake_cuda_pinned_bytes() {
  const Lock lock(state().mu);
  int64_t total_bytes = 0;
  for (const auto& [memory, size_bytes] : state().pinned) {
    total_bytes += static_cast<int64_t>(size_bytes);
  }
  return total_bytes;
}

int64_t ema_fake_cuda_registered_bytes() {
  const Lock lock(state().mu);
  int64_t total_bytes = 0;
  for (const auto& [memory, size_bytes] : state().registered) {
    total_bytes += static_cast<int64_t>(size_bytes);
  }
  return total_bytes;
}

int64_t ema_fake_cuda_objects() {
  const Lock lock(state().mu);
  return static_cast<int64_t>(state().streams.size() + state().events.size());
}

int64_t ema_fake_cuda_contexts() {
  const Lock lock(state().mu);
  return state().contexts[0] + state().contexts[1];
}

void ema_fake_cuda_capture(bool captures) {
  const Lock lock(state().mu);
  state().captures = captures;
}

void* ema_fake_cuda_new_stream() { return NewStream(); }

void ema_fake_cuda_queue(void* stream, void (*work)(void* argument), void* argument) {
  Queue(static_cast<Stream*>(stream), [work, argument] { work(argument); });
}

void ema_fake_cuda_end_stream(void* stream) { EndStream(static_cast<Stream*>(stream)); }

}  // extern "C"

#if __has_include(<cuda.h>)
namespace {

using ema::client_internal::CudaDriver;

// An enum of CUDA's as the int that it is.
template <typename T>
using Plain = std::conditional_t<std::is_same_v<T, CUstreamCaptureMode*>, int*,
                                 std::conditional_t<std::is_enum_v<T>, int, T>>;
template <typename Ours, typename Theirs>
constexpr bool kSame = false;
template <typename... Ours, typename... Theirs>
constexpr bool kSame<int (*)(Ours...), CUresult (*)(Theirs...)> =
    (std::is_same_v<Ours, Plain<Theirs>> && ...);

static_assert(kSame<decltype(CudaDriver::Init), decltype(&cuInit)>);
static_assert(kSame<decltype(CudaDriver::DeviceGet), decltype(&cuDeviceGet)>);
static_assert(
    kSame<decltype(CudaDriver::DevicePrimaryCtxRetain), decltype(&cuDevicePrimaryCtxRetain)>);
static_assert(
    kSame<decltype(CudaDriver::DevicePrimaryCtxRelease), decltype(&cuDevicePrimaryCtxRelease)>);
static_assert(kSame<decltype(CudaDriver::CtxPushCurrent), decltype(&cuCtxPushCurrent)>);
static_assert(kSame<decltype(CudaDriver::CtxPopCurrent), decltype(&cuCtxPopCurrent)>);
static_assert(kSame<decltype(CudaDriver::MemHostAlloc), decltype(&cuMemHostAlloc)>);
static_assert(kSame<decltype(CudaDriver::MemFreeHost), decltype(&cuMemFreeHost)>);
static_assert(kSame<decltype(CudaDriver::MemcpyDtoHAsync), decltype(&cuMemcpyDtoHAsync)>);
static_assert(kSame<decltype(CudaDriver::StreamCreate), decltype(&cuStreamCreate)>);
static_assert(kSame<decltype(CudaDriver::StreamDestroy), decltype(&cuStreamDestroy)>);
static_assert(kSame<decltype(CudaDriver::StreamWaitEvent), decltype(&cuStreamWaitEvent)>);
static_assert(kSame<decltype(CudaDriver::StreamQuery), decltype(&cuStreamQuery)>);
static_assert(kSame<decltype(CudaDriver::EventCreate), decltype(&cuEventCreate)>);
static_assert(kSame<decltype(CudaDriver::EventRecord), decltype(&cuEventRecord)>);
static_assert(kSame<decltype(CudaDriver::EventQuery), decltype(&cuEventQuery)>);
static_assert(kSame<decltype(CudaDriver::EventDestroy), decltype(&cuEventDestroy)>);
static_assert(kSame<decltype(CudaDriver::ThreadExchangeStreamCaptureMode),
                    decltype(&cuThreadExchangeStreamCaptureMode)>);
static_assert(kSame<decltype(CudaDriver::GetErrorName), decltype(&cuGetErrorName)>);
static_assert(kSame<decltype(CudaDriver::GetErrorString), decltype(&cuGetErrorString)>);
static_assert(CudaDriver::kSuccess == CUDA_SUCCESS);
static_assert(CudaDriver::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(CudaDriver::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(CudaDriver::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(CudaDriver::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(CudaDriver::kHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(CudaDriver::kCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);

}  // namespace
#endif
