// SPDX-License-Identifier: Apache-2.0
//
// The few functions of CUDA's driver that a push needs, loaded at the first use: the client is
// neither linked to CUDA nor built with its headers.
#ifndef EMA_CLIENT_CPP_GPU_CUDA_DRIVER_H_
#define EMA_CLIENT_CPP_GPU_CUDA_DRIVER_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

// The types to which cuda.h's CUcontext, CUstream and CUevent point.
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;

namespace ema::client_internal {

// Functions of libcuda.so.1, with cuda.h's names and arguments; a CUresult is an int, a CUdeviceptr
// an unsigned long long. A test compares them with cuda.h if the toolkit is installed.
struct CudaDriver {
  static constexpr int kSuccess = 0;
  static constexpr int kOutOfMemory = 2;
  static constexpr int kNotReady = 600;
  static constexpr unsigned kStreamNonBlocking = 1;
  static constexpr unsigned kEventDisableTiming = 2;
  static constexpr unsigned kHostAllocPortable = 1;
  static constexpr unsigned kHostRegisterPortable = 1;
  static constexpr int kCaptureModeRelaxed = 2;

  // The instance of this process. FAILED_PRECONDITION: the library is not installed, or lacks a
  // function that we need. Thread-safe, as the functions are.
  static const absl::StatusOr<CudaDriver>& Get();

  // A text such as "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)".
  std::string Describe(int result) const;
  // True: the process's context is lost; every later call that needs the GPU fails, too.
  static bool IsSticky(int result);

  // These have the library's names.
  // NOLINTBEGIN(readability-identifier-naming)
  int (*Init)(unsigned flags);
  int (*DeviceGet)(int* device, int ordinal);
  int (*DevicePrimaryCtxRetain)(CUctx_st** context, int device);
  int (*DevicePrimaryCtxRelease)(int device);
  int (*CtxPushCurrent)(CUctx_st* context);
  int (*CtxPopCurrent)(CUctx_st** context);
  int (*MemHostAlloc)(void** memory, size_t size_bytes, unsigned flags);
  int (*MemFreeHost)(void* memory);
  int (*MemHostRegister)(void* memory, size_t size_bytes, unsigned flags);
  int (*MemHostUnregister)(void* memory);
  int (*MemcpyDtoHAsync)(void* to, unsigned long long from, size_t size_bytes, CUstream_st* stream);
  int (*StreamCreate)(CUstream_st** stream, unsigned flags);
  int (*StreamDestroy)(CUstream_st* stream);
  int (*StreamWaitEvent)(CUstream_st* stream, CUevent_st* event, unsigned flags);
  int (*StreamQuery)(CUstream_st* stream);
  int (*EventCreate)(CUevent_st** event, unsigned flags);
  int (*EventRecord)(CUevent_st* event, CUstream_st* stream);
  int (*EventQuery)(CUevent_st* event);
  int (*EventDestroy)(CUevent_st* event);
  int (*ThreadExchangeStreamCaptureMode)(int* mode);
  int (*GetErrorName)(int result, const char** name);
  int (*GetErrorString)(int result, const char** text);
  // NOLINTEND(readability-identifier-naming)

 private:
  static absl::StatusOr<CudaDriver> Load();
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GPU_CUDA_DRIVER_H_
