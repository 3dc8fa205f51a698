// SPDX-License-Identifier: Apache-2.0
//
// What the parts of a run or a push to a group of servers have in common. Each part is a run or a
// push to one of the servers.
#ifndef EMA_CLIENT_CPP_PUSH_GROUP_PART_H_
#define EMA_CLIENT_CPP_PUSH_GROUP_PART_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/transport/interrupt.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// The newest known round of an incarnation of a model. Thread-safe.
class NewestRound {
 public:
  explicit NewestRound(int64_t incarnation) : incarnation_(incarnation) {}

  int64_t incarnation() const { return incarnation_; }
  int64_t get() const { return round_.load(std::memory_order_relaxed); }
  // Adopts `round`, unless a newer one is known.
  void Note(int64_t round) {
    int64_t known = round_.load(std::memory_order_relaxed);
    while (known < round &&
           !round_.compare_exchange_weak(known, round, std::memory_order_relaxed)) {
    }
  }

 private:
  const int64_t incarnation_;
  std::atomic<int64_t> round_ = 0;  // Relaxed: it publishes no other data.
};

// Limits how many parts of a push send at once: each needs a slot. The part with the lowest
// position is the next one. Thread-safe.
class SendSlots {
 public:
  explicit SendSlots(int64_t max_senders) : free_(max_senders) {}

  // Waits for a slot. False: `deadline` is over, or `interrupt` was fired.
  bool Acquire(int64_t position, SteadyTime deadline, Interrupt* interrupt)
      ABSL_LOCKS_EXCLUDED(mu_);
  void Release() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  absl::Mutex mu_;
  SteadyWait wait_;  // Woken when a slot is free, or a waiter has left.
  int64_t free_ ABSL_GUARDED_BY(mu_);
  std::set<int64_t> waiting_ ABSL_GUARDED_BY(mu_);  // Positions.
};

// The place of a push to one server in a push to a group. All pointers outlive the push.
struct GroupPart {
  SendSlots* slots = nullptr;
  int64_t position = 0;  // In the order in which the parts send.
  // The round of the step, shared by all parts. If a server rejects it with STALE_ROUND, the parts
  // adopt the newer round and send all bytes again.
  NewestRound* round = nullptr;
  std::function<void()> on_end;  // Called when the part has its result.
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_GROUP_PART_H_
