// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/rpc_server.h"

#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"
#include "server/core/model_store.h"
#include "server/rpc/authorization.h"
#include "server/rpc/convert_core.h"
#include "server/rpc/group_service.h"
#include "server/rpc/pull_call.h"
#include "server/rpc/push_call.h"
#include "server/rpc/unary_call.h"
#include "server/rpc/watch_call.h"

namespace ema {
namespace {

// Buffer for one read of a socket. Measured: with 1 MiB buffers, which stay in the cache between
// the kernel's copy and the fold, a push is a third faster than with gRPC's 64 KiB slices, of which
// it fills 4 MiB at once. Works only without the experiment that main.cc turns off.
constexpr int kReadBytes = 1 << 20;

constexpr absl::Duration kRetryDelay = absl::Milliseconds(50);
// Watches last long.
constexpr absl::Duration kWatchRetryDelay = absl::Seconds(1);

// How often the watchdog checks streams, and the other thread the user's files.
constexpr absl::Duration kWatchdogInterval = absl::Milliseconds(250);
constexpr absl::Duration kFilePollInterval = absl::Seconds(1);

// The service that health checks name for the store of checkpoints.
constexpr char kCheckpointsService[] = "checkpoints";

// Limits what clients may make gRPC do and hold.
void SetLimits(const RpcLimits& limits, grpc::ServerBuilder& builder) {
  // Bytes that are being received. When they are used up, gRPC cancels streams; the caps on pushes
  // keep them below that. (gRPC 1.51 narrows receive windows from a fifth of the quota on.)
  grpc::ResourceQuota quota("ema");
  quota.Resize(static_cast<size_t>(limits.max_push_streams * RpcServer::PushBytes(limits) +
                                   RpcServer::kRequestBytes));
  builder.SetResourceQuota(quota);
  const auto set = [&builder](const char* name, int64_t value) {
    builder.AddChannelArgument(name, static_cast<int>(value));
  };
  builder.SetMaxReceiveMessageSize(static_cast<int>(limits.max_message_bytes));
  builder.AddChannelArgument("grpc.so_reuseport", 0);
  set("grpc.server_handshake_timeout_ms", absl::ToInt64Milliseconds(limits.handshake_timeout));
  set(GRPC_ARG_KEEPALIVE_TIME_MS, absl::ToInt64Milliseconds(limits.keepalive_time));
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, absl::ToInt64Milliseconds(limits.keepalive_timeout));
  // Clients without calls do not read from their connections, so they would not answer pings: see
  // SetKeepalive().
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 30'000);
  set(GRPC_ARG_MAX_CONNECTION_IDLE_MS, absl::ToInt64Milliseconds(limits.max_connection_idle));
  // The limit on a message is that of its compressed bytes.
  builder.SetDefaultCompressionAlgorithm(GRPC_COMPRESS_NONE);
  for (const auto algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    builder.SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  set(GRPC_ARG_MAX_METADATA_SIZE, limits.max_metadata_bytes);
  set(GRPC_ARG_MAX_CONCURRENT_STREAMS, limits.max_streams_per_connection);
  builder.AddChannelArgument(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kReadBytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(std::shared_ptr<ModelStore> store,
                                                            Checkpoints* checkpoints,
                                                            const Options& options) {
  std::unique_ptr<RpcServer> server(new RpcServer(std::move(store), checkpoints, options));
  for (const std::string& address : options.listen_addresses) {
    EMA_ASSIGN_OR_RETURN(server->listeners_.emplace_back(), Listener::Bind(address));
  }
  if (options.same_host_lane) {
    EMA_ASSIGN_OR_RETURN(server->lanes_,
                         LaneServer::Start(&server->context_,
                                           {.max_lanes = options.limits.max_push_streams +
                                                         options.limits.max_pull_streams,
                                            .max_window_bytes = options.max_window_bytes},
                                           options.lane_socket));
    server->models_.OfferLane(server->lanes_->socket_name());
  }

  // No synchronous service, such as reflection: gRPC 1.51 would answer it, and unknown methods,
  // without a token and on threads of its own. Without one it answers unknown methods UNIMPLEMENTED
  // on our queues.
  grpc::ServerBuilder builder;
  SetLimits(options.limits, builder);
  builder.RegisterService(&server->context_.service);
  builder.RegisterService(&server->context_.health);
  if (options.group != nullptr) builder.RegisterService(&server->context_.group_service);
  std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials();
  if (!options.tls.empty()) {
    EMA_ASSIGN_OR_RETURN(server->certificate_, ServedCertificate::Open(options.tls, options.log));
    credentials = server->certificate_->credentials();
  }
  std::vector<std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor>> acceptors;
  for (const std::unique_ptr<Listener>& listener : server->listeners_) {
    acceptors.push_back(builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        listener->is_unix() ? grpc::InsecureServerCredentials() : credentials));
  }
  for (int i = 0; i < options.thread_count; ++i) {
    server->queues_.push_back(std::make_unique<CallQueue>(builder.AddCompletionQueue()));
    server->queues_.back()->SetHeartbeat(
        options.heartbeats->Add(absl::StrCat("rpc-", i), Heartbeats::NeededFor::kServing));
  }
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr) return absl::InternalError("gRPC did not start");

  server->StartThreads();
  // Health checks find all threads from the first moment on.
  server->options_.heartbeats->Poll(Heartbeats::Clock::now());
  // A server of a group serves once it has joined.
  server->SetServing(options.group == nullptr);
  for (size_t i = 0; i < acceptors.size(); ++i) {
    server->listeners_[i]->Start(std::move(acceptors[i]), options.limits, &server->connections_,
                                 options.observer, options.log);
  }
  return server;
}

void RpcServer::StartThreads() {
  for (const std::unique_ptr<CallQueue>& queue : queues_) {
    queue_threads_.emplace_back([this, queue = queue.get()] { ServeQueue(queue); });
  }
  using NeededFor = Heartbeats::NeededFor;
  for (const auto& [worker, needed_for] : {std::pair(&disk_calls_, NeededFor::kCheckpoints),
                                           std::pair(&saving_calls_, NeededFor::kCheckpoints),
                                           std::pair(&disk_reader_, NeededFor::kCheckpoints),
                                           std::pair(&device_reader_, NeededFor::kServing),
                                           std::pair(&creating_calls_, NeededFor::kServing),
                                           // These may run for minutes.
                                           std::pair(&restoring_calls_, NeededFor::kNeither),
                                           std::pair(&computing_calls_, NeededFor::kNeither)}) {
    worker->Start(options_.heartbeats->Add(worker->name(), needed_for));
  }
  if (context_.group != nullptr) {
    for (Worker* const worker : {&saving_parts_, &computing_parts_, &copying_parts_,
                                 &reading_copies_, &changing_calls_, &moving_calls_}) {
      worker->Start(options_.heartbeats->Add(worker->name(), NeededFor::kNeither));
    }
  }
  watchdog_ = std::thread([this] { CheckStalled(); });
  if (certificate_ != nullptr || options_.authenticator != nullptr) {
    file_watch_ =
        std::thread([this, heartbeat = options_.heartbeats->Add(
                               "file-watch", NeededFor::kNeither)] { WatchFiles(heartbeat); });
  }
}

RpcServer::RpcServer(std::shared_ptr<ModelStore> store, Checkpoints* checkpoints,
                     const Options& options)
    : options_(options),
      context_{
          .store = store,
          .admission = {options.authenticator, options.log, options.followed},
          .pushes = StreamSlots({.kind = "push",
                                 .method = "/ema.v1.EmaService/Push",
                                 .limit = options.limits.max_push_streams,
                                 .stall_timeout = options.limits.stream_timeout,
                                 .retry_delay = kRetryDelay}),
          .pulls = StreamSlots({.kind = "pull",
                                .method = "/ema.v1.EmaService/Pull",
                                .limit = options.limits.max_pull_streams,
                                .stall_timeout = options.limits.stream_timeout,
                                .retry_delay = kRetryDelay,
                                .min_bytes_per_second = options.limits.min_pull_bytes_per_second}),
          .watches = StreamSlots({.kind = "watch",
                                  .method = "/ema.v1.EmaService/Watch",
                                  .limit = options.limits.max_watch_streams,
                                  .stall_timeout = options.limits.stream_timeout,
                                  .retry_delay = kWatchRetryDelay}),
          .log = options.log,
          .checkpoints = checkpoints,
          .group = options.group,
          .observer = options.observer,
          .disk_reader = &disk_reader_,
          .device_reader = &device_reader_},
      models_(store, checkpoints, options.group, options.log),
      operator_(store, options.process,
                {.health = [this] { return health(); }, .limits = [this] { return Limits(); }}),
      connections_(options.limits.max_connections),
      disk_reader_("disk-reader", options.limits.max_pull_streams, kLongBytes),
      device_reader_("device-reader", options.limits.max_pull_streams, /*max_bytes=*/0) {}

RpcServer::~RpcServer() { Shutdown(SteadyNow()); }

absl::Status RpcServer::CheckWorkers(Heartbeats::NeededFor needed_for,
                                     absl::Duration timeout) const {
  for (const Heartbeats::Age& age : options_.heartbeats->Ages(Heartbeats::Clock::now())) {
    const absl::Duration silent_time = absl::FromChrono(age.silent_time);
    if (age.needed_for != needed_for || silent_time < timeout) continue;
    return absl::UnavailableError(absl::StrCat("worker \"", age.name,
                                               "\" has made no progress for ",
                                               absl::ToInt64Seconds(silent_time), " s"));
  }
  return absl::OkStatus();
}

absl::Status RpcServer::health() const {
  if (!is_serving_.load(std::memory_order_relaxed)) return DrainingError();
  if (options_.followed != nullptr) EMA_RETURN_IF_ERROR(options_.followed->check_has_version());
  EMA_RETURN_IF_ERROR(context_.store->device().health());
  return CheckWorkers(Heartbeats::NeededFor::kServing, options_.worker_timeout);
}

absl::Status RpcServer::checkpoints_health() const {
  const absl::Status store = context_.checkpoints->health();
  if (GetErrorReason(store) == ErrorReason::kNoDataDir) {
    return MakeError(absl::StatusCode::kNotFound, ErrorReason::kNoDataDir,
                     std::string(store.message()));
  }
  EMA_RETURN_IF_ERROR(health());
  EMA_RETURN_IF_ERROR(store);
  return CheckWorkers(Heartbeats::NeededFor::kCheckpoints, options_.disk_timeout);
}

RpcUsage RpcServer::usage() const {
  return {.push_streams = context_.pushes.open_count(),
          .pull_streams = context_.pulls.open_count(),
          .watch_streams = context_.watches.open_count(),
          .connections = connections_.count()};
}

std::optional<ServedCertificate::State> RpcServer::certificate() const {
  if (certificate_ == nullptr) return std::nullopt;
  return certificate_->state();
}

std::vector<OperatorService::Limit> RpcServer::Limits() const {
  const RpcUsage used = usage();
  const RpcLimits& limits = options_.limits;
  const ModelStore& store = *context_.store;
  return {{"push_streams", used.push_streams, limits.max_push_streams},
          {"pull_streams", used.pull_streams, limits.max_pull_streams},
          {"watch_streams", used.watch_streams, limits.max_watch_streams},
          {"sessions", store.sessions().used_count(), store.sessions().limit()},
          {"connections", used.connections, limits.max_connections},
          {"models", static_cast<int64_t>(store.List().size()), store.max_models()}};
}

std::string RpcServer::addresses() const {
  std::vector<std::string> bound = options_.listen_addresses;
  for (size_t i = 0; i < bound.size(); ++i) {
    if (listeners_[i]->is_unix()) continue;
    bound[i] = absl::StrCat(bound[i].substr(0, bound[i].rfind(':')), ":", listeners_[i]->port());
  }
  return absl::StrJoin(bound, ",");
}

absl::StatusOr<grpc::health::v1::HealthCheckResponse> RpcServer::CheckHealth(
    const grpc::health::v1::HealthCheckRequest& request) const {
  using Response = grpc::health::v1::HealthCheckResponse;
  const std::string& service = request.service();
  absl::Status status;
  if (service == kCheckpointsService) {
    status = checkpoints_health();
    if (GetErrorReason(status) == ErrorReason::kNoDataDir) return status;
  } else if (service.empty() || service == v1::EmaService::service_full_name()) {
    status = health();
  } else {
    return MakeError(
        absl::StatusCode::kNotFound, ErrorReason::kBadRequest,
        absl::StrCat("service: ", Quoted(service), " given, expected \"\", \"",
                     v1::EmaService::service_full_name(), "\" or \"", kCheckpointsService, "\""));
  }
  Response response;
  response.set_status(status.ok() ? Response::SERVING : Response::NOT_SERVING);
  return response;
}

void RpcServer::Shutdown(SteadyTime deadline) {
  {
    absl::MutexLock lock(&mu_);
    if (is_shut_down_) return;
    is_shut_down_ = true;
  }
  for (const std::unique_ptr<Listener>& listener : listeners_) {
    if (listener != nullptr) listener->Stop();
  }
  if (context_.group != nullptr) context_.group->ReleaseHeldCalls();
  if (server_ != nullptr) {
    // Not by gRPC's own grace period, which also waits 20 s for idle clients that poll nothing.
    context_.admission.AwaitNoCalls(deadline);
    server_->Shutdown(std::chrono::system_clock::now());
  }
  if (lanes_ != nullptr) lanes_->Stop();
  // Cancelled calls end by themselves, on the queues' threads.
  constexpr absl::Duration kCancelGrace = absl::Seconds(5);
  context_.live_calls.AwaitNone(After(SteadyNow(), kCancelGrace));
  {
    // Not before: calls that run until the deadline need these threads.
    absl::MutexLock lock(&mu_);
    is_stopping_ = true;
    stop_wait_.WakeAll();
  }
  // No operation may be started on a queue that has been shut down: first the other threads end,
  // then each queue's own thread shuts it down.
  for (std::thread* const thread : {&watchdog_, &file_watch_}) {
    if (thread->joinable()) thread->join();
  }
  for (Worker* const worker :
       {&disk_calls_, &saving_calls_, &creating_calls_, &restoring_calls_, &computing_calls_,
        &saving_parts_, &computing_parts_, &copying_parts_, &reading_copies_, &changing_calls_,
        &moving_calls_, &disk_reader_, &device_reader_}) {
    worker->Stop();
  }
  // The workers may have begun to answer calls.
  context_.live_calls.AwaitNone(After(SteadyNow(), kCancelGrace));
  for (const std::unique_ptr<CallQueue>& queue : queues_) queue->Stop();
  for (std::thread& thread : queue_threads_) thread.join();
}

void RpcServer::ServeQueue(CallQueue* queue) {
  PushCall::Listen(&context_, queue->get());
  PullCall::Listen(&context_, queue);
  WatchCall::Listen(&context_, queue->get());
  models_.Listen(&context_, queue->get(),
                 {.creating = &creating_calls_,
                  .disk = &disk_calls_,
                  .saving = &saving_calls_,
                  .changing = &changing_calls_,
                  .moving = &moving_calls_,
                  .restoring = &restoring_calls_,
                  .computing = &computing_calls_});
  operator_.Listen(&context_, queue->get());
  if (context_.group != nullptr) {
    ListenToGroup(&context_, queue->get(),
                  {.reserving = &creating_calls_,
                   .saving_parts = &saving_parts_,
                   .computing_parts = &computing_parts_,
                   .reading_copies = &reading_copies_,
                   .copying_parts = &copying_parts_,
                   .saving = &saving_calls_});
  }
  using Health = grpc::health::v1::Health::AsyncService;
  ListenUnary(&context_, queue->get(), &context_.health, kHealthCheck, &Health::RequestCheck,
              [this](const auto& request, const Access&) { return CheckHealth(request); });
  queue->Run();
}

bool RpcServer::MustStopWithin(absl::Duration interval) {
  absl::MutexLock lock(&mu_);
  return stop_wait_.AwaitUntil(mu_, After(SteadyNow(), interval),
                               [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return is_stopping_; });
}

void RpcServer::CheckStalled() {
  while (!MustStopWithin(kWatchdogInterval)) {
    const auto now = SteadyNow();
    options_.heartbeats->Poll(now);
    for (const std::unique_ptr<CallQueue>& queue : queues_) queue->Ping();
    context_.store->ExpireSessions(now, absl::ToChronoNanoseconds(options_.limits.session_timeout));
    context_.pushes.EndStalled(now);
    context_.pulls.EndStalled(now);
    EndSlowPinningPulls();
  }
}

void RpcServer::EndSlowPinningPulls() {
  for (const std::shared_ptr<Model>& model : context_.store->List()) {
    const std::string& name = model->config().name;
    for (const VersionId& id : model->history().TakeVersionsBlockingReaders()) {
      const int64_t count = context_.pulls.EndSlowPulls(name, id);
      if (count == 0) continue;
      LogTo(options_.log, LogLevel::kWarning, "slow pull ended",
            {{"model", name},
             {"version", id.version},
             {"count", count},
             {"min_bytes_per_second", options_.limits.min_pull_bytes_per_second},
             {"hint",
              "another reader needed a pin; --min-pull-bytes-per-second is the minimum speed of a "
              "pull, and the model's max_pinned_versions the number of pins"}});
      break;  // One pin is enough.
    }
  }
}

void RpcServer::WatchFiles(Heartbeat* heartbeat) {
  while (!MustStopWithin(kFilePollInterval)) {
    const Heartbeat::Work at_work(heartbeat);
    if (certificate_ != nullptr) certificate_->Refresh();
    if (options_.authenticator == nullptr) continue;
    options_.authenticator->Refresh();
    // Even if no token has changed now: a stream may have begun while one was changing.
    for (StreamSlots* const slots : {&context_.pushes, &context_.pulls, &context_.watches}) {
      slots->EndRevoked(*options_.authenticator);
    }
  }
}

}  // namespace ema
