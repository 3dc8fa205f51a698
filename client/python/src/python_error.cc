// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/python_error.h"

#include <nanobind/stl/string.h>

#include <string>

#include "ema/error_reason.h"

namespace nb = nanobind;

namespace ema::python {

void ThrowStatus(const absl::Status& status) {
  const ErrorReason reason = GetErrorReason(status);
  const std::string reason_name(reason == ErrorReason::kUnspecified ? "" : ErrorReasonName(reason));
  const std::string message(status.message());
  nb::object exception =
      nb::module_::import_("ema_client._errors")
          .attr("from_status")(absl::StatusCodeToString(status.code()), reason_name,
                               nb::bytes(message.data(), message.size()));
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
  const std::string message(error.message());
  OrForever([&] {
    try {
      nb::module_::import_("ema_client._errors")
          .attr("log_wait")(nb::bytes(message.data(), message.size()));
    } catch (nb::python_error& thrown) {
      // What a signal handler raises ends the call, as it does in SignalRaised().
      if (thrown.matches(PyExc_Exception)) {
        thrown.discard_as_unraisable("ema_client, logging");
      } else {
        thrown.restore();
      }
    }
  });
}

}  // namespace ema::python
