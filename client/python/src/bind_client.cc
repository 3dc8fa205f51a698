// SPDX-License-Identifier: Apache-2.0
//
// Client and VersionWatch.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/python/src/bind.h"
#include "client/python/src/gil.h"
#include "client/python/src/python_error.h"
#include "client/python/src/python_values.h"
#include "ema/error_reason.h"
#include "ema/internal/pull_memory.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: the only way to "name"_a.

namespace ema::python {
namespace {

// (tensor, offsets, extents)
using SliceTuple = std::tuple<std::string, std::vector<int64_t>, std::vector<int64_t>>;

// What a pull gave, and what it was asked for. Its memory is that of the arrays over it.
struct Pulled {
  std::string model;
  std::string track;
  Selection selection;
  PullInfo info;
  PullMemory memory;
  bool is_mixed = false;  // Some of the bytes may be of a newer version.

  absl::StatusOr<std::span<std::byte>> Allocate(const PullInfo& coming) {
    memory = AllocatePullMemory(coming.total_bytes);
    if (memory == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory for ", coming.total_bytes, " bytes"));
    }
    return std::span<std::byte>(memory.get(), static_cast<size_t>(coming.total_bytes));
  }

  // For a pull of the same into the same memory.
  absl::StatusOr<std::span<std::byte>> MemoryFor(const PullInfo& coming) const {
    const auto is_same = [](const PulledTensor& a, const PulledTensor& b) {
      return a.spec == b.spec && a.offset == b.offset;
    };
    if (!std::equal(info.tensors.begin(), info.tensors.end(), coming.tensors.begin(),
                    coming.tensors.end(), is_same)) {
      return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kModelDiffers,
                       absl::StrCat("model \"", model, "\", track \"", track,
                                    "\": its tensors are not those that were pulled; pull anew"));
    }
    return std::span<std::byte>(memory.get(), static_cast<size_t>(info.total_bytes));
  }
};

// (name, dtype, shape, offset, length)
nb::list TensorsOf(const Pulled& pulled) {
  nb::list tensors;
  for (const PulledTensor& tensor : pulled.info.tensors) {
    tensors.append(nb::make_tuple(tensor.spec.name, std::string(DtypeName(tensor.spec.dtype)),
                                  nb::cast(tensor.spec.shape), tensor.offset, tensor.length_bytes));
  }
  return tensors;
}

// {alias: name}
nb::dict AliasesOf(const Pulled& pulled) {
  nb::dict aliases;
  for (const PulledTensor& tensor : pulled.info.tensors) {
    for (const std::string& alias : tensor.spec.aliases) {
      aliases[nb::cast(alias)] = tensor.spec.name;
    }
  }
  return aliases;
}

nb::object BytesOf(const std::shared_ptr<Pulled>& pulled) {
  auto* const held = new std::shared_ptr<Pulled>(pulled);
  nb::capsule owner(held,
                    [](void* p) noexcept { delete static_cast<std::shared_ptr<Pulled>*>(p); });
  return nb::cast(nb::ndarray<nb::memview, uint8_t, nb::ndim<1>>(
      pulled->memory.get(), {static_cast<size_t>(pulled->info.total_bytes)}, owner));
}

// A watch that waits, and ends, without the GIL.
class PyVersionWatch {
 public:
  explicit PyVersionWatch(std::unique_ptr<VersionWatch> watch) : watch_(std::move(watch)) {}
  PyVersionWatch(const PyVersionWatch&) = delete;
  PyVersionWatch& operator=(const PyVersionWatch&) = delete;
  ~PyVersionWatch() {
    const GilReleased released;
    watch_.reset();
  }

  nb::object Next() {
    const VersionWatch::Item item = CallWithoutGil([this] { return watch_->Next(); });
    return ToRecord(item.version, item.skipped);
  }

 private:
  std::unique_ptr<VersionWatch> watch_;
};

class PyClient {
 public:
  // What `method`, which takes a client, `arguments` and a time-out, gives. The client stays alive
  // as long, also where another thread closes it.
  template <class Method, class... Arguments>
  auto Call(const Method& method, double timeout_s, const Arguments&... arguments) const {
    const absl::Duration timeout = ToDuration(timeout_s);
    const std::shared_ptr<Client> client = Get();
    return CallWithoutGil([&] { return std::invoke(method, *client, arguments..., timeout); });
  }

  std::shared_ptr<Client> Get() const {
    if (client_ == nullptr) {
      ThrowStatus(MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kBadRequest,
                            "the client is closed"));
    }
    return client_;
  }

  PyClient(const std::string& address, double timeout_s, bool same_host_lane,
           int64_t max_connections, const std::tuple<std::string, std::string, std::string>& tls,
           const std::string& token, const std::string& token_file) {
    Client::Options options{.timeout = ToDuration(timeout_s),
                            .same_host_lane = same_host_lane,
                            .max_connections = max_connections,
                            .token = token,
                            .token_file = token_file,
                            .is_interrupted = SignalRaised,
                            .on_wait = LogWait};
    std::tie(options.tls.ca_file, options.tls.certificate_file, options.tls.key_file) = tls;
    client_ = Unwrap(Client::Create(address, options));
  }
  PyClient(const PyClient&) = delete;
  PyClient& operator=(const PyClient&) = delete;
  ~PyClient() { Close(); }

  void Close() {
    // Taken out under the GIL: from then on other threads find the client closed.
    std::shared_ptr<Client> client = std::move(client_);
    const GilReleased released;
    client.reset();
  }

  ModelInfo CreateModel(const std::string& model, const std::vector<SpecTuple>& specs,
                        const std::vector<TrackConfig>& tracks, int64_t max_pinned_versions,
                        const std::string& non_finite, double timeout_s) {
    const Manifest manifest = ToManifest(specs);
    const Client::ModelOptions options{.max_pinned_versions = max_pinned_versions,
                                       .non_finite = ToNonFinite(non_finite)};
    const auto create = [&](Client& client, absl::Duration timeout) {
      return client.CreateModel(model, manifest, tracks, options, timeout);
    };
    return Call(create, timeout_s).model;
  }

  ModelInfo UpdateModel(const std::string& model, const std::vector<TrackConfig>& put,
                        const std::vector<std::string>& remove,
                        const std::vector<std::string>& pause,
                        const std::vector<std::string>& resume, double timeout_s) {
    const Client::ModelChanges changes{put, remove, pause, resume};
    return Call(&Client::UpdateModel, timeout_s, model, changes);
  }

  void AttachFile(const std::string& model, const std::string& name, const nb::bytes& data,
                  double timeout_s) {
    const std::string_view bytes(data.c_str(), data.size());
    Call(&Client::AttachFile, timeout_s, model, name, bytes);
  }

  nb::bytes GetAttachedFile(const std::string& model, const std::string& name, double timeout_s) {
    const std::string bytes = Call(&Client::GetAttachedFile, timeout_s, model, name);
    return nb::bytes(bytes.data(), bytes.size());
  }

  Version GetStatistics(const std::string& model, int64_t version, int64_t incarnation,
                        const std::vector<std::string>& tracks, double timeout_s) {
    const Client::StatisticsOptions options{.id = {version, incarnation}, .tracks = tracks};
    const auto get = [&](Client& client, absl::Duration timeout) {
      return client.GetStatistics(model, options, timeout);
    };
    return Call(get, timeout_s);
  }

  Client::CheckpointResult CreateCheckpoint(const std::string& model, int64_t version,
                                            int64_t incarnation,
                                            const std::vector<std::string>& tracks,
                                            const std::string& label, bool wait, double timeout_s) {
    const Client::CheckpointOptions options{.version = version,
                                            .incarnation = incarnation,
                                            .tracks = tracks,
                                            .async = !wait,
                                            .label = label};
    const auto create = [&](Client& client, absl::Duration timeout) {
      return client.CreateCheckpoint(model, options, timeout);
    };
    return Call(create, timeout_s);
  }

  std::tuple<std::vector<CheckpointInfo>, std::vector<CheckpointLabel>> ListCheckpoints(
      const std::string& model, double timeout_s) {
    CheckpointList list = Call(&Client::ListCheckpoints, timeout_s, model);
    return {std::move(list.checkpoints), std::move(list.labels)};
  }

  // By `label` if there is one.
  Version RestoreCheckpoint(const std::string& model, int64_t version, int64_t incarnation,
                            const std::string& label, double timeout_s) {
    const auto restore = [&](Client& client, absl::Duration timeout) {
      return label.empty()
                 ? client.RestoreCheckpoint(model, VersionId{version, incarnation}, timeout)
                 : client.RestoreCheckpoint(model, label, timeout);
    };
    return Call(restore, timeout_s);
  }

  CheckpointLabel SetLabel(const std::string& model, const std::string& label, int64_t version,
                           int64_t incarnation, double timeout_s) {
    return Call(&Client::SetLabel, timeout_s, model, label, VersionId{version, incarnation});
  }

  MetricResult ReportMetric(const std::string& model, int64_t version, int64_t incarnation,
                            double value, bool lower_is_better, const std::string& label,
                            double timeout_s) {
    const Client::Metric metric{.id = {version, incarnation},
                                .value = value,
                                .lower_is_better = lower_is_better,
                                .label = label};
    return Call(&Client::ReportMetric, timeout_s, model, metric);
  }

  Synthesis Synthesize(const std::string& model, const std::string& result,
                       const std::optional<double>& sigma_rel, const std::string& half_life,
                       int64_t step, const std::vector<std::string>& tracks, double timeout_s) {
    const Client::SynthesizeOptions options{.name = result,
                                            .sigma_rel = sigma_rel,
                                            .half_life = half_life,
                                            .step = step,
                                            .tracks = tracks};
    return Call(&Client::Synthesize, timeout_s, model, options);
  }

  nb::object OpenRun(const std::string& model, const std::string& launch_id, int64_t rank,
                     int64_t world_size, const std::optional<std::vector<ShardTuple>>& shards,
                     int64_t frozen_shard_count, const std::string& wire_dtype, bool rejoins,
                     const std::optional<ResumeTuple>& resume, int64_t last_run_epoch,
                     int64_t imported_updates, int64_t max_staging_bytes, double timeout_s) {
    Client::RunOptions options{.launch_id = launch_id,
                               .rank = rank,
                               .world_size = world_size,
                               .shards = std::nullopt,
                               .frozen_shard_count = frozen_shard_count,
                               .wire_dtype = ToWireDtype(wire_dtype),
                               .rejoins = rejoins,
                               .resume = std::nullopt,
                               .last_run_epoch = last_run_epoch,
                               .imported_updates = imported_updates,
                               .max_staging_bytes = max_staging_bytes};
    if (resume.has_value()) options.resume = ToResumePoint(*resume);
    if (shards.has_value()) options.shards = ToShards(*shards);
    const absl::Duration timeout = ToDuration(timeout_s);
    const auto client = Get();
    auto run = CallWithoutGil([&] { return client->OpenRun(model, options, timeout); });
    return WrapRun(client, std::move(run));
  }

  std::shared_ptr<Pulled> Pull(const std::string& model, const std::string& track, int64_t version,
                               int64_t incarnation, const std::string& label,
                               std::optional<int64_t> step, const std::vector<std::string>& tensors,
                               const std::vector<SliceTuple>& slices,
                               const std::optional<std::string>& dtype, const std::string& overflow,
                               double timeout_s, const std::optional<nb::callable>& on_progress) {
    auto pulled = std::make_shared<Pulled>();
    pulled->model = model;
    pulled->track = track;
    pulled->selection.tensors = tensors;
    for (const auto& [tensor, offsets, extents] : slices) {
      pulled->selection.slices.push_back({tensor, offsets, extents});
    }
    if (dtype.has_value()) pulled->selection.dtype = Unwrap(ParseDtype(*dtype));
    pulled->selection.overflow = Unwrap(ParseOverflowPolicy(overflow));
    const Client::PullOptions options{.version = version,
                                      .incarnation = incarnation,
                                      .label = label,
                                      .step = step,
                                      .selection = pulled->selection};
    const auto allocate = [&](const PullInfo& info) { return pulled->Allocate(info); };
    std::function<void(int64_t)> progress;
    bool has_raised = false;
    if (on_progress.has_value()) {
      progress = [&](int64_t byte_count) {
        if (has_raised) return;
        const GilHeld held;
        // A signal that has come before the pull has noticed.
        has_raised = PyErr_Occurred() != nullptr;
        if (has_raised) return;
        const nb::object result = nb::steal(OrForever([&] {
          return PyObject_CallFunction(on_progress->ptr(), "L", static_cast<long long>(byte_count));
        }));
        has_raised = !result.is_valid();
      };
    }
    const auto pull = [&](Client& client, absl::Duration timeout) {
      return client.Pull(model, track, options, allocate, timeout, progress);
    };
    pulled->info = Call(pull, timeout_s);
    return pulled;
  }

  // Brings `pulled` to the newest version, in place. False: it is.
  bool Refresh(const std::shared_ptr<Pulled>& pulled, double timeout_s) {
    Client::PullOptions options{.selection = pulled->selection};
    if (!pulled->is_mixed) {
      options.base = {pulled->info.version.number, pulled->info.version.incarnation};
      options.if_newer_than = options.base;
    }
    const auto pull = [&](Client& client, absl::Duration timeout) {
      return client.Pull(
          pulled->model, pulled->track, options,
          [&](const PullInfo& coming) {
            auto memory = pulled->MemoryFor(coming);
            pulled->is_mixed |= memory.ok();
            return memory;
          },
          timeout);
    };
    PullInfo info = Call(pull, timeout_s);
    if (info.not_newer) return false;
    pulled->is_mixed = false;
    pulled->info = std::move(info);
    return true;
  }

  std::unique_ptr<PyVersionWatch> Watch(const std::string& model,
                                        const std::optional<std::tuple<int64_t, int64_t>>& after,
                                        double timeout_s) {
    std::optional<VersionId> id;
    if (after.has_value()) id = std::make_from_tuple<VersionId>(*after);
    return std::make_unique<PyVersionWatch>(Call(&Client::Watch, timeout_s, model, id));
  }

 private:
  std::shared_ptr<Client> client_;  // Under the GIL; null when closed.
};

// A call whose arguments are those of Client's.
template <auto kMethod, class... Arguments>
struct Forward {
  static auto Call(const PyClient& self, const Arguments&... arguments, double timeout_s) {
    return self.Call(kMethod, timeout_s, arguments...);
  }
};

// By name: sizes in bytes.
nb::dict FilesOf(const ModelInfo& model) {
  nb::dict files;
  for (const auto& [name, total_bytes] : model.attached_files) files[nb::cast(name)] = total_bytes;
  return files;
}

}  // namespace

std::shared_ptr<Client> ClientOf(nb::handle client) { return nb::cast<PyClient&>(client).Get(); }

void BindClient(nb::module_& module) {
  nb::class_<PyVersionWatch>(module, "VersionWatch").def("next", &PyVersionWatch::Next);

  nb::class_<Pulled>(module, "Pulled")
      .def_prop_ro("version", [](const Pulled& pulled) { return pulled.info.version; })
      .def_prop_ro("tensors", &TensorsOf)
      .def_prop_ro("aliases", &AliasesOf)
      .def_prop_ro("bytes", &BytesOf)
      .def_ro("is_mixed", &Pulled::is_mixed)
      .def_prop_ro("received_bytes",
                   [](const Pulled& pulled) { return pulled.info.received_bytes; })
      .def_prop_ro("lane",
                   [](const Pulled& pulled) { return std::string(LaneName(pulled.info.lane)); });

  nb::class_<ModelInfo>(module, "ModelInfo")
      .def_ro("name", &ModelInfo::name)
      .def_prop_ro("tensors", [](const ModelInfo& model) { return SpecsOf(model.manifest); })
      .def_ro("tracks", &ModelInfo::tracks)
      .def_ro("pending_tracks", &ModelInfo::pending_tracks)
      .def_ro("plan_revision", &ModelInfo::plan_revision)
      .def_ro("max_pinned_versions", &ModelInfo::max_pinned_versions)
      .def_prop_ro(
          "non_finite",
          [](const ModelInfo& model) { return std::string(NonFinitePolicyName(model.non_finite)); })
      .def_ro("reserved_bytes", &ModelInfo::reserved_bytes)
      .def_ro("latest", &ModelInfo::latest)
      .def_ro("run_epoch", &ModelInfo::run_epoch)
      .def_prop_ro("attached_files", &FilesOf);

  nb::class_<PyClient>(module, "Client")
      .def(nb::init<const std::string&, double, bool, int64_t,
                    const std::tuple<std::string, std::string, std::string>&, const std::string&,
                    const std::string&>(),
           "address"_a, "timeout_s"_a, "same_host_lane"_a, "max_connections"_a, "tls"_a, "token"_a,
           "token_file"_a)
      .def("close", &PyClient::Close)
      .def("create_model", &PyClient::CreateModel, "model"_a, "specs"_a, "tracks"_a,
           "max_pinned_versions"_a, "non_finite"_a, "timeout_s"_a)
      .def("update_model", &PyClient::UpdateModel, "model"_a, "put"_a, "remove"_a, "pause"_a,
           "resume"_a, "timeout_s"_a)
      .def("get_server_info", &Forward<&Client::GetServerInfo>::Call, "timeout_s"_a)
      .def("get_model", &Forward<&Client::GetModel, std::string>::Call, "model"_a, "timeout_s"_a)
      .def("list_models", &Forward<&Client::ListModels>::Call, "timeout_s"_a)
      .def("delete_model", &Forward<&Client::DeleteModel, std::string, bool>::Call, "model"_a,
           "purge"_a, "timeout_s"_a)
      .def("attach_file", &PyClient::AttachFile, "model"_a, "name"_a, "data"_a, "timeout_s"_a)
      .def("get_attached_file", &PyClient::GetAttachedFile, "model"_a, "name"_a, "timeout_s"_a)
      .def("remove_attached_file",
           &Forward<&Client::RemoveAttachedFile, std::string, std::string>::Call, "model"_a,
           "name"_a, "timeout_s"_a)
      .def("list_versions", &Forward<&Client::ListVersions, std::string, int64_t>::Call, "model"_a,
           "after"_a, "timeout_s"_a)
      .def("get_statistics", &PyClient::GetStatistics, "model"_a, "version"_a, "incarnation"_a,
           "tracks"_a, "timeout_s"_a)
      .def("create_checkpoint", &PyClient::CreateCheckpoint, "model"_a, "version"_a,
           "incarnation"_a, "tracks"_a, "label"_a, "wait"_a, "timeout_s"_a)
      .def("get_checkpoint", &Forward<&Client::GetCheckpoint, std::string, std::string>::Call,
           "model"_a, "checkpoint"_a, "timeout_s"_a)
      .def("list_checkpoints", &PyClient::ListCheckpoints, "model"_a, "timeout_s"_a)
      .def("delete_checkpoint", &Forward<&Client::DeleteCheckpoint, std::string, std::string>::Call,
           "model"_a, "checkpoint"_a, "timeout_s"_a)
      .def("restore_checkpoint", &PyClient::RestoreCheckpoint, "model"_a, "version"_a,
           "incarnation"_a, "label"_a, "timeout_s"_a)
      .def("set_label", &PyClient::SetLabel, "model"_a, "label"_a, "version"_a, "incarnation"_a,
           "timeout_s"_a)
      .def("remove_label", &Forward<&Client::RemoveLabel, std::string, std::string>::Call,
           "model"_a, "label"_a, "timeout_s"_a)
      .def("report_metric", &PyClient::ReportMetric, "model"_a, "version"_a, "incarnation"_a,
           "value"_a, "lower_is_better"_a, "label"_a, "timeout_s"_a)
      .def("synthesize", &PyClient::Synthesize, "model"_a, "result"_a, "sigma_rel"_a.none(),
           "half_life"_a, "step"_a, "tracks"_a, "timeout_s"_a)
      .def("open_run", &PyClient::OpenRun, "model"_a, "launch_id"_a, "rank"_a, "world_size"_a,
           "shards"_a.none(), "frozen_shard_count"_a, "wire_dtype"_a, "rejoins"_a,
           "resume"_a.none(), "last_run_epoch"_a, "imported_updates"_a, "max_staging_bytes"_a,
           "timeout_s"_a)
      .def("pull", &PyClient::Pull, "model"_a, "track"_a, "version"_a, "incarnation"_a, "label"_a,
           "step"_a.none(), "tensors"_a, "slices"_a, "dtype"_a.none(), "overflow"_a, "timeout_s"_a,
           "on_progress"_a.none())
      .def("refresh", &PyClient::Refresh, "pulled"_a, "timeout_s"_a)
      .def("watch", &PyClient::Watch, "model"_a, "after"_a.none(), "timeout_s"_a);
}

}  // namespace ema::python
