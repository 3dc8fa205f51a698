// SPDX-License-Identifier: Apache-2.0
#include "server/base/shared_ring.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ema {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// Some 50 us: longer than the peer needs for a slot, if it runs.
constexpr int kSpins = 2000;

absl::Status SystemError(const char* what) {
  return absl::InternalError(absl::StrCat(what, ": ", std::strerror(errno)));
}

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Not the private forms: the waiter is in another process.
void FutexWait(std::atomic<uint32_t>& word, uint32_t seen, absl::Duration max_wait) {
  const timespec timeout = absl::ToTimespec(max_wait);
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}
void FutexWake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(int64_t size_bytes) {
  const int fd = memfd_create("ema-lane", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return SystemError("memfd_create");
  if (ftruncate(fd, size_bytes) != 0 || fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    absl::Status status = SystemError("a memfd's size");
    close(fd);
    return status;
  }
  return Map(fd, size_bytes);
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Map(int fd, int64_t size_bytes) {
  struct stat about {};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(fd, &about) != 0 ||
      about.st_size != size_bytes) {
    close(fd);
    return absl::InvalidArgumentError(absl::StrCat("shared memory: expected a memfd of ",
                                                   size_bytes, " bytes with a sealed size"));
  }
  void* const data =
      mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (data == MAP_FAILED) {
    absl::Status status = SystemError("mmap");
    close(fd);
    return status;
  }
  return std::unique_ptr<SharedMemory>(
      new SharedMemory(fd, static_cast<std::byte*>(data), size_bytes));
}

SharedMemory::~SharedMemory() {
  munmap(data_, size_bytes_);
  close(fd_);
}

// Each counter on a cache line of its own. A side that is about to sleep says so and looks again;
// the other one looks for sleepers after it has moved its counter: all four sequentially
// consistent, so that one of the two sees the other.
struct SharedRing::Control {
  alignas(64) std::atomic<uint32_t> published;
  alignas(64) std::atomic<uint32_t> released;
  alignas(64) std::atomic<uint32_t> reader_sleeps;
  alignas(64) std::atomic<uint32_t> writer_sleeps;
  // Atomic, so that what is checked is what is used.
  struct SharedLabel {
    std::atomic<int32_t> kind;
    std::atomic<int32_t> length_bytes;
    std::atomic<int64_t> offset;
    std::atomic<uint32_t> crc32c;
  };
  alignas(64) SharedLabel labels[kSlotCount];

  static_assert(std::atomic<uint32_t>::is_always_lock_free);

  // Waits until `counter` is not `seen`.
  static bool Await(std::atomic<uint32_t>& counter, uint32_t seen, std::atomic<uint32_t>& sleeps,
                    absl::Duration max_wait, bool& is_idle) {
    if (max_wait <= absl::ZeroDuration()) return counter.load(std::memory_order_acquire) != seen;
    for (int i = 0; i < (is_idle ? 1 : kSpins); ++i) {
      if (counter.load(std::memory_order_acquire) != seen) {
        is_idle = false;
        return true;
      }
      Pause();
    }
    sleeps.store(1);
    if (counter.load() == seen) FutexWait(counter, seen, max_wait);
    sleeps.store(0);
    is_idle = counter.load(std::memory_order_acquire) == seen;
    return !is_idle;
  }
  static void Advance(std::atomic<uint32_t>& counter, uint32_t to, std::atomic<uint32_t>& sleeps) {
    counter.store(to);
    if (sleeps.load() != 0) FutexWake(counter);
  }
};

SharedRing::SharedRing(std::byte* memory)
    : control_(*reinterpret_cast<Control*>(memory)), slots_(memory + 4096) {
  static_assert(sizeof(Control) <= 4096);
}

std::span<std::byte> SharedRing::WaitForFree(absl::Duration max_wait) {
  const uint32_t full_at = position_ - kSlotCount;
  if (broken_ ||
      !Control::Await(control_.released, full_at, control_.writer_sleeps, max_wait, is_idle_)) {
    return {};
  }
  const uint32_t in_use = position_ - control_.released.load(std::memory_order_acquire);
  if (in_use >= kSlotCount) {
    broken_ = true;
    return {};
  }
  return {slots_ + position_ % kSlotCount * kSlotBytes, kSlotBytes};
}

void SharedRing::Publish(const Label& label) {
  Control::SharedLabel& shared = control_.labels[position_ % kSlotCount];
  shared.kind.store(label.kind, std::memory_order_relaxed);
  shared.length_bytes.store(label.length_bytes, std::memory_order_relaxed);
  shared.offset.store(label.offset, std::memory_order_relaxed);
  shared.crc32c.store(label.crc32c, std::memory_order_relaxed);
  Control::Advance(control_.published, ++position_, control_.reader_sleeps);
}

std::optional<SharedRing::Filled> SharedRing::WaitForFilled(absl::Duration max_wait) {
  if (broken_ ||
      !Control::Await(control_.published, position_, control_.reader_sleeps, max_wait, is_idle_)) {
    return std::nullopt;
  }
  const uint32_t filled = control_.published.load(std::memory_order_acquire) - position_;
  const uint32_t slot = position_ % kSlotCount;
  const Control::SharedLabel& shared = control_.labels[slot];
  const Label label{.kind = shared.kind.load(std::memory_order_relaxed),
                    .length_bytes = shared.length_bytes.load(std::memory_order_relaxed),
                    .offset = shared.offset.load(std::memory_order_relaxed),
                    .crc32c = shared.crc32c.load(std::memory_order_relaxed)};
  if (filled > kSlotCount || label.length_bytes < 0 || label.length_bytes > kSlotBytes) {
    broken_ = true;
    return std::nullopt;
  }
  return Filled{label, {slots_ + slot * kSlotBytes, static_cast<size_t>(label.length_bytes)}};
}

void SharedRing::Release() {
  Control::Advance(control_.released, ++position_, control_.writer_sleeps);
}

}  // namespace ema
