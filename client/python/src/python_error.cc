// SPDX-License-Identifier: Apache-2.0
#define PY_SSIZE_T_CLEAN  // For "y#".
#include "client/python/src/python_error.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <string_view>
#include <tuple>

#include "ema/error_reason.h"

namespace nb = nanobind;

namespace ema::python {

nb::object ExceptionOf(const absl::Status& status) {
  const ErrorReason reason = GetErrorReason(status);
  const std::string reason_name(reason == ErrorReason::kUnspecified ? "" : ErrorReasonName(reason));
  const std::string message(status.message());
  return nb::module_::import_("ema_client._errors")
      .attr("from_status")(absl::StatusCodeToString(status.code()), reason_name,
                           nb::bytes(message.data(), message.size()));
}

absl::Status StatusOf(nb::python_error& raised) {
  if (!raised.matches(PyExc_Exception)) {
    raised.restore();
    return absl::CancelledError("interrupted");
  }
  const auto [code_name, reason_name, message] =
      nb::cast<std::tuple<std::string, std::string, std::string>>(
          nb::module_::import_("ema_client._errors").attr("to_status")(raised.value()));
  auto code = absl::StatusCode::kUnknown;
  for (int number = 1; number <= 16; ++number) {
    const auto candidate = static_cast<absl::StatusCode>(number);
    if (absl::StatusCodeToString(candidate) == code_name) code = candidate;
  }
  if (reason_name.empty()) return absl::Status(code, message);
  auto reason = ErrorReason::kUnspecified;
  for (int number = 1; number < 128; ++number) {
    const auto candidate = static_cast<ErrorReason>(number);
    if (ErrorReasonName(candidate) == reason_name) reason = candidate;
  }
  return MakeError(code, reason, message);
}

void ThrowStatus(const absl::Status& status) {
  const nb::object exception = ExceptionOf(status);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw nb::python_error();
}

bool SignalRaised() {
  const GilHeld held;
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

void LogWait(const absl::Status& error) {
  const GilHeld held;
  if (PyErr_Occurred() != nullptr) return;
  const std::string_view message(error.message().data(), error.message().size());
  // Nothing in it that has a destructor, which could run without the lock.
  const bool is_done = OrForever([message] {
    PyObject* const module = PyImport_ImportModule("ema_client._errors");
    if (module == nullptr) return false;
    PyObject* const result = PyObject_CallMethod(module, "log_wait", "y#", message.data(),
                                                 static_cast<Py_ssize_t>(message.size()));
    Py_DECREF(module);
    Py_XDECREF(result);
    return result != nullptr;
  });
  // What a signal handler raises stays, and ends the call, as it does in SignalRaised().
  if (!is_done && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_WriteUnraisable(nullptr);
}

}  // namespace ema::python
