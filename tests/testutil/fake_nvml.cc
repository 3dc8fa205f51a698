// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/fake_nvml.h"

#include <atomic>

namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;
constexpr int kNoPermission = 4;

std::atomic<bool> refuses = false;

}  // namespace

// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

void ema_fake_nvml_refuse(bool value) { refuses = value; }

// What LibTorch asks for; it does without if one is missing.
int nvmlInit_v2() { return kSuccess; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* /*bus_id*/, void** device) {
  *device = nullptr;
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemoteDeviceType() { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return kNotSupported; }
int nvmlDeviceGetGpuFabricInfoV() { return kNotSupported; }
int nvmlDeviceGetComputeRunningProcesses(void* /*device*/, unsigned* count, void* /*processes*/) {
  *count = 0;
  return refuses ? kNoPermission : kSuccess;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
