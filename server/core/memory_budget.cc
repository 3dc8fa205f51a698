// SPDX-License-Identifier: Apache-2.0
#include "server/core/memory_budget.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"

namespace ema {

MemoryBudget::Reservation::~Reservation() {
  absl::MutexLock lock(&budget_->mu_);
  budget_->reserved_bytes_ -= bytes_;
}

absl::StatusOr<std::unique_ptr<MemoryBudget::Reservation>> MemoryBudget::Reserve(
    std::string_view what, int64_t bytes) {
  absl::MutexLock lock(&mu_);
  const int64_t left = total_bytes_ - reserved_bytes_;
  if (bytes > left) {
    // A model may have been deleted by then.
    const absl::Duration retry_delay =
        bytes <= total_bytes_ ? absl::Seconds(10) : absl::ZeroDuration();
    return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kMemoryBudget,
                     absl::StrCat(std::string(what), " needs ", bytes, " bytes; ", left, " of ",
                                  std::string(whose_), " ", total_bytes_, " are free"),
                     retry_delay);
  }
  reserved_bytes_ += bytes;
  return std::unique_ptr<Reservation>(new Reservation(this, bytes));
}

int64_t MemoryBudget::reserved_bytes() const {
  absl::MutexLock lock(&mu_);
  return reserved_bytes_;
}

}  // namespace ema
