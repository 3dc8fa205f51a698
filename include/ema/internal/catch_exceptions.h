// SPDX-License-Identifier: Apache-2.0
//
// Converts exceptions of the standard library to errors.
#ifndef EMA_INTERNAL_CATCH_EXCEPTIONS_H_
#define EMA_INTERNAL_CATCH_EXCEPTIONS_H_

#include <exception>
#include <new>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"

namespace ema {

// Returns the result of `function`, an absl::Status or StatusOr. An exception becomes an error, so
// that it ends one call and not the server: RESOURCE_EXHAUSTED, MEMORY_BUDGET, if memory could not
// be allocated, else INTERNAL. Changes that the function has made by then remain.
template <typename Function>
auto CatchExceptions(const Function& function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kMemoryBudget,
                     "the server could not allocate the memory that this call needs",
                     absl::Seconds(1));
  } catch (const std::exception&) {  // Its text may name files or addresses.
    return absl::InternalError("the call failed with an unexpected exception");
  }
}

}  // namespace ema

#endif  // EMA_INTERNAL_CATCH_EXCEPTIONS_H_
