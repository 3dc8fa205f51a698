// SPDX-License-Identifier: Apache-2.0
#include "server/wire/shared_ring.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
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
// Some 250 us: longer than the peer needs for a slot, if it runs, and than a virtual machine's idle
// processor needs to wake (50 to 250 us), which is what sleeping costs.
constexpr int kSpins = 10'000;

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
void FutexWait(const std::atomic<uint32_t>& word, uint32_t seen, absl::Duration max_wait) {
  const timespec timeout = absl::ToTimespec(max_wait);
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}
void FutexWake(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Of this thread, from 1 on; 0: unknown.
int32_t Processor() { return sched_getcpu() + 1; }

// Moves this thread to another of the processors that it may run on, if there is one.
void LeaveProcessor(int32_t processor) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(processor - 1, &others);
  if (sched_setaffinity(0, sizeof(others), &others) == 0) {
    sched_setaffinity(0, sizeof(allowed), &allowed);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(int64_t size_bytes) {
  // Where files may not be so long, ftruncate() ends a process that does not ignore SIGXFSZ.
  rlimit files{};
  if (getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur < static_cast<rlim_t>(size_bytes)) {
    return absl::InternalError(absl::StrCat("shared memory: the process may write files of ",
                                            files.rlim_cur, " bytes, expected at least ",
                                            size_bytes));
  }
  const int fd = memfd_create("ema-lane", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return SystemError("memfd_create");
  if (ftruncate(fd, size_bytes) != 0 || fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    absl::Status status = SystemError("setting the size of a memfd");
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

// What one end writes and the other one reads; each counter on a cache line of its own. An end that
// is about to sleep says so and looks again; the other one looks for sleepers after it has moved
// its counter: all four sequentially consistent, so that one of the two sees the other.
struct SharedRing::End {
  alignas(64) std::atomic<uint32_t> count;  // Of slots published, or released.
  std::atomic<int32_t> processor;           // Where it last did so; 0: unknown, 1: the first.
  alignas(64) std::atomic<uint32_t> sleeps;

  static_assert(std::atomic<uint32_t>::is_always_lock_free);
};

struct SharedRing::Control {
  // Atomic, so that what is checked is what is used.
  struct SharedLabel {
    std::atomic<int32_t> kind;
    std::atomic<int32_t> length_bytes;
    std::atomic<int64_t> offset;
    std::atomic<uint32_t> crc32c;
  };

  End writer;
  End reader;
  alignas(64) SharedLabel labels[kSlotCount];
};

SharedRing::SharedRing(std::byte* memory, bool may_move)
    : control_(*reinterpret_cast<Control*>(memory)), slots_(memory + 4096), may_move_(may_move) {
  static_assert(sizeof(Control) <= 4096);
}

bool SharedRing::Await(End& own, const End& peer, absl::Duration max_wait, uint32_t seen) {
  const auto has_moved = [&peer, seen] {
    return peer.count.load(std::memory_order_acquire) != seen;
  };
  if (has_moved()) {
    is_idle_ = false;
    return true;
  }
  if (max_wait <= absl::ZeroDuration()) return false;
  // A peer that waits for this processor does not come forward while this thread spins on it.
  const int32_t processor = Processor();
  const bool is_in_the_way = peer.processor.load(std::memory_order_relaxed) == processor;
  if (is_in_the_way && may_move_ && !is_idle_) LeaveProcessor(processor);
  for (int i = 0; i < (is_idle_ || is_in_the_way ? 1 : kSpins); ++i) {
    if (has_moved()) return true;
    Pause();
  }
  own.sleeps.store(1);
  if (peer.count.load() == seen) FutexWait(peer.count, seen, max_wait);
  own.sleeps.store(0);
  is_idle_ = !has_moved();
  return !is_idle_;
}

void SharedRing::Advance(End& own, const End& peer) {
  own.processor.store(Processor(), std::memory_order_relaxed);
  own.count.store(++position_);
  if (peer.sleeps.load() != 0) FutexWake(own.count);
}

std::span<std::byte> SharedRing::WaitForFree(absl::Duration max_wait) {
  const uint32_t full_at = position_ - kSlotCount;
  if (broken_ || !Await(control_.writer, control_.reader, max_wait, full_at)) return {};
  const uint32_t in_use = position_ - control_.reader.count.load(std::memory_order_acquire);
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
  Advance(control_.writer, control_.reader);
}

std::optional<SharedRing::Filled> SharedRing::WaitForFilled(absl::Duration max_wait) {
  if (broken_ || !Await(control_.reader, control_.writer, max_wait, position_)) return std::nullopt;
  const uint32_t filled = control_.writer.count.load(std::memory_order_acquire) - position_;
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

void SharedRing::Release() { Advance(control_.reader, control_.writer); }

}  // namespace ema
