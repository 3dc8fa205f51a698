// SPDX-License-Identifier: Apache-2.0
//
// ema_client._ema: the C++ client for the Python package. Plain values in and out; what users see
// is made in Python.
#include "client/cpp/transport/quiet_grpc.h"
#include "client/python/src/bind.h"

NB_MODULE(_ema, module) {
  // What is alive when the interpreter ends is the user's, and harmless.
  nanobind::set_leak_warnings(false);
  ema::client_internal::QuietGrpc();
  ema::python::BindTypes(module);
  ema::python::BindFold(module);
  ema::python::BindRun(module);
  ema::python::BindEngine(module);
  ema::python::BindRead(module);
  ema::python::BindClient(module);
}
