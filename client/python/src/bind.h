// SPDX-License-Identifier: Apache-2.0
//
// The parts of the extension module, which module.cc assembles.
#ifndef EMA_CLIENT_PYTHON_SRC_BIND_H_
#define EMA_CLIENT_PYTHON_SRC_BIND_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "ema/client.h"

namespace ema::python {

void BindTypes(nanobind::module_& module);   // Array, Schedule, ScheduleState, Track, even_share
void BindFold(nanobind::module_& module);    // fold_many
void BindRun(nanobind::module_& module);     // Run, PendingPush
void BindEngine(nanobind::module_& module);  // PushEngine
void BindRead(nanobind::module_& module);    // read_tensors
void BindClient(nanobind::module_& module);  // Client, VersionWatch

// For attr(), which looks it up faster than a char*.
inline nanobind::object InternedName(const char* name) {
  return nanobind::steal(PyUnicode_InternFromString(name));
}

// The Python object of a run. `client` stays alive as long as it.
nanobind::object WrapRun(std::shared_ptr<Client> client, std::unique_ptr<Run> run);
// The run of such an object, which must not be used after that.
std::unique_ptr<Run> TakeRun(nanobind::handle run);
// The client of a Python object `Client`. Throws FailedPreconditionError: it is closed.
std::shared_ptr<Client> ClientOf(nanobind::handle client);

// A GPU's index and one of its streams, as PyTorch's cuda_stream gives it.
using StreamTuple = std::tuple<int, uintptr_t>;
std::vector<GpuStream> ToStreams(const std::vector<StreamTuple>& streams);

}  // namespace ema::python

#endif  // EMA_CLIENT_PYTHON_SRC_BIND_H_
