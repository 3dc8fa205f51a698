// SPDX-License-Identifier: Apache-2.0
//
// A ring of slots in memory that two processes share (shared_memory.h).
#ifndef EMA_SERVER_WIRE_SHARED_RING_H_
#define EMA_SERVER_WIRE_SHARED_RING_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "absl/time/time.h"

namespace ema {

// One end of a ring with one writer and one reader, each a thread at a time, in two processes or
// one. A waiting end spins for some microseconds, then sleeps; after a sleep that timed out it does
// not spin again. The scheduler may leave both ends on one processor while others are idle: a woken
// thread starts where its waker runs, and if the two share a cache, Linux may not look further; for
// tens of ms at a time a push was half as fast. An end with `may_move` then moves itself. If a peer
// writes invalid data into the memory, is_broken() becomes true, or only the bytes that it sends
// are wrong: no checked value is read from the memory a second time.
class SharedRing {
 public:
  // Four slots of 256 KiB stay in the caches: 17 % faster than eight of 1 MiB.
  static constexpr int64_t kSlotBytes = int64_t{256} << 10;
  static constexpr uint32_t kSlotCount = 4;
  // Bytes of memory for one ring, initially zero.
  static constexpr int64_t kBytes = 4096 + kSlotCount * kSlotBytes;

  // The writer's description of a slot; only the users interpret it.
  struct Label {
    int32_t kind = 0;
    int32_t length_bytes = 0;
    int64_t offset = 0;
    uint32_t crc32c = 0;
    int64_t window_offset = 0;
  };
  struct Filled {
    Label label;
    std::span<const std::byte> bytes;  // `length_bytes` of them.
  };

  // `memory`: kBytes at a multiple of 4096, which outlive this object. `may_move`: this end's
  // threads may be moved to other processors that they may run on.
  SharedRing(std::byte* memory, bool may_move);

  // --- The writer. ---

  // Waits for a free slot. Empty: there is none after `max_wait`, or the ring is broken.
  std::span<std::byte> WaitForFree(absl::Duration max_wait);
  // Passes that slot to the reader. REQUIRES: label.length_bytes <= kSlotBytes.
  void Publish(const Label& label);
  // The number of published slots that the reader has not released.
  uint32_t unreleased_count() const;

  // --- The reader. ---

  // Waits for a published slot, which stays valid until Release(). nullopt: there is none after
  // `max_wait`, or the ring is broken.
  std::optional<Filled> WaitForFilled(absl::Duration max_wait);
  void Release();

  // True: the peer has broken the protocol.
  bool is_broken() const { return is_broken_; }

 private:
  struct Control;
  struct End;

  // Waits until `peer`'s counter differs from `seen`. False: it still equals `seen`.
  bool Await(End& own, const End& peer, absl::Duration max_wait, uint32_t seen);
  // Increments this end's counter, and wakes the peer if it sleeps.
  void Advance(End& own, const End& peer);

  Control& control_;
  std::byte* const slots_;
  const bool may_move_;
  uint32_t position_ = 0;  // Slots published, or released, by this end.
  bool is_broken_ = false;
  bool is_idle_ = false;  // The last wait timed out.
};

}  // namespace ema

#endif  // EMA_SERVER_WIRE_SHARED_RING_H_
