// SPDX-License-Identifier: Apache-2.0
#include "server/server.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/internal/status_macros.h"
#include "server/base/shared_ring.h"
#include "server/checkpoint/file_system.h"
#include "server/ops/logging.h"

namespace ema {

namespace {

CheckpointManager::Options CheckpointOptions(const ServerOptions& options) {
  return {.store = {.data_dir = options.data_dir,
                    .keep_count = options.keep_last,
                    .keep_step_multiple = options.keep_every_steps,
                    .max_file_bytes = options.max_file_bytes},
          .policy = {.every_commits = options.save_every_commits,
                     .every = options.save_every,
                     .step_multiple = options.save_step_multiple},
          .scrub_interval = options.scrub_interval,
          .on_info = [](const std::string& text) { LogInfo(text); },
          .on_error = [](const std::string& text) { LogError(text); }};
}

// Of this process.
int64_t ResidentBytes() {
  int64_t pages = 0;
  int64_t resident_pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGESIZE);
}

// What gRPC may hold of one: its window, or a message that has arrived in part.
int64_t PushStreamBytes(const ServerOptions& options) {
  return std::max(RpcServer::kMaxWindowBytes, 2 * options.max_message_bytes);
}

// What the process can use at most. Models, and what is cast for readers, reserve their part before
// they use it.
void LogMemoryFormula(const ServerOptions& options, const Device& device, int64_t model_bytes) {
  // A chunk that is being made, one that is being sent, and gRPC's buffers.
  constexpr int64_t kPullBytes = int64_t{4} << 20;
  constexpr int64_t kLaneBytes = 2 * SharedRing::kBytes;
  const Device::Overhead overhead = device.overhead(options.block_bytes);
  const int64_t push_bytes = PushStreamBytes(options) + overhead.host_bytes_per_stream;
  const int64_t pull_bytes = kPullBytes + overhead.host_bytes_per_reader;
  const int64_t host_model_bytes = device.is_host() ? model_bytes : 0;
  const int64_t kept_bytes = Server::kKeptHeapBytes + overhead.shared_host_bytes;
  const int64_t base_bytes = ResidentBytes();
  const int64_t lanes =
      options.same_host_lane == "on" ? options.max_push_streams + options.max_pull_streams : 0;
  const int64_t total_bytes =
      base_bytes + host_model_bytes + options.max_push_streams * push_bytes +
      options.max_pull_streams * pull_bytes + lanes * kLaneBytes + kept_bytes;
  LogInfo(absl::StrCat(
      "memory: at most ", total_bytes, " bytes = ", base_bytes, " now + ", host_model_bytes,
      " for models + ", options.max_push_streams, " push streams x ", push_bytes, " + ",
      options.max_pull_streams, " pull streams x ", pull_bytes, " + ", lanes, " lanes x ",
      kLaneBytes, " + ", kept_bytes,
      " of freed buffers; a model takes its tracks' bytes x (2 + max_pinned_versions)"));
  if (device.is_host()) return;
  LogInfo(absl::StrCat(
      "memory of ", device.name(), ": at most ",
      model_bytes + options.max_push_streams * overhead.bytes_per_stream + overhead.shared_bytes,
      " bytes = ", model_bytes, " for models + ", options.max_push_streams, " push streams x ",
      overhead.bytes_per_stream, " + ", overhead.shared_bytes, " for readers"));
}

// What `--memory-bytes` is if nobody says it.
int64_t DefaultMemoryBytes(const ServerOptions& options, const Device& device) {
  const int64_t total_bytes = device.total_memory_bytes();
  const Device::Overhead overhead = device.overhead(options.block_bytes);
  const int64_t stream_bytes =
      device.is_host() ? PushStreamBytes(options) : overhead.bytes_per_stream;
  const int64_t beside_bytes = options.max_push_streams * stream_bytes + overhead.shared_bytes;
  return (total_bytes - std::min(beside_bytes, total_bytes / 2)) / 5 * 4;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options) {
  // What the pool keeps is inside the models' reservations: a model uses what it has freed again.
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<Device> device,
                       MakeDevice(options.device, std::numeric_limits<int64_t>::max()));
  return Start(options, std::move(device));
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options,
                                                      std::shared_ptr<Device> device) {
  const absl::Time begin = absl::Now();
  std::unique_ptr<Server> server(new Server(options));
  ModelStore::Options store_options;
  store_options.memory_bytes =
      options.memory_bytes > 0 ? options.memory_bytes : DefaultMemoryBytes(options, *device);
  store_options.max_models = options.max_models;
  store_options.model.block_bytes = options.block_bytes;
  store_options.model.incarnation = IncarnationWithoutStore(begin);
  store_options.model.on_warning = [](const std::string& warning) { LogWarning(warning); };
  if (!options.data_dir.empty()) {
    EMA_ASSIGN_OR_RETURN(server->checkpoints_,
                         CheckpointManager::Open(PosixFileSystem(), CheckpointOptions(options)));
    store_options.model.incarnation = server->checkpoints_->incarnation();
    store_options.model.has_data_dir = true;
  }
  if (options.statistics_every_commits > 0) {
    server->statistics_ = std::make_unique<CommitStatistics>(options.statistics_every_commits);
  }
  store_options.model.on_commit =
      [checkpoints = server->checkpoints_.get(), statistics = server->statistics_.get()](
          const std::shared_ptr<Model>& model, const Snapshot& snapshot) {
        if (checkpoints != nullptr) checkpoints->OnCommit(model, snapshot);
        if (statistics != nullptr) statistics->OnCommit(model, snapshot);
      };
  server->store_ = std::make_shared<ModelStore>(device, store_options);
  if (server->checkpoints_ != nullptr) {
    EMA_RETURN_IF_ERROR(server->checkpoints_->LoadAll(*server->store_));
  }

  RpcServer::Options rpc_options;
  rpc_options.listen_addresses = options.listen;
  rpc_options.connections = {options.max_connections, options.max_connections_per_peer};
  rpc_options.max_streams_per_connection = options.max_streams_per_connection;
  rpc_options.max_message_bytes = options.max_message_bytes;
  rpc_options.max_metadata_bytes = options.max_metadata_bytes;
  rpc_options.handshake_timeout = options.handshake_timeout;
  rpc_options.keepalive_time = options.keepalive_time;
  rpc_options.keepalive_timeout = options.keepalive_timeout;
  rpc_options.tls = {options.tls_cert, options.tls_key, options.tls_client_ca};
  rpc_options.thread_count = static_cast<int>(options.thread_count);
  rpc_options.max_push_streams = options.max_push_streams;
  rpc_options.max_pull_streams = options.max_pull_streams;
  rpc_options.max_calls_per_second = options.max_calls_per_second;
  rpc_options.same_host_lane = options.same_host_lane == "on";
  rpc_options.session_timeout = options.session_timeout;
  rpc_options.stall_timeout = options.stream_timeout;
  if (!options.auth_tokens.empty()) {
    EMA_ASSIGN_OR_RETURN(server->tokens_, TokenFile::Open(options.auth_tokens));
    server->tokens_->on_change = [](const absl::Status& status) {
      status.ok() ? LogInfo("the token file has changed, and is taken over")
                  : LogError(absl::StrCat("the token file has changed, and is not taken over: ",
                                          status.message()));
    };
    rpc_options.authenticator = server->tokens_.get();
  }
  Checkpoints* checkpoints = &server->no_checkpoints_;
  if (server->checkpoints_ != nullptr) checkpoints = server->checkpoints_.get();
  EMA_ASSIGN_OR_RETURN(server->rpc_, RpcServer::Start(server->store_, checkpoints, rpc_options));
  LogMemoryFormula(options, *device, store_options.memory_bytes);
  LogInfo(absl::StrCat("serving on port ", server->port(), ", device ", device->name(), " (",
                       DescribeGpus(), "), incarnation ", store_options.model.incarnation,
                       ", ready after ", absl::FormatDuration(absl::Now() - begin)));
  if (!options.port_file.empty()) {
    EMA_RETURN_IF_ERROR(WritePortFile(options.port_file, server->port()));
  }
  return server;
}

absl::Status Server::Drain() {
  const absl::Time deadline = absl::Now() + options_.drain_grace;
  rpc_->SetServing(false);
  store_->Drain(deadline);
  absl::Status result;
  if (checkpoints_ != nullptr) result = checkpoints_->Drain(*store_);
  store_->Close();
  rpc_->Shutdown(deadline);
  // What broke the device says more than what came of it.
  const absl::Status device = store_->device().health();
  return device.ok() ? result : device;
}

}  // namespace ema
