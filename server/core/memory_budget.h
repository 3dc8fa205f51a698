// SPDX-License-Identifier: Apache-2.0
//
// Memory that is reserved before it is used, so that the server rejects work instead of running out
// of memory later.
#ifndef EMA_SERVER_CORE_MEMORY_BUDGET_H_
#define EMA_SERVER_CORE_MEMORY_BUDGET_H_

#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace ema {

// Thread-safe. Outlives its reservations.
class MemoryBudget {
 public:
  // Returns its bytes to the budget when destroyed.
  class Reservation {
   public:
    ~Reservation();
    int64_t bytes() const { return bytes_; }

   private:
    friend class MemoryBudget;
    Reservation(MemoryBudget* budget, int64_t bytes) : budget_(budget), bytes_(bytes) {}
    MemoryBudget* const budget_;
    const int64_t bytes_;
  };

  // `whose`: the owner of the memory in messages, such as "the host's"; a literal.
  explicit MemoryBudget(int64_t total_bytes, std::string_view whose = "the server's")
      : total_bytes_(total_bytes), whose_(whose) {}

  // RESOURCE_EXHAUSTED, MEMORY_BUDGET: too little is left; nothing is reserved. The message says
  // how much `what` needs, how much is left, and the total.
  absl::StatusOr<std::unique_ptr<Reservation>> Reserve(std::string_view what, int64_t bytes);

  int64_t total_bytes() const { return total_bytes_; }
  int64_t reserved_bytes() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  const int64_t total_bytes_;
  const std::string_view whose_;
  mutable absl::Mutex mu_;
  int64_t reserved_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_MEMORY_BUDGET_H_
