// SPDX-License-Identifier: Apache-2.0
#include "server/server.h"

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"
#include "server/base/steady_wait.h"
#include "server/core/version_statistics.h"
#include "server/format/file_system.h"
#include "server/ops/logging.h"

namespace ema {

namespace {

// The options', and those that have none.
void LogLimits(const ServerOptions& options) {
  LogEvent event = LimitsEvent(options);
  event.fields.emplace_back("max_waiting_calls", RpcServer::kMaxWaitingCalls);
  Log(event);
}

absl::StatusOr<ServingProcess::LogLevels> ChangeLogLevel(std::string_view name) {
  const std::string before(LogLevelName(log_level()));
  if (name.empty()) return ServingProcess::LogLevels{before, before};
  const std::optional<LogLevel> level = ParseLogLevel(name);
  if (!level.has_value()) {
    return BadRequest(
        absl::StrCat("level: ", Quoted(name), " given, expected debug, info, warn or error"));
  }
  SetLogLevel(*level);
  Log(LogLevel::kInfo, "log level changed", {{"before", before}, {"now", name}});
  return ServingProcess::LogLevels{before, std::string(name)};
}

// At debug: there may be many a second.
void LogCommit(const Model& model, const Version& record) {
  if (log_level() > LogLevel::kDebug) return;
  Log(LogLevel::kDebug, "committed",
      {{"model", model.config().name},
       {"run", record.run_epoch},
       {"step", record.step},
       {"version", record.number}});
}

// Writes `port` and a line end to `path`, through a temporary file and a rename, so that a reader
// never sees a part. UNAVAILABLE: it cannot be written; no temporary file is left.
absl::Status WritePortFile(const std::string& path, int port) {
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::trunc);
  file << port << '\n';
  file.close();
  if (!file.fail() && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const int error = errno;
  std::remove(temporary.c_str());
  return absl::UnavailableError(absl::StrCat(
      "--port-file: \"", path, "\" cannot be written: ", std::generic_category().message(error)));
}

}  // namespace

LogSink Server::Sink() {
  return [this](const LogEvent& event) {
    Log(event);
    if (event.level == LogLevel::kError) metrics_.OnProblem(ToText(event));
  };
}

CheckpointManager::Options Server::CheckpointOptions() {
  constexpr absl::Duration kFreeSpaceInterval = absl::Seconds(10);
  return {.store = {.data_dir = options_.data_dir,
                    .member = group_ != nullptr ? options_.member : "",
                    .partitions = group_ != nullptr ? group_->saves() : nullptr,
                    .keep_count = options_.keep_last,
                    .keep_step_multiple = options_.keep_every_steps,
                    .max_file_bytes = options_.max_file_bytes},
          .policy = {.every_commits = options_.save_every_commits,
                     .every = options_.save_every,
                     .step_multiple = options_.save_step_multiple},
          .scrub_interval = options_.scrub_interval,
          .free_space_interval = kFreeSpaceInterval,
          .log =
              [sink = Sink()](const LogEvent& event) {
                // OnSaveEnded() has reported these.
                event.name == CheckpointManager::kSaveFailed ? Log(event) : sink(event);
              },
          .observer = &metrics_,
          .heartbeats = heartbeats_.get()};
}

RpcServer::Options Server::RpcOptions(const Hooks& hooks) {
  RpcServer::Options rpc;
  rpc.listen_addresses = options_.listen;
  rpc.limits = options_.limits;
  rpc.tls = {options_.tls_cert, options_.tls_key, options_.tls_client_ca};
  rpc.thread_count = static_cast<int>(options_.thread_count);
  rpc.same_host_lane = options_.same_host_lane == "on";
  rpc.lane_socket = options_.lane_socket;
  rpc.max_window_bytes = MaxWindowBytes(options_);
  rpc.authenticator = tokens_.get();
  rpc.log = Sink();
  rpc.heartbeats = heartbeats_;
  rpc.observer = &metrics_;
  rpc.group = group_ != nullptr ? group_->models() : nullptr;
  rpc.followed = follower_ != nullptr ? &followed_ : nullptr;
  rpc.process = {.version = std::string(ServerVersion()),
                 .incarnation = incarnation_,
                 .start_time = start_time_,
                 .drain_delay = options_.drain_delay,
                 .drain_grace = options_.drain_grace,
                 .set_log_level = [](std::string_view level) { return ChangeLogLevel(level); },
                 .drain = hooks.on_drain_requested};
  return rpc;
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options,
                                                      const Hooks& hooks,
                                                      std::shared_ptr<Device> device) {
  if (device == nullptr) {
    // What the pool keeps is inside the models' reservations: a model uses what it has freed again.
    EMA_ASSIGN_OR_RETURN(device, MakeDevice(options.device, std::numeric_limits<int64_t>::max()));
  }
  std::unique_ptr<Server> server(new Server(options));
  // Faults of the options are reported before checkpoints are read, which may take long.
  EMA_RETURN_IF_ERROR(server->OpenTokens());
  if (!options.follow.empty()) EMA_RETURN_IF_ERROR(server->CreateFollower());
  if (!options.group.empty()) {
    EMA_ASSIGN_OR_RETURN(server->group_, ServerGroup::Create(options, server->Sink()));
    EMA_RETURN_IF_ERROR(server->group_->CheckDirectory());
  }
  EMA_RETURN_IF_ERROR(server->OpenCheckpoints());
  server->MakeStore(std::move(device));
  CheckpointManager* const checkpoints = server->checkpoints_.get();
  if (server->group_ != nullptr) {
    server->group_->Attach(server->store_,
                           checkpoints != nullptr ? &checkpoints->store() : nullptr);
  }
  EMA_RETURN_IF_ERROR(server->StartHttp());
  if (checkpoints != nullptr && server->group_ != nullptr) {
    checkpoints->StartScrubbing(*server->store_);
  } else if (checkpoints != nullptr) {
    EMA_RETURN_IF_ERROR(checkpoints->LoadAll(*server->store_));
  }
  if (hooks.on_recovered) hooks.on_recovered();
  EMA_RETURN_IF_ERROR(server->StartRpc(hooks));
  Log(LogLevel::kInfo, "serving",
      {{"listen", server->rpc_->addresses()},
       {"device", server->store_->device().name()},
       {"gpus", DescribeGpus()},
       {"incarnation", server->incarnation_},
       {"seconds", absl::ToDoubleSeconds(absl::Now() - server->start_time_)}});
  return server;
}

Server::~Server() {
  http_ = nullptr;
  rpc_ = nullptr;
  if (follower_ != nullptr) follower_->Stop();
  // The threads of the checkpoints may wait for other members.
  if (group_ != nullptr) group_->Stop();
}

absl::Status Server::OpenTokens() {
  if (options_.auth_tokens.empty()) return absl::OkStatus();
  EMA_ASSIGN_OR_RETURN(tokens_, TokenFile::Open(options_.auth_tokens));
  tokens_->on_change = [log = Sink(), path = options_.auth_tokens](const absl::Status& status) {
    if (status.ok()) return LogTo(log, LogLevel::kInfo, "token file reloaded", {{"path", path}});
    LogTo(log, LogLevel::kError, "token file reload failed", {{"path", path}, {"error", status}});
  };
  return absl::OkStatus();
}

absl::Status Server::CreateFollower() {
  EMA_ASSIGN_OR_RETURN(const FollowedModel followed, ParseFollow(options_.follow));
  Follower::Options follower{.address = followed.address,
                             .model = followed.model,
                             .token_file = options_.follow_token_file,
                             .log = Sink()};
  if (options_.follow.starts_with("emas://")) {
    follower.tls = {options_.follow_ca, options_.tls_cert, options_.tls_key};
  }
  absl::StatusOr<std::unique_ptr<Follower>> created = Follower::Create(std::move(follower));
  if (!created.ok()) return WithPrefix(created.status(), "--follow: ");
  follower_ = *std::move(created);
  followed_ = {.url = options_.follow,
               .check_readable = [this] { return follower_->CheckReadable(); },
               .check_has_version = [this] { return follower_->CheckHasVersion(); }};
  return absl::OkStatus();
}

absl::Status Server::OpenCheckpoints() {
  incarnation_ = IncarnationWithoutStore(start_time_);
  if (options_.data_dir.empty()) return absl::OkStatus();
  auto checkpoints = CheckpointManager::Open(PosixFileSystem(), CheckpointOptions());
  if (!checkpoints.ok()) {
    return WithPrefix(checkpoints.status(), absl::StrCat("--data-dir ", options_.data_dir, ": "));
  }
  checkpoints_ = *std::move(checkpoints);
  incarnation_ = checkpoints_->incarnation();
  // The numbers are ahead if the last start was a moment ago. If the clock was set back, no wait.
  const absl::Duration ahead = absl::FromUnixMicros(incarnation_) - absl::Now();
  if (ahead <= absl::Microseconds(DataDirectory::kIncarnationsPerStart)) absl::SleepFor(ahead);
  return absl::OkStatus();
}

void Server::MakeStore(std::shared_ptr<Device> device) {
  if (options_.statistics_every_commits > 0) {
    statistics_ = std::make_unique<CommitStatistics>(
        options_.statistics_every_commits, [this](Model& model, const VersionId& id) {
          return group_ != nullptr ? group_->models()->ComputeStatistics(model, id, {}).status()
                                   : ComputeStatistics(model, id, {}).status();
        });
  }
  formula_ = FormulaOf(options_, *device);
  ModelStore::Options store;
  store.memory_bytes =
      options_.memory_bytes > 0 ? options_.memory_bytes : DefaultMemoryBytes(options_, *device);
  store.host_memory_bytes = formula_.host_budget_bytes;
  store.max_models = options_.max_models;
  store.max_sessions = options_.max_sessions;
  store.model.block_bytes = options_.block_bytes;
  store.model.incarnation = incarnation_;
  store.model.has_data_dir = checkpoints_ != nullptr;
  store.model.log = Sink();
  store.model.observer = &metrics_;
  store.model.on_commit = [checkpoints = checkpoints_.get(), statistics = statistics_.get()](
                              const std::shared_ptr<Model>& model, const Snapshot& snapshot) {
    LogCommit(*model, snapshot.record);
    if (!model->is_home()) return;
    if (checkpoints != nullptr) checkpoints->OnCommit(model, snapshot);
    if (statistics != nullptr) statistics->OnCommit(model, snapshot);
  };
  LogLimits(options_);
  LogMemoryFormula(options_, formula_, *device, store.memory_bytes);
  store_ = std::make_shared<ModelStore>(std::move(device), store);
}

absl::Status Server::StartRpc(const Hooks& hooks) {
  Checkpoints* checkpoints = &no_checkpoints_;
  if (checkpoints_ != nullptr) checkpoints = checkpoints_.get();
  EMA_ASSIGN_OR_RETURN(rpc_, RpcServer::Start(store_, checkpoints, RpcOptions(hooks)));
  // Other members call this server as soon as it has joined, so RPCs are served before.
  if (group_ != nullptr) {
    EMA_RETURN_IF_ERROR(group_->Join(port()));
    rpc_->SetServing(true);
  }
  if (follower_ != nullptr) follower_->Start(store_);
  {
    absl::MutexLock lock(&mu_);
    serving_ = rpc_.get();
  }
  if (options_.port_file.empty()) return absl::OkStatus();
  FlushLog();  // A process that waits for the port file then finds the log of the start.
  return WritePortFile(options_.port_file, port());
}

absl::Status Server::Drain() {
  rpc_->SetServing(false);
  // Only to let those who look at the health take notice: there is nothing that could end it.
  absl::SleepFor(options_.drain_delay);
  const SteadyTime deadline = After(SteadyNow(), options_.drain_grace);
  rpc_->StartDraining();
  const RpcUsage usage = rpc_->usage();
  const int64_t session_count = store_->sessions().used_count();
  if (usage.push_streams + usage.pull_streams + session_count > 0) {
    Log(LogLevel::kInfo, "waiting for running calls",
        {{"pulls", usage.pull_streams},
         {"pushes", usage.push_streams},
         {"steps", session_count},
         {"longest", options_.drain_grace}});
  }
  if (follower_ != nullptr) follower_->Stop();
  store_->Drain(deadline);
  // Before the save: a step that is committed later would be lost.
  if (group_ != nullptr) group_->models()->ReleaseHeldCalls();
  absl::Status result;
  if (checkpoints_ != nullptr) result = checkpoints_->Drain(*store_);
  if (group_ != nullptr) group_->SaveAtHomes();
  store_->Close();
  rpc_->Shutdown(deadline);
  if (group_ != nullptr) group_->Leave();
  // What broke the device says more than what came of it.
  const absl::Status device = store_->device().health();
  return device.ok() ? result : device;
}

}  // namespace ema
