// SPDX-License-Identifier: Apache-2.0
//
// Run and PendingPush: one rank's pushes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "client/python/src/array.h"
#include "client/python/src/bind.h"
#include "client/python/src/gil.h"
#include "client/python/src/python_error.h"
#include "client/python/src/python_values.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: the only way to "name"_a.

namespace ema::python {
namespace {

// What keeps arrays' memory.
using Owners = std::vector<std::shared_ptr<const void>>;

// A push that runs, and the arrays it reads. For any thread that has the GIL.
class PyPendingPush {
 public:
  // `on_gpu`: some of the arrays are.
  PyPendingPush(std::unique_ptr<PendingPush> push, Owners arrays, bool on_gpu)
      : push_(std::move(push)), arrays_(std::move(arrays)), on_gpu_(on_gpu) {}
  PyPendingPush(const PyPendingPush&) = delete;
  PyPendingPush& operator=(const PyPendingPush&) = delete;

  ~PyPendingPush() {
    // In a forked child the threads that end the push do not exist.
    if (getpid() != pid_) {
      (void)push_.release();
      return;
    }
    const GilReleased released;
    push_.reset();
  }

  bool WaitReleased(double max_wait_s, const std::vector<StreamTuple>& streams) {
    const absl::Duration max_wait = ToDuration(max_wait_s);
    const std::vector<GpuStream> waiting = ToStreams(streams);
    const bool released = CallWithoutGil(
        [&] { return absl::StatusOr<bool>(push_->WaitReleased(max_wait, waiting)); });
    // In both cases arrays in host memory are not read any more. A GPU may still copy: PyTorch's
    // streams wait for the copies (GpuStream), but not the stream on which an array was made.
    if (push_->done() || !on_gpu_) LetArraysGo();
    return released;
  }

  bool WaitDone(double max_wait_s) {
    const absl::Duration max_wait = ToDuration(max_wait_s);
    const bool done =
        CallWithoutGil([&] { return absl::StatusOr<bool>(push_->WaitDone(max_wait)); });
    if (done) LetArraysGo();
    return done;
  }

  Version Wait() {
    Version version = CallWithoutGil([&] { return push_->Wait(); });
    LetArraysGo();
    return version;
  }

  void Abandon() {
    CallWithoutGil([&] {
      push_->Abandon();
      return absl::OkStatus();
    });
    LetArraysGo();
  }

  bool done() const { return push_->done(); }

  PendingPush::Stats stats() const { return push_->stats(); }

 private:
  // To destroy an array runs its framework's code, PyTorch's among it that lets other threads have
  // the GIL: they must find no array here that is half destroyed.
  void LetArraysGo() { const Owners gone = std::exchange(arrays_, {}); }

  const pid_t pid_ = getpid();
  std::unique_ptr<PendingPush> push_;
  Owners arrays_;  // Under the GIL.
  const bool on_gpu_;
};

class PyRun {
 public:
  PyRun(std::shared_ptr<Client> client, std::unique_ptr<Run> run)
      : client_(std::move(client)), run_(std::move(run)) {}
  PyRun(const PyRun&) = delete;
  PyRun& operator=(const PyRun&) = delete;

  ~PyRun() {
    const GilReleased released;
    run_.reset();
    client_.reset();
  }

  const Run& run() const { return *run_; }
  std::unique_ptr<Run> Take() { return std::move(run_); }

  PyPendingPush* StartPush(int64_t step, const nb::dict& time,
                           const std::vector<const Array*>& arrays, double timeout_s,
                           bool frozen_changed, const std::vector<StreamTuple>& streams,
                           bool check) {
    const TrainingTime training_time = ToTime(time);
    const absl::Duration timeout = ToDuration(timeout_s);
    FoundShards shards = Unwrap(
        FindShards(run_->manifest(), run_->layout(), arrays, 0, run_->layout().shards().size()));
    PushOptions options = {
        .frozen_changed = frozen_changed,
        .gpu_weights = {.devices = std::move(shards.gpus), .streams = ToStreams(streams)},
        .strides = std::move(shards.strides),
        .check = check};
    Owners kept;
    kept.reserve(arrays.size());
    for (const Array* array : arrays) kept.push_back(array->owner);
    const bool on_gpu = std::any_of(arrays.begin(), arrays.end(),
                                    [](const Array* array) { return array->gpu >= 0; });
    std::unique_ptr<PendingPush> push = CallWithoutGil([&] {
      return run_->StartPush(step, training_time, std::move(shards.bytes), timeout,
                             std::move(options));
    });
    return new PyPendingPush(std::move(push), std::move(kept), on_gpu);
  }

  void WaitReady(double timeout_s) {
    const absl::Duration timeout = ToDuration(timeout_s);
    CallWithoutGil([&] { return run_->WaitReady(timeout); });
  }

 private:
  std::shared_ptr<Client> client_;
  std::unique_ptr<Run> run_;
};

std::vector<ShardTuple> Shards(const PyRun& self) {
  std::vector<ShardTuple> result;
  for (const Shard& shard : self.run().layout().shards()) {
    result.emplace_back(shard.tensor_index, shard.offsets, shard.extents);
  }
  return result;
}

// Names of the frozen tensors of which this rank holds some.
std::vector<std::string> Frozen(const PyRun& self) {
  std::vector<std::string> result;
  for (const Shard& shard : self.run().layout().frozen_shards()) {
    const std::string& name = self.run().manifest().tensor(shard.tensor_index).name;
    if (result.empty() || result.back() != name) result.push_back(name);
  }
  return result;
}

}  // namespace

nb::object WrapRun(std::shared_ptr<Client> client, std::unique_ptr<Run> run) {
  return nb::cast(new PyRun(std::move(client), std::move(run)), nb::rv_policy::take_ownership);
}

std::unique_ptr<Run> TakeRun(nb::handle run) { return nb::cast<PyRun&>(run).Take(); }

std::vector<GpuStream> ToStreams(const std::vector<StreamTuple>& streams) {
  std::vector<GpuStream> result;
  for (const auto& [device, handle] : streams) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): Python has no pointers.
    result.push_back({.device = device, .handle = reinterpret_cast<void*>(handle)});
  }
  return result;
}

void BindRun(nb::module_& module) {
  nb::class_<PyPendingPush>(module, "PendingPush")
      .def("wait_released", &PyPendingPush::WaitReleased, "max_wait_s"_a, "streams"_a)
      .def("wait_done", &PyPendingPush::WaitDone, "max_wait_s"_a)
      .def("wait", &PyPendingPush::Wait)
      .def("abandon", &PyPendingPush::Abandon)
      .def_prop_ro("done", &PyPendingPush::done)
      .def_prop_ro("stats", &PyPendingPush::stats);

  nb::class_<PyRun>(module, "Run")
      .def("start_push", &PyRun::StartPush, "step"_a, "time"_a, "arrays"_a, "timeout_s"_a,
           "frozen_changed"_a = false, "streams"_a = nb::make_tuple(), "check"_a = false)
      .def("wait_ready", &PyRun::WaitReady, "timeout_s"_a)
      .def(
          "is_due",
          [](const PyRun& self, const nb::dict& now) {
            return Unwrap(self.run().IsDue(ToTime(now)));
          },
          "now"_a)
      .def_prop_ro("may_omit_frozen",
                   [](const PyRun& self) { return self.run().plan().may_omit_frozen; })
      .def_prop_ro("frozen", &Frozen)
      .def_prop_ro("tensors", [](const PyRun& self) { return SpecsOf(self.run().manifest()); })
      .def_prop_ro("shards", &Shards)
      .def_prop_ro("total_bytes",
                   [](const PyRun& self) { return self.run().layout().total_bytes(); })
      .def_prop_ro("run_epoch", [](const PyRun& self) { return self.run().run_epoch(); })
      .def_prop_ro("rank", [](const PyRun& self) { return self.run().rank(); })
      .def_prop_ro("latest", [](const PyRun& self) { return self.run().latest(); });
}

}  // namespace ema::python
