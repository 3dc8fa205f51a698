// SPDX-License-Identifier: Apache-2.0
//
// Two macros that return errors to the caller.
#ifndef EMA_INTERNAL_STATUS_MACROS_H_
#define EMA_INTERNAL_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define EMA_MACRO_CONCAT_INNER(a, b) a##b
#define EMA_MACRO_CONCAT(a, b) EMA_MACRO_CONCAT_INNER(a, b)

// Returns from the function if `expr`, an absl::Status, is not OK.
#define EMA_RETURN_IF_ERROR(expr)                             \
  do {                                                        \
    if (absl::Status ema_status = (expr); !ema_status.ok()) { \
      return ema_status;                                      \
    }                                                         \
  } while (false)

// Sets `lhs`, a declaration or a variable, to the value of `expr`, an absl::StatusOr, or returns
// its error from the function.
#define EMA_ASSIGN_OR_RETURN(lhs, expr) \
  EMA_ASSIGN_OR_RETURN_INNER(EMA_MACRO_CONCAT(ema_statusor_, __LINE__), lhs, expr)
#define EMA_ASSIGN_OR_RETURN_INNER(statusor, lhs, expr)    \
  auto statusor = (expr);                                  \
  if (!statusor.ok()) return std::move(statusor).status(); \
  lhs = *std::move(statusor)

#endif  // EMA_INTERNAL_STATUS_MACROS_H_
