// SPDX-License-Identifier: Apache-2.0
//
// PushEngine: the trainer's protocol, which asks Python for the weights of each step that is due.
#define PY_SSIZE_T_CLEAN  // For "y#".
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "client/cpp/trainer/push_engine.h"
#include "client/python/src/array.h"
#include "client/python/src/bind.h"
#include "client/python/src/gil.h"
#include "client/python/src/python_error.h"
#include "client/python/src/python_values.h"
#include "ema/internal/status_macros.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: the only way to "name"_a.

namespace ema::python {
namespace {

using client_internal::PushEngine;
using client_internal::RunJoiner;
using client_internal::StepWeights;

PushEngine::OnError ToOnError(std::string_view name) {
  if (name == "raise") return PushEngine::OnError::kRaise;
  return name == "wait" ? PushEngine::OnError::kWait : PushEngine::OnError::kSkip;
}

StepPusher::Existing ToExisting(std::string_view name) {
  if (name == "error") return StepPusher::Existing::kError;
  return name == "new" ? StepPusher::Existing::kNew : StepPusher::Existing::kContinue;
}

// A rank's part of a run that could not be opened: (tensors, shards, number of frozen shards, which
// are the last ones, rank, resume point).
using UnopenedRun = std::tuple<std::vector<SpecTuple>, std::vector<ShardTuple>, int64_t, int64_t,
                               std::optional<ResumeTuple>>;

// For PushEngine::Options::log. Takes the GIL.
void LogTrainerLine(LogLevel level, const std::string& text) {
  const GilHeld held;
  // An exception of a signal handler stays set.
  if (PyErr_Occurred() != nullptr) return;
  const bool is_done = OrForever([&] {
    PyObject* const module = PyImport_ImportModule("ema_client._trainer.pusher");
    if (module == nullptr) return false;
    PyObject* const result = PyObject_CallMethod(module, "log_line", "iy#", static_cast<int>(level),
                                                 text.data(), static_cast<Py_ssize_t>(text.size()));
    Py_DECREF(module);
    Py_XDECREF(result);
    return result != nullptr;
  });
  if (!is_done && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_WriteUnraisable(nullptr);
}

// Answers the engine by the methods of a Python object; `_trainer/pusher.py` has them. Used by the
// training thread, which has let the GIL go.
class PyTrainingStep : public client_internal::TrainingStep {
 public:
  explicit PyTrainingStep(nb::object step) : step_(std::move(step)) {}
  ~PyTrainingStep() override {
    const GilHeld held;
    step_.reset();
  }

  // The training time at this step.
  absl::StatusOr<TrainingTime> Time() {
    return Call<TrainingTime>("time",
                              [](nb::handle time) { return ToTime(nb::cast<nb::dict>(time)); });
  }

  absl::StatusOr<bool> FrozenChanged() override {
    return Call<bool>("frozen_changed", [](nb::handle changed) { return nb::cast<bool>(changed); });
  }

  absl::StatusOr<StepWeights> Read(const Run& run, size_t begin, size_t end) override {
    const size_t live_count = run.layout().shards().size() - run.layout().frozen_shards().size();
    const auto convert = [&](nb::handle result) {
      const auto [arrays, streams] =
          nb::cast<std::tuple<std::vector<const Array*>, std::vector<StreamTuple>>>(result);
      FoundShards found = Unwrap(FindShards(run.manifest(), run.layout(), arrays, begin, end));
      auto* const owners = new Owners;
      for (const Array* array : arrays) owners->push_back(array->owner);
      StepWeights weights;
      weights.bytes = std::move(found.bytes);
      weights.devices = std::move(found.gpus);
      weights.strides = std::move(found.strides);
      weights.streams = ToStreams(streams);
      weights.owners = {std::shared_ptr<const void>(owners, [](const Owners* held_arrays) {
        const GilHeld held;
        delete held_arrays;
      })};
      return weights;
    };
    // Which shards: those that are trained, those that are frozen, or both.
    return Call<StepWeights>("read", convert, begin < live_count || live_count == 0,
                             end > live_count);
  }

 private:
  using Owners = std::vector<std::shared_ptr<const void>>;

  template <typename Result, typename Convert, typename... Flags>
  absl::StatusOr<Result> Call(const char* method, const Convert& convert, Flags... flags) {
    const GilHeld held;
    try {
      const nb::object name = InternedName(method);
      const nb::object arguments = nb::make_tuple(flags...);
      const nb::object bound = step_.attr(name);
      const nb::object result =
          nb::steal(OrForever([&] { return PyObject_CallObject(bound.ptr(), arguments.ptr()); }));
      if (!result.is_valid()) throw nb::python_error();
      return convert(result);
    } catch (nb::python_error& raised) {
      return StatusOf(raised);
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError("this rank has no memory for the push");
    } catch (const std::exception& error) {  // Of a result of another type, for example.
      return absl::InternalError(error.what());
    }
  }

  nb::object step_;
};

// Used by one thread at a time, because its methods release the GIL: callers of everything but
// `step`, `stats` and `version` hold the attachment's lock.
class PyPushEngine {
 public:
  // `run`: None: the server is unreachable, so the engine joins the run of `unopened` later, and
  // treats an existing model as `existing` says.
  PyPushEngine(const nb::object& client, const nb::object& run,
               const std::optional<UnopenedRun>& unopened, const std::string& existing,
               const std::string& model, const std::string& launch_id, int64_t world_size,
               std::vector<TrackConfig> tracks, int64_t max_pinned_versions,
               const std::string& non_finite, const std::map<std::string, nb::bytes>& files,
               const std::string& wire_dtype, int64_t max_staging_bytes, int64_t step,
               double max_wait_s, double timeout_s, const std::string& on_error,
               double max_outage_s, bool check) {
    RunJoiner::Options options{.model = model,
                               .tracks = std::move(tracks),
                               .model_options = {.max_pinned_versions = max_pinned_versions,
                                                 .non_finite = ToNonFinite(non_finite)},
                               .run = {.launch_id = launch_id,
                                       .world_size = world_size,
                                       .wire_dtype = ToWireDtype(wire_dtype),
                                       .rejoins = false,
                                       .max_staging_bytes = max_staging_bytes},
                               .existing = ToExisting(existing)};
    std::unique_ptr<Run> joined;
    if (unopened.has_value()) {
      const auto& [specs, shards, frozen_shard_count, rank, resume] = *unopened;
      options.manifest = ToManifest(specs);
      options.run.rank = rank;
      options.run.shards = ToShards(shards);
      options.run.frozen_shard_count = frozen_shard_count;
      if (resume.has_value()) options.run.resume = ToResumePoint(*resume);
    } else {
      joined = TakeRun(run);
      const absl::Span<const Shard> shards = joined->layout().shards();
      options.manifest = joined->manifest();
      options.run.rank = joined->rank();
      options.run.shards = std::vector<Shard>(shards.begin(), shards.end());
      options.run.frozen_shard_count =
          static_cast<int64_t>(joined->layout().frozen_shards().size());
    }
    for (const auto& [name, data] : files) {
      options.files.emplace(name, std::string(data.c_str(), data.size()));
    }
    engine_ = std::make_unique<PushEngine>(
        PushEngine::Options{.is_only_rank = world_size == 1,
                            .max_wait = ToDuration(max_wait_s),
                            .timeout = ToDuration(timeout_s),
                            .on_error = ToOnError(on_error),
                            .max_outage = ToDuration(max_outage_s),
                            .check = check,
                            .log = LogTrainerLine,
                            .is_interrupted = SignalRaised},
        std::make_shared<const RunJoiner>(ClientOf(client), std::move(options)), std::move(joined),
        step);
  }
  PyPushEngine(const PyPushEngine&) = delete;
  PyPushEngine& operator=(const PyPushEngine&) = delete;

  ~PyPushEngine() {
    // In a forked child the threads that end a push do not exist.
    if (getpid() != pid_) {
      (void)engine_.release();
      return;
    }
    const GilReleased released;
    engine_.reset();
  }

  // These three keep the GIL where they have nothing to wait for, as at most steps: another Python
  // thread may keep it for milliseconds before it gives it back.
  void WaitReleased(const std::vector<StreamTuple>& streams) {
    if (engine_->is_idle()) return;
    const std::vector<GpuStream> waiting = ToStreams(streams);
    Call([&] { engine_->WaitReleased(waiting); });
  }
  void AfterStep(int64_t step, nb::object training_step) {
    const auto shared = std::make_shared<PyTrainingStep>(std::move(training_step));
    const absl::StatusOr<TrainingTime> now = shared->Time();
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    if (engine_->IsIdleAt(now)) {
      engine_->AfterStep(step, now, shared);
    } else {
      Call([&] { engine_->AfterStep(step, now, shared); });
    }
  }
  void RaiseError() {
    if (engine_->is_idle()) return ThrowIfError(engine_->TakeError());
    CallWithoutGil([&] { return engine_->TakeError(); });
  }
  void AbandonWrittenPush(const std::string& names, const std::string& hint, bool raises) {
    Call([&] { engine_->AbandonWrittenPush(names, hint, raises); });
  }
  void WaitPushed(double timeout_s) {
    const absl::Duration timeout = ToDuration(timeout_s);
    CallWithoutGil([&] { return engine_->WaitPushed(timeout); });
  }
  void EndPushes(double timeout_s) {
    const absl::Duration timeout = ToDuration(timeout_s);
    Call([&] { engine_->EndPushes(timeout); });
  }
  void Leave(double timeout_s) {
    const absl::Duration timeout = ToDuration(timeout_s);
    Call([&] { engine_->Leave(timeout); });
  }
  void Poll(bool leaves_failure) {
    Call([&] { engine_->Poll(leaves_failure); });
  }

  const PushEngine& engine() const { return *engine_; }

 private:
  template <typename Function>
  void Call(const Function& function) {
    CallWithoutGil([&] {
      function();
      return absl::OkStatus();
    });
  }

  const pid_t pid_ = getpid();
  std::unique_ptr<PushEngine> engine_;
};

nb::dict StatsOf(const PyPushEngine& self) {
  const PushEngine::Stats stats = self.engine().progress().stats;
  nb::dict result;
  result["pushes"] = stats.pushes;
  result["skipped"] = stats.skipped;
  result["sent_bytes"] = stats.sent_bytes;
  result["wait_seconds"] = absl::ToDoubleSeconds(stats.waited);
  return result;
}

std::vector<TrackConfig> TracksOf(const PyPushEngine& self) {
  std::vector<TrackConfig> tracks;
  for (const RunPlan::Entry& entry : self.engine().tracks()) tracks.push_back(entry.track);
  return tracks;
}

}  // namespace

void BindEngine(nb::module_& module) {
  nb::class_<PyPushEngine>(module, "PushEngine")
      .def(nb::init<const nb::object&, const nb::object&, const std::optional<UnopenedRun>&,
                    const std::string&, const std::string&, const std::string&, int64_t,
                    std::vector<TrackConfig>, int64_t, const std::string&,
                    const std::map<std::string, nb::bytes>&, const std::string&, int64_t, int64_t,
                    double, double, const std::string&, double, bool>(),
           nb::kw_only(), "client"_a, "run"_a.none(), "unopened"_a.none(), "existing"_a, "model"_a,
           "launch_id"_a, "world_size"_a, "tracks"_a, "max_pinned_versions"_a, "non_finite"_a,
           "files"_a, "wire_dtype"_a, "max_staging_bytes"_a, "step"_a, "max_wait_s"_a,
           "timeout_s"_a, "on_error"_a, "max_outage_s"_a, "check"_a)
      .def("wait_released", &PyPushEngine::WaitReleased, "streams"_a)
      .def("after_step", &PyPushEngine::AfterStep, "step"_a, "training_step"_a)
      .def("abandon_written_push", &PyPushEngine::AbandonWrittenPush, "names"_a, "hint"_a,
           "raises"_a)
      .def("raise_error", &PyPushEngine::RaiseError)
      .def("wait_pushed", &PyPushEngine::WaitPushed, "timeout_s"_a)
      .def("end_pushes", &PyPushEngine::EndPushes, "timeout_s"_a)
      .def("leave", &PyPushEngine::Leave, "timeout_s"_a)
      .def("poll", &PyPushEngine::Poll, "leaves_failure"_a)
      .def("disconnected_error",
           [](const PyPushEngine& self) { return ExceptionOf(self.engine().DisconnectedError()); })
      .def_prop_ro("is_push_done",
                   [](const PyPushEngine& self) { return self.engine().is_pending_push_done(); })
      .def_prop_ro("is_disconnected",
                   [](const PyPushEngine& self) { return self.engine().is_disconnected(); })
      .def_prop_ro("is_fenced", [](const PyPushEngine& self) { return self.engine().is_fenced(); })
      .def_prop_ro("rank", [](const PyPushEngine& self) { return self.engine().rank(); })
      .def_prop_ro("run_epoch", [](const PyPushEngine& self) { return self.engine().run_epoch(); })
      .def_prop_ro("step", [](const PyPushEngine& self) { return self.engine().step(); })
      .def_prop_ro("stats", &StatsOf)
      .def_prop_ro("version",
                   [](const PyPushEngine& self) { return self.engine().progress().version; })
      .def_prop_ro("tracks", &TracksOf);
}

}  // namespace ema::python
