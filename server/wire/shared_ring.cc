// SPDX-License-Identifier: Apache-2.0
#include "server/wire/shared_ring.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace ema {
namespace {

// Some 250 us: longer than the peer needs for a slot, if it runs, and than a virtual machine's idle
// processor needs to wake (50 to 250 us), which is what sleeping costs.
constexpr int kSpins = 10'000;

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
    std::atomic<int64_t> window_offset;
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
  if (is_broken_ || !Await(control_.writer, control_.reader, max_wait, full_at)) return {};
  if (unreleased_count() >= kSlotCount) {
    is_broken_ = true;
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
  shared.window_offset.store(label.window_offset, std::memory_order_relaxed);
  Advance(control_.writer, control_.reader);
}

uint32_t SharedRing::unreleased_count() const {
  return position_ - control_.reader.count.load(std::memory_order_acquire);
}

std::optional<SharedRing::Filled> SharedRing::WaitForFilled(absl::Duration max_wait) {
  if (is_broken_ || !Await(control_.reader, control_.writer, max_wait, position_)) {
    return std::nullopt;
  }
  const uint32_t filled = control_.writer.count.load(std::memory_order_acquire) - position_;
  const uint32_t slot = position_ % kSlotCount;
  const Control::SharedLabel& shared = control_.labels[slot];
  const Label label{.kind = shared.kind.load(std::memory_order_relaxed),
                    .length_bytes = shared.length_bytes.load(std::memory_order_relaxed),
                    .offset = shared.offset.load(std::memory_order_relaxed),
                    .crc32c = shared.crc32c.load(std::memory_order_relaxed),
                    .window_offset = shared.window_offset.load(std::memory_order_relaxed)};
  if (filled > kSlotCount || label.length_bytes < 0 || label.length_bytes > kSlotBytes) {
    is_broken_ = true;
    return std::nullopt;
  }
  return Filled{label, {slots_ + slot * kSlotBytes, static_cast<size_t>(label.length_bytes)}};
}

void SharedRing::Release() { Advance(control_.reader, control_.writer); }

}  // namespace ema
