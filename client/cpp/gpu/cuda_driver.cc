// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/gpu/cuda_driver.h"

#include <dlfcn.h>

#include <type_traits>

#include "absl/strings/str_cat.h"

namespace ema::client_internal {

const absl::StatusOr<CudaDriver>& CudaDriver::Get() {
  static const auto* const driver = new absl::StatusOr<CudaDriver>(Load());
  return *driver;
}

absl::StatusOr<CudaDriver> CudaDriver::Load() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("no CUDA driver: ", dlerror()));
  }
  const char* missing = nullptr;
  const auto find = [&](const char* name, auto& function) {
    void* const symbol = dlsym(library, name);
    if (symbol == nullptr) missing = name;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  CudaDriver driver;
  find("cuInit", driver.Init);
  find("cuDeviceGet", driver.DeviceGet);
  find("cuDevicePrimaryCtxRetain", driver.DevicePrimaryCtxRetain);
  find("cuDevicePrimaryCtxRelease_v2", driver.DevicePrimaryCtxRelease);
  find("cuCtxPushCurrent_v2", driver.CtxPushCurrent);
  find("cuCtxPopCurrent_v2", driver.CtxPopCurrent);
  find("cuMemHostAlloc", driver.MemHostAlloc);
  find("cuMemFreeHost", driver.MemFreeHost);
  find("cuMemHostRegister_v2", driver.MemHostRegister);
  find("cuMemHostUnregister", driver.MemHostUnregister);
  find("cuMemcpyDtoHAsync_v2", driver.MemcpyDtoHAsync);
  find("cuStreamCreate", driver.StreamCreate);
  find("cuStreamDestroy_v2", driver.StreamDestroy);
  find("cuStreamWaitEvent", driver.StreamWaitEvent);
  find("cuStreamQuery", driver.StreamQuery);
  find("cuEventCreate", driver.EventCreate);
  find("cuEventRecord", driver.EventRecord);
  find("cuEventQuery", driver.EventQuery);
  find("cuEventDestroy_v2", driver.EventDestroy);
  find("cuThreadExchangeStreamCaptureMode", driver.ThreadExchangeStreamCaptureMode);
  find("cuGetErrorName", driver.GetErrorName);
  find("cuGetErrorString", driver.GetErrorString);
  if (missing != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("the CUDA driver is too old: it has no ", missing));
  }
  if (const int result = driver.Init(0); result != kSuccess) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot initialize the CUDA driver: ", driver.Describe(result)));
  }
  return driver;
}

std::string CudaDriver::Describe(int result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (GetErrorName(result, &name) != kSuccess || name == nullptr) {
    return absl::StrCat("CUDA error ", result);
  }
  if (GetErrorString(result, &text) != kSuccess || text == nullptr) return name;
  return absl::StrCat(name, " (", text, ")");
}

bool CudaDriver::IsSticky(int result) {
  switch (result) {
    case 4:    // DEINITIALIZED
    case 214:  // ECC_UNCORRECTABLE
    case 220:  // NVLINK_UNCORRECTABLE
    case 226:  // CONTAINED
    case 700:  // ILLEGAL_ADDRESS
    case 702:  // LAUNCH_TIMEOUT
    case 709:  // CONTEXT_IS_DESTROYED
    case 710:  // ASSERT
    case 714:  // HARDWARE_STACK_ERROR
    case 715:  // ILLEGAL_INSTRUCTION
    case 716:  // MISALIGNED_ADDRESS
    case 717:  // INVALID_ADDRESS_SPACE
    case 718:  // INVALID_PC
    case 719:  // LAUNCH_FAILED
    case 721:  // TENSOR_MEMORY_LEAK
    case 810:  // MPS_CLIENT_TERMINATED
    case 911:  // EXTERNAL_DEVICE
      return true;
    default:
      return false;
  }
}

}  // namespace ema::client_internal
