// SPDX-License-Identifier: Apache-2.0
#include "server/device/cuda_accelerator.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/kernel/kernels_cuda.h"

// LibTorch has it for its other half, libtorch_cuda.so, but in no header.
// NOLINTBEGIN(readability-identifier-naming)
namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*has_primary_context)(DeviceIndex));
}
// NOLINTEND(readability-identifier-naming)

namespace ema {
namespace {

using Index = c10::DeviceIndex;

std::string NameOf(Index index) { return absl::StrCat("cuda:", static_cast<int>(index)); }

// What follows is advice to users of Python.
std::string FirstLine(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

// Calls `work`, which may throw as LibTorch does, with the device as the thread's current one.
template <typename Work>
absl::Status Try(Index index, const Work& work) {
  try {
    const c10::cuda::CUDAGuard guard(index);
    work();
    return absl::OkStatus();
  } catch (const c10::Error& error) {
    return MakeError(absl::StatusCode::kInternal, ErrorReason::kDevice,
                     absl::StrCat("device \"", NameOf(index), "\": ", FirstLine(error)));
  } catch (const std::exception& error) {
    return MakeError(absl::StatusCode::kInternal, ErrorReason::kDevice,
                     absl::StrCat("device \"", NameOf(index), "\": ", error.what()));
  }
}

absl::Status NoMemory(Index index, std::string_view what) {
  return MakeError(
      absl::StatusCode::kResourceExhausted, ErrorReason::kMemoryBudget,
      absl::StrCat("device \"", NameOf(index), "\": no memory for ", std::string(what)));
}

// The same for work that creates an object, which may fail for lack of memory if others have filled
// the GPU. Not for queued work: its caller would continue without it.
template <typename Work>
absl::Status TryToMake(Index index, std::string_view what, const Work& work) {
  absl::Status no_memory;
  EMA_RETURN_IF_ERROR(Try(index, [&] {
    try {
      work();
    } catch (const c10::OutOfMemoryError&) {
      no_memory = NoMemory(index, what);
    } catch (const c10::AcceleratorError& error) {
      if (error.get_error_code() != cudaErrorMemoryAllocation) throw;
      C10_CUDA_CLEAR_ERROR();
      no_memory = NoMemory(index, what);
    } catch (const c10::Error& error) {
      // LibTorch, having found none, asks NVML who has it, and takes it for a mistake of its own to
      // be refused that, as on a part (MIG) of a GPU. A broken GPU answers nothing.
      size_t free_bytes = 0;
      size_t total_bytes = 0;
      if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) throw;
      no_memory = NoMemory(index, absl::StrCat(std::string(what), ": ", FirstLine(error)));
    }
  }));
  return no_memory;
}

class DeviceMemory : public BlockPool::Memory {
 public:
  DeviceMemory(Index index, void* data) : index_(index), data_(data) {}
  ~DeviceMemory() override {
    // An error is not reported: the device is broken then, and the process will end.
    Try(index_, [this] { c10::cuda::CUDACachingAllocator::raw_delete(data_); }).IgnoreError();
  }
  std::byte* data() override { return static_cast<std::byte*>(data_); }

 private:
  const Index index_;
  void* const data_;
};

class PinnedMemory : public BlockPool::Memory {
 public:
  PinnedMemory(Index index, void* data) : index_(index), data_(data) {}
  ~PinnedMemory() override {
    // In the context that it was made in, or CUDA makes another, on the thread's current device.
    Try(index_, [this] { C10_CUDA_CHECK(cudaFreeHost(data_)); }).IgnoreError();
  }
  std::byte* data() override { return static_cast<std::byte*>(data_); }

 private:
  const Index index_;
  void* const data_;
};

// Not LibTorch's: the end of one throws, and so ends the process, once the device has failed.
class Event {
 public:
  // Of the thread's current device. Throws as LibTorch does. A thread that waits sleeps: receiving
  // threads and gRPC need the processor. For streams to wait, CUDA's headers advise no such flag.
  explicit Event(unsigned waiting = cudaEventBlockingSync) {
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | waiting));
  }
  ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// LibTorch has 32 streams of a priority for each device, which it hands out in turn: from the 33rd
// queue on, two have the same one. Their work is then done in the order in which it was queued, and
// who waits for one may wait for the other, too. That costs time; each still gets what was
// promised, as no work on a stream waits for the host. All have one stream of copies.
class CudaQueue : public Accelerator::Queue {
 public:
  // Of the thread's current device. Throws as LibTorch does. `copies`: by which all queues copy
  // ahead.
  CudaQueue(Index index, cudaStream_t copies)
      : index_(index),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, index)),
        copies_(copies) {}
  ~CudaQueue() override {
    // The copies last: but for one that failed half-way, the other waits for ours.
    for (const cudaStream_t stream : {stream_, copies_}) {
      Try(index_, [stream] { C10_CUDA_CHECK(cudaStreamSynchronize(stream)); }).IgnoreError();
    }
  }

  absl::Status CopyToDevice(std::byte* device, const std::byte* host, int64_t size_bytes) override {
    return Copy(device, host, size_bytes, cudaMemcpyHostToDevice);
  }
  absl::Status CopyAhead(std::byte* device, const std::byte* host, int64_t size_bytes) override {
    return Try(index_, [&] {
      C10_CUDA_CHECK(cudaMemcpyAsync(device, host, static_cast<size_t>(size_bytes),
                                     cudaMemcpyHostToDevice, copies_));
      C10_CUDA_CHECK(cudaEventRecord(copied_, copies_));
      C10_CUDA_CHECK(cudaStreamWaitEvent(stream_, copied_, cudaEventWaitDefault));
    });
  }
  absl::Status CopyToHost(std::byte* host, const std::byte* device, int64_t size_bytes) override {
    return Copy(host, device, size_bytes, cudaMemcpyDeviceToHost);
  }
  absl::Status CopyOnDevice(std::byte* to, const std::byte* from, int64_t size_bytes) override {
    return Copy(to, from, size_bytes, cudaMemcpyDeviceToDevice);
  }
  absl::Status Zero(std::byte* device, int64_t size_bytes) override {
    return Try(index_, [&] {
      C10_CUDA_CHECK(cudaMemsetAsync(device, 0, static_cast<size_t>(size_bytes), stream_));
    });
  }
  absl::Status Fold(const FoldTable& table) override {
    return Try(index_, [&] { C10_CUDA_CHECK(LaunchFold(table, stream_)); });
  }
  absl::Status Sum(const SumTable& table) override {
    return Try(index_, [&] { C10_CUDA_CHECK(LaunchSum(table, stream_)); });
  }
  absl::Status Cast(const CastRun& run) override {
    return Try(index_, [&] { C10_CUDA_CHECK(LaunchCast(run, stream_)); });
  }
  absl::Status Mark(int slot) override {
    return Try(index_, [&] { C10_CUDA_CHECK(cudaEventRecord(marks_[slot], stream_)); });
  }
  absl::Status Wait(int slot) override {
    return Try(index_, [&] { C10_CUDA_CHECK(cudaEventSynchronize(marks_[slot])); });
  }

 private:
  absl::Status Copy(std::byte* to, const std::byte* from, int64_t size_bytes, cudaMemcpyKind kind) {
    return Try(index_, [&] {
      C10_CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(size_bytes), kind, stream_));
    });
  }

  const Index index_;
  const cudaStream_t stream_;
  const cudaStream_t copies_;
  const Event copied_{cudaEventDefault};  // Only streams wait for it.
  const std::array<Event, kSlots> marks_;
};

class CudaAccelerator : public Accelerator {
 public:
  CudaAccelerator(Index index, int64_t total_memory_bytes, cudaStream_t copies)
      : index_(index), total_memory_bytes_(total_memory_bytes), copies_(copies) {}

  std::string name() const override { return NameOf(index_); }

  absl::StatusOr<std::unique_ptr<Queue>> NewQueue() override {
    std::unique_ptr<Queue> queue;
    EMA_RETURN_IF_ERROR(TryToMake(index_, "a stream",
                                  [&] { queue = std::make_unique<CudaQueue>(index_, copies_); }));
    return queue;
  }

  absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocateDevice(int64_t size_bytes) override {
    const std::string what = absl::StrCat(size_bytes, " bytes");
    // What CUDA says to sizes that no GPU has need not be that there is no memory.
    if (size_bytes < 0 || size_bytes > total_memory_bytes_) return NoMemory(index_, what);
    void* data = nullptr;
    EMA_RETURN_IF_ERROR(TryToMake(index_, what, [&] {
      // Nothing would have no address.
      data = c10::cuda::CUDACachingAllocator::raw_alloc(
          static_cast<size_t>(std::max<int64_t>(size_bytes, 1)));
    }));
    return std::make_unique<DeviceMemory>(index_, data);
  }

  absl::StatusOr<std::unique_ptr<BlockPool::Memory>> AllocatePinned(int64_t size_bytes) override {
    void* data = nullptr;
    EMA_RETURN_IF_ERROR(
        TryToMake(index_, absl::StrCat(size_bytes, " bytes of pinned host memory"), [&] {
          C10_CUDA_CHECK(
              cudaHostAlloc(&data, static_cast<size_t>(size_bytes), cudaHostAllocMapped));
        }));
    return std::make_unique<PinnedMemory>(index_, data);
  }

  void Trim() override {
    // What fails breaks the device at the next call that can say so.
    Try(index_, [] {
      // What has failed by now must show here: in LibTorch's allocator it would end the process.
      C10_CUDA_CHECK(cudaDeviceSynchronize());
      c10::cuda::CUDACachingAllocator::emptyCache();
    }).IgnoreError();
  }

  int64_t total_memory_bytes() const override { return total_memory_bytes_; }

 private:
  const Index index_;
  const int64_t total_memory_bytes_;
  // One for all: the link does one copy at a time, and goes over to another stream's more slowly.
  // No queue's work is on it.
  const cudaStream_t copies_;
};

// LibTorch's allocator cuts what is less than 10 MiB from segments of 20 MiB, of which it wastes up
// to a third; the memory formula knows nothing of that. Segments that grow page by page waste
// almost nothing, where the GPU can map pages. The user's own setting is not changed. True: they
// are used now.
bool UseExpandableSegments(int index) {
  for (const char* const name : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
    if (std::getenv(name) != nullptr) return false;
  }
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuDeviceGetAttribute", &function, CUDART_VERSION, cudaEnableDefault, &found);
  int can_map = 0;
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess ||
      reinterpret_cast<decltype(&cuDeviceGetAttribute)>(function)(
          &can_map, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, index) !=
          CUDA_SUCCESS ||
      can_map == 0) {
    C10_CUDA_CLEAR_ERROR();
    return false;
  }
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
  return true;
}

// Throws as LibTorch does if there is no memory to be had.
void TakeSomeMemory() {
  using c10::cuda::CUDACachingAllocator::raw_alloc;
  using c10::cuda::CUDACachingAllocator::raw_delete;
  raw_delete(raw_alloc(1));
}

// A GPU whose memory cannot be used shows at the start, and not as one refused push after another.
void TryMemory(bool is_expandable) {
  try {
    TakeSomeMemory();
  } catch (const c10::Error&) {
    if (!is_expandable) throw;
    // There are drivers, such as WSL2's, that say they can map pages, and cannot.
    C10_CUDA_CLEAR_ERROR();
    c10::CachingAllocator::setAllocatorSettings("expandable_segments:False");
    TakeSomeMemory();
  }
}

// What libtorch_cuda.so, which we do without, does when it is loaded: says which GPUs have
// contexts. LibTorch asks at the end of each guard, and throws there, which ends the process, if
// nobody has said anything. After "none" it calls nothing of CUDA there, which could fail: the
// thread keeps its device until its next guard.
void UseWithoutOtherHalf() {
  c10::cuda::_internal::setHasPrimaryContext([](Index) { return false; });
}

// True: the binary has nothing that the GPU could run, such as PTX that is newer than the driver.
bool IsMissingCode(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
         error == cudaErrorUnsupportedPtxVersion || error == cudaErrorInvalidPtx ||
         error == cudaErrorJitCompilerNotFound || error == cudaErrorJitCompilationDisabled;
}

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

// CUDA calls a driver that is missing one that is too old.
std::string Why(cudaError_t error) {
  int driver = 0;
  if (error != cudaErrorInsufficientDriver || cudaDriverGetVersion(&driver) != cudaSuccess) {
    return cudaGetErrorString(error);
  }
  if (driver == 0) return "there is no NVIDIA driver";
  return absl::StrCat("the driver is for CUDA ", VersionText(driver),
                      ", and the server needs one for ", VersionText(CUDART_VERSION));
}

}  // namespace

absl::StatusOr<GpuList> ListCudaDevices() {
  int count = 0;
  cudaError_t error = c10::cuda::GetDeviceCount(&count);
  GpuList list = {.oldest_capability = OldestCapability()};
  for (int i = 0; error == cudaSuccess && i < count; ++i) {
    cudaDeviceProp properties;
    error = cudaGetDeviceProperties(&properties, i);
    if (error == cudaSuccess) {
      list.gpus.push_back({properties.name, 10 * properties.major + properties.minor});
    }
  }
  if (error == cudaSuccess && count > 0) return list;
  C10_CUDA_CLEAR_ERROR();
  return absl::FailedPreconditionError(
      absl::StrCat("no GPU can be used: ", error == cudaSuccess ? "none found" : Why(error)));
}

absl::StatusOr<std::shared_ptr<Accelerator>> MakeCudaAccelerator(int index) {
  EMA_ASSIGN_OR_RETURN(const GpuList list, ListCudaDevices());
  EMA_RETURN_IF_ERROR(CheckGpu(list, index));
  UseWithoutOtherHalf();
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  cudaError_t loaded = cudaSuccess;
  cudaStream_t copies = nullptr;
  EMA_RETURN_IF_ERROR(Try(static_cast<Index>(index), [&] {
    const bool is_expandable = UseExpandableSegments(index);
    c10::cuda::CUDACachingAllocator::init(static_cast<int>(list.gpus.size()));
    loaded = LoadKernels();
    if (IsMissingCode(loaded)) {
      C10_CUDA_CLEAR_ERROR();
      return;
    }
    C10_CUDA_CHECK(loaded);
    // What an earlier one left in the cache is free, too.
    c10::cuda::CUDACachingAllocator::emptyCache();
    C10_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    TryMemory(is_expandable);
    // The priority means nothing to copies, but that it is none of the queues' streams.
    copies = c10::cuda::getStreamFromPool(/*isHighPriority=*/true, static_cast<Index>(index));
  }));
  if (IsMissingCode(loaded)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the driver has no code for GPU ", index, ", ", list.gpus[static_cast<size_t>(index)].model,
        ": ", cudaGetErrorString(loaded)));
  }
  return std::make_shared<CudaAccelerator>(static_cast<Index>(index),
                                           static_cast<int64_t>(free_bytes), copies);
}

std::string CudaVersion() { return VersionText(CUDART_VERSION); }

}  // namespace ema
