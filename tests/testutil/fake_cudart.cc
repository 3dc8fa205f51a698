// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/fake_cudart.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "tests/testutil/fake_cudart_kernels.h"
#include "tests/testutil/fake_cudart_memory.h"

namespace {

// std:: and not Abseil: the program that loads this may have another copy of it.
using Lock = std::unique_lock<std::mutex>;

constexpr int kDevices = 2;

[[noreturn]] void Die(std::string_view what) {
  std::fprintf(stderr, "fake CUDA runtime: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

struct Stream {
  bool is_idle() const { return work.empty() && !is_running; }

  int device = 0;
  bool has_thread = false;
  std::deque<std::function<void()>> work;
  bool is_running = false;
};

struct Event {
  const int device;
  int64_t recorded = 0;
  int64_t reached = 0;
};

struct State {
  std::mutex mu;
  std::condition_variable changed;
  std::map<Stream*, std::unique_ptr<Stream>> streams;
  // Shared with what is queued: an event may be destroyed before it is reached.
  std::map<Event*, std::shared_ptr<Event>> events;
  FakePieces device;
  FakePieces pinned;
  // Memory of the device that has no address by itself.
  std::map<CUmemGenericAllocationHandle, FakePiece> unmapped;
  CUmemGenericAllocationHandle last_unmapped = 0;
  int64_t memory_bytes = int64_t{8} << 30;
  std::map<const void*, std::string> kernels;
  int64_t synchronizations = 0;
  int64_t launches = 0;
  int64_t calls = 0;
  int64_t breaks_at = 0;
  cudaError_t sticky = cudaSuccess;  // Once it is broken.
  int64_t memory_calls = 0;
  int64_t refuses_at = 0;
  std::atomic<bool> refuses_mapped = false;
  std::minstd_rand random{20240607};
};

// Never destroyed: threads may outlive main().
State& state() {
  static State* const result = new State;
  return *result;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local Configuration configuration;

int64_t DeviceBytes() {
  int64_t total = state().device.total_bytes();
  for (const auto& [handle, piece] : state().unmapped) {
    total += static_cast<int64_t>(piece.size_bytes);
  }
  return total;
}

// Counts a call. Not cudaSuccess: it fails with that.
cudaError_t Count() {
  State& s = state();
  const Lock lock(s.mu);
  if (++s.calls == s.breaks_at) {
    s.sticky = cudaErrorIllegalAddress;
    s.changed.notify_all();
  }
  return s.sticky;
}
// The same of a call that takes so much memory of the device.
cudaError_t CountMemory(size_t device_bytes) {
  if (const cudaError_t failed = Count(); failed != cudaSuccess) return failed;
  State& s = state();
  const Lock lock(s.mu);
  const int64_t left = s.memory_bytes - DeviceBytes();
  const bool has_room = left >= 0 && device_bytes <= static_cast<size_t>(left);
  return ++s.memory_calls != s.refuses_at && has_room ? cudaSuccess : cudaErrorMemoryAllocation;
}
// As the runtime's calls do with what they return, and the driver's do not.
cudaError_t Store(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
#define RETURN_IF_FAILED(error) \
  if (const cudaError_t failed = (error); failed != cudaSuccess) return failed

// Memory of the thread's GPU; gives where its bytes are.
std::byte* NeedDevice(const void* address, size_t size_bytes, std::string_view what) {
  if (!state().device.Have(address, size_bytes, current_device)) Die(what);
  return DeviceBytesAt(address);
}
std::byte* NeedPinned(const void* address, size_t size_bytes, std::string_view what) {
  if (!state().pinned.Have(address, size_bytes, kAnyDevice)) Die(what);
  return static_cast<std::byte*>(const_cast<void*>(address));
}
// Memory that was mapped, of any GPU.
void NeedMapped(const void* address, size_t size_bytes, std::string_view what) {
  if (!state().device.Have(address, size_bytes, kAnyDevice)) Die(what);
}

void RunStream(Stream* stream) {
  State& s = state();
  Lock lock(s.mu);
  while (true) {
    s.changed.wait(lock, [&] { return !stream->work.empty(); });
    const std::function<void()> work = std::move(stream->work.front());
    stream->work.pop_front();
    stream->is_running = true;
    const auto pause = std::chrono::microseconds(s.random() % 4 == 0 ? s.random() % 100 : 0);
    const bool is_done = s.sticky == cudaSuccess;
    lock.unlock();
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
    if (is_done) work();
    lock.lock();
    stream->is_running = false;
    s.changed.notify_all();
  }
}

Stream* StreamOf(cudaStream_t stream) {
  if (stream == nullptr) Die("work on the default stream");
  auto* const result = reinterpret_cast<Stream*>(stream);
  if (state().streams.count(result) == 0) Die("no such stream");
  if (result->device != current_device) Die("a stream of another device than the thread's");
  return result;
}

cudaError_t Queue(cudaStream_t of, std::function<void()> work) {
  State& s = state();
  const Lock lock(s.mu);
  Stream* const stream = StreamOf(of);
  stream->work.push_back(std::move(work));
  // LibTorch makes 32 of them at once and for good.
  if (!std::exchange(stream->has_thread, true)) std::thread(RunStream, stream).detach();
  s.changed.notify_all();
  return cudaSuccess;
}

// Waits, and tells what has failed meanwhile.
template <typename IsDone>
cudaError_t Await(const IsDone& is_done) {
  State& s = state();
  Lock lock(s.mu);
  s.changed.wait(lock, [&] { return s.sticky != cudaSuccess || is_done(); });
  return s.sticky;
}

bool AllAreIdle() {
  return std::all_of(state().streams.begin(), state().streams.end(),
                     [](const auto& of) { return of.second->is_idle(); });
}

cudaError_t AwaitAllStreams() {
  {
    const Lock lock(state().mu);
    ++state().synchronizations;
  }
  return Await(AllAreIdle);
}

std::shared_ptr<Event> EventOf(cudaEvent_t event) {
  const Lock lock(state().mu);
  const auto found = state().events.find(reinterpret_cast<Event*>(event));
  if (found == state().events.end()) Die("no such event");
  return found->second;
}

constexpr std::align_val_t kAlignment{512};

size_t WholePages(size_t size_bytes) {
  constexpr size_t kHostPageBytes = 4096;
  return (std::max<size_t>(size_bytes, 1) + kHostPageBytes - 1) / kHostPageBytes * kHostPageBytes;
}

size_t Remove(FakePieces& pieces, void* memory) {
  const std::optional<size_t> size_bytes = pieces.Remove(memory);
  if (!size_bytes.has_value()) Die("memory that was not allocated");
  return *size_bytes;
}

// ---- The driver: memory that is mapped page by page ---------------------------------------------

constexpr size_t kPageBytes = size_t{2} << 20;

std::byte* ToAddress(CUdeviceptr address) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): CUDA's type.
  return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address));
}

// The driver's errors have the runtime's numbers.
#define RETURN_IF_DRIVER_FAILED(error)                           \
  if (const cudaError_t failed = (error); failed != cudaSuccess) \
  return static_cast<CUresult>(failed)

CUresult DeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return static_cast<CUresult>(Count());
}

CUresult DeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? 1 : 0;
  return static_cast<CUresult>(Count());
}

CUresult MemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                     CUmemAllocationGranularity_flags) {
  *granularity = kPageBytes;
  return static_cast<CUresult>(Count());
}

CUresult MemAddressReserve(CUdeviceptr* address, size_t size_bytes, size_t, CUdeviceptr,
                           unsigned long long) {
  RETURN_IF_DRIVER_FAILED(Count());
  *address = reinterpret_cast<CUdeviceptr>(ReserveDeviceAddresses(size_bytes));
  return *address != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult MemAddressFree(CUdeviceptr address, size_t size_bytes) {
  FreeDeviceAddresses(ToAddress(address), size_bytes);
  return static_cast<CUresult>(Count());
}

CUresult MemCreate(CUmemGenericAllocationHandle* handle, size_t size_bytes,
                   const CUmemAllocationProp* of, unsigned long long) {
  RETURN_IF_DRIVER_FAILED(CountMemory(size_bytes));
  const Lock lock(state().mu);
  *handle = ++state().last_unmapped;
  state().unmapped[*handle] = {size_bytes, of->location.id};
  return CUDA_SUCCESS;
}

// The handle's memory then has an address, and counts there.
CUresult MemMap(CUdeviceptr address, size_t size_bytes, size_t, CUmemGenericAllocationHandle handle,
                unsigned long long) {
  RETURN_IF_DRIVER_FAILED(Count());
  State& s = state();
  const Lock lock(s.mu);
  const auto found = s.unmapped.find(handle);
  if (found == s.unmapped.end() || found->second.size_bytes != size_bytes) {
    Die("no such memory to map");
  }
  found->second.size_bytes = 0;
  s.device.Add(ToAddress(address), {size_bytes, found->second.device});
  return CUDA_SUCCESS;
}

CUresult MemSetAccess(CUdeviceptr address, size_t size_bytes, const CUmemAccessDesc*, size_t) {
  RETURN_IF_DRIVER_FAILED(Count());
  NeedMapped(ToAddress(address), size_bytes, "access to memory that is not mapped");
  if (state().refuses_mapped) return CUDA_ERROR_UNKNOWN;
  PutDeviceMemory(ToAddress(address), size_bytes);
  return CUDA_SUCCESS;
}

CUresult MemUnmap(CUdeviceptr address, size_t size_bytes) {
  RETURN_IF_DRIVER_FAILED(Count());
  NeedMapped(ToAddress(address), size_bytes, "memory is unmapped that is not mapped");
  for (size_t done = 0; done < size_bytes;) {
    done += Remove(state().device, ToAddress(address) + done);
  }
  TakeDeviceMemory(ToAddress(address), size_bytes);
  return CUDA_SUCCESS;
}

CUresult MemRelease(CUmemGenericAllocationHandle handle) {
  const Lock lock(state().mu);
  if (state().unmapped.erase(handle) == 0) Die("memory is released that is not there");
  return CUDA_SUCCESS;
}

CUresult GetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

void NotCalled() { Die("a function of the driver that it does not have"); }

// Null: there is no such function.
void* DriverFunction(std::string_view name) {
  static const auto* const functions = new std::map<std::string_view, void*>{
      {"cuDeviceGet", reinterpret_cast<void*>(&DeviceGet)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(&DeviceGetAttribute)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&MemGetAllocationGranularity)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&MemAddressReserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&MemAddressFree)},
      {"cuMemCreate", reinterpret_cast<void*>(&MemCreate)},
      {"cuMemMap", reinterpret_cast<void*>(&MemMap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&MemSetAccess)},
      {"cuMemUnmap", reinterpret_cast<void*>(&MemUnmap)},
      {"cuMemRelease", reinterpret_cast<void*>(&MemRelease)},
      {"cuGetErrorString", reinterpret_cast<void*>(&GetErrorString)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(&NotCalled)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(&NotCalled)},
      {"cuMemRetainAllocationHandle", reinterpret_cast<void*>(&NotCalled)},
      {"cuMemGetAllocationPropertiesFromHandle", reinterpret_cast<void*>(&NotCalled)},
      {"cuMemsetD32Async", reinterpret_cast<void*>(&NotCalled)},
      {"cuStreamWriteValue32", reinterpret_cast<void*>(&NotCalled)},
  };
  const auto found = functions->find(name);
  return found != functions->end() ? found->second : nullptr;
}

}  // namespace

extern "C" {

// ---- Kernels -----------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
// Of managed variables, which there are none of; named by unoptimized code only.
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* host_function, char*, const char* device_name, int,
                            uint3*, uint3*, dim3*, dim3*, int*) {
  const Lock lock(state().mu);
  state().kernels[host_function] = device_name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                     cudaStream_t stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                       void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host_function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t stream) {
  RETURN_IF_FAILED(Count());
  std::string name;
  uint32_t seed = 0;
  {
    const Lock lock(state().mu);
    name = state().kernels[kernel];
    seed = static_cast<uint32_t>(state().random());
    ++state().launches;
  }
  const auto find = [device = current_device](const void* address, int64_t size_bytes,
                                              bool may_be_pinned, std::string_view what) {
    const auto size = static_cast<size_t>(size_bytes);
    if (size_bytes >= 0 && state().device.Have(address, size, device)) {
      return DeviceBytesAt(address);
    }
    if (may_be_pinned && state().pinned.Have(address, size, kAnyDevice)) {
      return static_cast<std::byte*>(const_cast<void*>(address));
    }
    Die("a kernel uses memory that is not its GPU's: " + std::string(what));
  };
  auto work = FakeKernelWork({name, grid, block, shared_bytes, arguments}, find);
  if (work == nullptr) Die("a launch that no GPU takes, or of a kernel that is not ours: " + name);
  return Queue(stream, [seed, work = std::move(work)] {
    std::minstd_rand random(seed);
    work(random);
  });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* host_function) {
  RETURN_IF_FAILED(Count());
  const Lock lock(state().mu);
  if (state().kernels.count(host_function) == 0) Die("no such kernel");
  *attributes = {};
  return cudaSuccess;
}

// ---- Devices and errors ------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return Count();
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  RETURN_IF_FAILED(Count());
  *properties = {};
  std::strncpy(properties->name, "a GPU that is not there", sizeof(properties->name) - 1);
  properties->totalGlobalMem = size_t{8} << 30;
  properties->major = 9;
  properties->multiProcessorCount = 4;
  properties->warpSize = 32;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return Count();
}

cudaError_t cudaSetDevice(int device) {
  RETURN_IF_FAILED(Count());
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return Count();
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return Count();
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = DriverFunction(name);
  if (result != nullptr) {
    *result =
        *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return Count();
}

cudaError_t cudaDeviceSynchronize() {
  RETURN_IF_FAILED(Count());
  return AwaitAllStreams();
}

cudaError_t cudaGetLastError() {
  const Lock lock(state().mu);
  const cudaError_t error = state().sticky != cudaSuccess ? state().sticky : last_error;
  last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOther";
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    default:
      return "some error";
  }
}

// ---- Memory ------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** memory, size_t size_bytes) {
  RETURN_IF_FAILED(Store(CountMemory(size_bytes)));
  std::byte* const address = ReserveDeviceAddresses(WholePages(size_bytes));
  if (address == nullptr) return last_error = cudaErrorMemoryAllocation;
  PutDeviceMemory(address, WholePages(size_bytes));
  state().device.Add(address, {size_bytes, current_device});
  *memory = address;
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  RETURN_IF_FAILED(Count());
  if (memory == nullptr) return cudaSuccess;
  RETURN_IF_FAILED(AwaitAllStreams());
  const size_t size_bytes = Remove(state().device, memory);
  FreeDeviceAddresses(static_cast<std::byte*>(memory), WholePages(size_bytes));
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t size_bytes, unsigned flags) {
  RETURN_IF_FAILED(Store(CountMemory(0)));
  if (flags != cudaHostAllocMapped) Die("pinned memory that kernels do not reach");
  *memory = nullptr;
  if (size_bytes == 0) return cudaSuccess;
  *memory = ::operator new(size_bytes, kAlignment);
  state().pinned.Add(*memory, {size_bytes, kAnyDevice});
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  RETURN_IF_FAILED(Count());
  RETURN_IF_FAILED(AwaitAllStreams());
  if (memory == nullptr) return cudaSuccess;
  Remove(state().pinned, memory);
  ::operator delete(memory, kAlignment);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  RETURN_IF_FAILED(Count());
  const Lock lock(state().mu);
  *total_bytes = static_cast<size_t>(state().memory_bytes);
  *free_bytes = *total_bytes - static_cast<size_t>(DeviceBytes());
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  RETURN_IF_FAILED(Count());
  const bool is_to_host = kind == cudaMemcpyDeviceToHost;
  const bool is_from_host = kind == cudaMemcpyHostToDevice;
  if (!is_to_host && !is_from_host && kind != cudaMemcpyDeviceToDevice) Die("a copy of no kind");
  std::byte* const target =
      (is_to_host ? NeedPinned : NeedDevice)(to, size_bytes, "a copy to other memory");
  const std::byte* const source =
      (is_from_host ? NeedPinned : NeedDevice)(from, size_bytes, "a copy of other memory");
  if (size_bytes == 0) return cudaSuccess;  // As the real one, which has null for no memory, too.
  return Queue(stream, [=] { std::memcpy(target, source, size_bytes); });
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t size_bytes, cudaStream_t stream) {
  RETURN_IF_FAILED(Count());
  std::byte* const bytes = NeedDevice(data, size_bytes, "other memory is set");
  return Queue(stream, [=] { std::memset(bytes, value, size_bytes); });
}

// ---- Streams and events ------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  RETURN_IF_FAILED(Count());
  if (flags != cudaStreamNonBlocking) Die("a stream that the default stream waits for");
  auto made = std::make_unique<Stream>();
  made->device = current_device;
  *stream = reinterpret_cast<cudaStream_t>(made.get());
  const Lock lock(state().mu);
  Stream* const key = made.get();
  state().streams[key] = std::move(made);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  RETURN_IF_FAILED(Count());
  const Stream* of = nullptr;
  {
    const Lock lock(state().mu);
    ++state().synchronizations;
    // LibTorch does before it unmaps memory: none of ours waits for that stream.
    if (stream == nullptr) return state().sticky;
    of = StreamOf(stream);
  }
  return Await([of] { return of->is_idle(); });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return Count();
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return Count();
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(*mode, current);
  return Count();
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  RETURN_IF_FAILED(Store(CountMemory(0)));
  const auto made = std::make_shared<Event>(Event{.device = current_device});
  *event = reinterpret_cast<cudaEvent_t>(made.get());
  const Lock lock(state().mu);
  state().events[made.get()] = made;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  EventOf(event);
  {
    const Lock lock(state().mu);
    state().events.erase(reinterpret_cast<Event*>(event));
  }
  return Count();
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  RETURN_IF_FAILED(Count());
  State& s = state();
  const std::shared_ptr<Event> recorded = EventOf(event);
  if (recorded->device != current_device) Die("an event of another device than the stream's");
  int64_t number = 0;
  {
    const Lock lock(s.mu);
    number = ++recorded->recorded;
  }
  return Queue(stream, [&s, recorded, number] {
    const Lock lock(s.mu);
    recorded->reached = std::max(recorded->reached, number);
    s.changed.notify_all();
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  RETURN_IF_FAILED(Count());
  const std::shared_ptr<Event> awaited = EventOf(event);
  int64_t number = 0;
  {
    const Lock lock(state().mu);
    number = awaited->recorded;
  }
  return Await([&] { return awaited->reached >= number; });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  RETURN_IF_FAILED(Count());
  const std::shared_ptr<Event> awaited = EventOf(event);
  const Lock lock(state().mu);
  return awaited->reached >= awaited->recorded ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  RETURN_IF_FAILED(Count());
  State& s = state();
  const std::shared_ptr<Event> awaited = EventOf(event);
  int64_t number = 0;
  {
    const Lock lock(s.mu);
    number = awaited->recorded;
  }
  return Queue(stream, [&s, awaited, number] {
    Lock lock(s.mu);
    s.changed.wait(lock, [&] { return s.sticky != cudaSuccess || awaited->reached >= number; });
  });
}

// ---- What LibTorch could call, and does not here
// -------------------------------------------------

#define EMA_NOT_CALLED(result, name, ...) \
  result name(__VA_ARGS__) { Die(#name " was called"); }
EMA_NOT_CALLED(cudaError_t, cudaDeviceCanAccessPeer, int*, int, int)
EMA_NOT_CALLED(cudaError_t, cudaDeviceEnablePeerAccess, int, unsigned)
EMA_NOT_CALLED(cudaError_t, cudaDeviceGetDefaultMemPool, cudaMemPool_t*, int)
EMA_NOT_CALLED(cudaError_t, cudaEventElapsedTime, float*, cudaEvent_t, cudaEvent_t)
EMA_NOT_CALLED(cudaError_t, cudaFreeAsync, void*, cudaStream_t)
EMA_NOT_CALLED(cudaError_t, cudaGraphNodeGetDependencies, cudaGraphNode_t, cudaGraphNode_t*,
               cudaGraphEdgeData*, size_t*)
EMA_NOT_CALLED(cudaError_t, cudaIpcCloseMemHandle, void*)
EMA_NOT_CALLED(cudaError_t, cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
EMA_NOT_CALLED(cudaError_t, cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
EMA_NOT_CALLED(cudaError_t, cudaMallocAsync, void**, size_t, cudaStream_t)
EMA_NOT_CALLED(cudaError_t, cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
EMA_NOT_CALLED(cudaError_t, cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
EMA_NOT_CALLED(cudaError_t, cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
EMA_NOT_CALLED(cudaError_t, cudaMemPoolTrimTo, cudaMemPool_t, size_t)
EMA_NOT_CALLED(cudaError_t, cudaMemcpy, void*, const void*, size_t, cudaMemcpyKind)
EMA_NOT_CALLED(cudaError_t, cudaMemcpyPeerAsync, void*, int, const void*, int, size_t, cudaStream_t)
EMA_NOT_CALLED(cudaError_t, cudaRuntimeGetVersion, int*)
EMA_NOT_CALLED(cudaError_t, cudaStreamQuery, cudaStream_t)

// ---- For tests ---------------------------------------------------------------------------------

void ema_fake_cudart_break(int64_t n) {
  const Lock lock(state().mu);
  state().breaks_at = state().calls + n;
}

void ema_fake_cudart_refuse(int64_t n) {
  const Lock lock(state().mu);
  state().refuses_at = state().memory_calls + n;
}

bool ema_fake_cudart_is_broken() {
  const Lock lock(state().mu);
  return state().sticky != cudaSuccess;
}

int64_t ema_fake_cudart_memory_calls() {
  const Lock lock(state().mu);
  return state().memory_calls;
}

int64_t ema_fake_cudart_synchronizations() {
  const Lock lock(state().mu);
  return state().synchronizations;
}

int64_t ema_fake_cudart_launches() {
  const Lock lock(state().mu);
  return state().launches;
}

void ema_fake_cudart_refuse_mapped(bool refuses) { state().refuses_mapped = refuses; }

void ema_fake_cudart_set_memory(int64_t size_bytes) {
  const Lock lock(state().mu);
  state().memory_bytes = size_bytes;
}

int64_t ema_fake_cudart_device_bytes() {
  const Lock lock(state().mu);
  return DeviceBytes();
}

int64_t ema_fake_cudart_pinned_bytes() { return state().pinned.total_bytes(); }

int64_t ema_fake_cudart_events() {
  const Lock lock(state().mu);
  return static_cast<int64_t>(state().events.size());
}

}  // extern "C"
