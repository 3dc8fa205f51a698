// SPDX-License-Identifier: Apache-2.0
//
// absl::Status as Python exceptions, and waits that Python's signals interrupt.
#ifndef EMA_CLIENT_PYTHON_SRC_PYTHON_ERROR_H_
#define EMA_CLIENT_PYTHON_SRC_PYTHON_ERROR_H_

#include <nanobind/nanobind.h>

#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/python/src/gil.h"

namespace ema::python {

// `status` as an object of the subclass of ema_client.EmaError for its code. Needs the GIL.
// REQUIRES: not OK.
nanobind::object ExceptionOf(const absl::Status& status);

// The status of an exception that Python code has raised. One that is no Exception, such as a
// KeyboardInterrupt, is set in this thread again, for CallWithoutGil(), and gives CANCELLED. Needs
// the GIL.
absl::Status StatusOf(nanobind::python_error& raised);

// Throws `status` as the subclass of ema_client.EmaError for its code. Needs the GIL. REQUIRES: not
// OK.
[[noreturn]] void ThrowStatus(const absl::Status& status);

inline void ThrowIfError(const absl::Status& status) {
  if (!status.ok()) ThrowStatus(status);
}

// The value, or the error thrown.
template <class T>
T Unwrap(absl::StatusOr<T> result) {
  if (!result.ok()) ThrowStatus(result.status());
  return *std::move(result);
}

// For ema::Client::Options::is_interrupted. Runs Python's signal handlers; true if one of them
// (that of Ctrl-C) has raised. The exception stays set in this thread. Takes the GIL, so the caller
// must not hold it across a wait. Never true in a thread other than Python's main one.
bool SignalRaised();

// For ema::Client::Options::on_wait: a warning of Python's logger. Takes the GIL, as above, and
// leaves what a signal handler raises meanwhile set, too.
void LogWait(const absl::Status& error);

// Calls `call` (giving a Status or StatusOr) without the GIL and returns its value. An exception
// that SignalRaised() has left comes before the call's own result.
template <class Call>
auto CallWithoutGil(Call&& call) {
  auto result = [&] {
    const GilReleased released;
    return call();
  }();
  if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
  if constexpr (std::is_same_v<decltype(result), absl::Status>) {
    ThrowIfError(result);
  } else {
    return Unwrap(std::move(result));
  }
}

}  // namespace ema::python

#endif  // EMA_CLIENT_PYTHON_SRC_PYTHON_ERROR_H_
