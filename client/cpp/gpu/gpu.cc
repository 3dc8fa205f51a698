// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/gpu/gpu.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

// Between two questions to the driver: at first about what a chunk's copy takes, then more, as the
// trainer's stream has much to do before. The driver's own wait could not be ended.
constexpr absl::Duration kFirstPause = absl::Microseconds(10);
constexpr absl::Duration kLongestPause = absl::Milliseconds(1);

absl::Status DeviceError(int index, const std::string& what) {
  return MakeError(absl::StatusCode::kInternal, ErrorReason::kDevice,
                   absl::StrCat("GPU ", index, ": ", what));
}

}  // namespace

// Makes the GPU's context the thread's current one. A capture by another thread, in CUDA's default
// mode, forbids some calls to all threads but those that say they do not mind.
class Gpu::Current {
 public:
  // Where it fails, as after a cudaDeviceReset(), so does what follows it, which is checked.
  explicit Current(const Gpu& gpu)
      : driver_(*gpu.driver_), is_pushed_(driver_.CtxPushCurrent(gpu.context_) == 0) {
    driver_.ThreadExchangeStreamCaptureMode(&capture_mode_);
  }
  ~Current() {
    driver_.ThreadExchangeStreamCaptureMode(&capture_mode_);
    CUctx_st* context = nullptr;
    if (is_pushed_) driver_.CtxPopCurrent(&context);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const CudaDriver& driver_;
  const bool is_pushed_;
  int capture_mode_ = CudaDriver::kCaptureModeRelaxed;
};

absl::StatusOr<std::unique_ptr<Gpu>> Gpu::Open(int index) {
  const absl::StatusOr<CudaDriver>& driver = CudaDriver::Get();
  if (!driver.ok()) return DeviceError(index, std::string(driver.status().message()));
  std::unique_ptr<Gpu> gpu(new Gpu(&*driver, index));
  EMA_RETURN_IF_ERROR(gpu->Create());
  return gpu;
}

absl::Status Gpu::Create() {
  EMA_RETURN_IF_ERROR(Check(driver_->DeviceGet(&device_, index_), "not found"));
  EMA_RETURN_IF_ERROR(
      Check(driver_->DevicePrimaryCtxRetain(&context_, device_), "cannot retain its context"));
  const Current current(*this);
  // PyTorch's default stream does not wait for a non-blocking stream.
  EMA_RETURN_IF_ERROR(Check(driver_->StreamCreate(&stream_, CudaDriver::kStreamNonBlocking),
                            "cannot create a stream"));
  absl::MutexLock lock(&mu_);
  return NewEvent(CudaDriver::kEventDisableTiming, &order_event_);
}

Gpu::~Gpu() {
  if (context_ == nullptr) return;
  if (stream_ != nullptr && !AwaitIdle(After(SteadyNow(), kIdleGrace))) return;
  {
    const Current current(*this);
    absl::MutexLock lock(&mu_);
    if (order_event_ != nullptr) driver_->EventDestroy(order_event_);
    for (CUevent_st* mark : marks_) driver_->EventDestroy(mark);
    if (stream_ != nullptr) driver_->StreamDestroy(stream_);
  }
  driver_->DevicePrimaryCtxRelease(device_);
}

absl::Status Gpu::Check(int result, std::string_view what) {
  absl::MutexLock lock(&error_mu_);
  if (!error_.ok() || result == CudaDriver::kSuccess) return error_;
  const std::string problem = absl::StrCat(std::string(what), ": ", driver_->Describe(result));
  if (result == CudaDriver::kOutOfMemory) {
    return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kMemoryBudget,
                     absl::StrCat("GPU ", index_, ": ", problem));
  }
  absl::Status error = DeviceError(index_, problem);
  if (CudaDriver::IsSticky(result)) error_ = error;
  return error;
}

int Gpu::Poll(absl::FunctionRef<int()> ask, SteadyTime deadline, Interrupt& interrupt) {
  absl::Duration pause = kFirstPause;
  while (true) {
    const int result = ask();
    if (result != CudaDriver::kNotReady) return result;
    const absl::Duration left = Until(deadline);
    if (left <= absl::ZeroDuration() || !interrupt.Sleep(std::min(pause, left))) return result;
    pause = std::min(2 * pause, kLongestPause);
  }
}

absl::Status Gpu::NewEvent(unsigned flags, CUevent_st** event) {
  return Check(driver_->EventCreate(event, flags), "cannot create an event");
}

absl::StatusOr<std::byte*> Gpu::AllocatePinned(int64_t size_bytes) {
  const Current current(*this);
  void* memory = nullptr;
  EMA_RETURN_IF_ERROR(
      Check(driver_->MemHostAlloc(&memory, static_cast<size_t>(size_bytes),
                                  CudaDriver::kHostAllocPortable),
            absl::StrCat("cannot allocate ", size_bytes, " bytes of pinned memory")));
  return static_cast<std::byte*>(memory);
}

void Gpu::FreePinned(std::byte* memory) {
  const Current current(*this);
  // An error cannot be reported to any caller.
  driver_->MemFreeHost(memory);
}

absl::Status Gpu::RegisterPinned(std::byte* memory, int64_t size_bytes) {
  const Current current(*this);
  return Check(driver_->MemHostRegister(memory, static_cast<size_t>(size_bytes),
                                        CudaDriver::kHostRegisterPortable),
               absl::StrCat("cannot pin ", size_bytes, " bytes of shared memory"));
}

void Gpu::UnregisterPinned(std::byte* memory) {
  const Current current(*this);
  // An error cannot be reported to any caller.
  driver_->MemHostUnregister(memory);
}

absl::Status Gpu::WaitFor(void* stream) {
  const Current current(*this);
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(Check(driver_->EventRecord(order_event_, static_cast<CUstream_st*>(stream)),
                            "cannot wait for the trainer's stream"));
  return Check(driver_->StreamWaitEvent(stream_, order_event_, 0),
               "cannot wait for the trainer's stream");
}

absl::Status Gpu::MakeWait(void* stream) {
  const Current current(*this);
  absl::MutexLock lock(&mu_);
  EMA_RETURN_IF_ERROR(
      Check(driver_->EventRecord(order_event_, stream_), "cannot make the trainer's stream wait"));
  return Check(driver_->StreamWaitEvent(static_cast<CUstream_st*>(stream), order_event_, 0),
               "cannot make the trainer's stream wait");
}

absl::Status Gpu::CopyToHost(absl::Span<const Copy> copies, int slot) {
  const Current current(*this);
  absl::MutexLock lock(&mu_);
  for (const Copy& copy : copies) {
    EMA_RETURN_IF_ERROR(
        Check(driver_->MemcpyDtoHAsync(copy.to, reinterpret_cast<uintptr_t>(copy.from.data()),
                                       copy.from.size(), stream_),
              "cannot copy weights"));
  }
  while (static_cast<int>(marks_.size()) <= slot) {
    CUevent_st* mark = nullptr;
    EMA_RETURN_IF_ERROR(NewEvent(CudaDriver::kEventDisableTiming, &mark));
    marks_.push_back(mark);
  }
  return Check(driver_->EventRecord(marks_[slot], stream_), "cannot record the end of a copy");
}

absl::Status Gpu::Wait(int slot, SteadyTime deadline, Interrupt& interrupt) {
  CUevent_st* mark = nullptr;
  {
    absl::MutexLock lock(&mu_);
    mark = marks_[slot];
  }
  const Current current(*this);
  const int result = Poll([&] { return driver_->EventQuery(mark); }, deadline, interrupt);
  if (result != CudaDriver::kNotReady) return Check(result, "a copy of weights has failed");
  if (interrupt.fired()) return absl::CancelledError("interrupted");
  return MakeError(absl::StatusCode::kDeadlineExceeded, ErrorReason::kDevice,
                   absl::StrCat("GPU ", index_, ": a copy of weights had not ended in time"));
}

bool Gpu::AwaitIdle(SteadyTime deadline) {
  Interrupt never;
  const Current current(*this);
  const auto ask = [this] { return driver_->StreamQuery(stream_); };
  return Poll(ask, deadline, never) != CudaDriver::kNotReady;
}

bool Gpu::AwaitIdle(SteadyTime deadline, Interrupt& interrupt) {
  const Current current(*this);
  const auto ask = [this] { return driver_->StreamQuery(stream_); };
  return Poll(ask, deadline, interrupt) != CudaDriver::kNotReady ||
         AwaitIdle(After(SteadyNow(), kIdleGrace));
}

}  // namespace ema::client_internal
