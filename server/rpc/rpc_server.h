// SPDX-License-Identifier: Apache-2.0
//
// The gRPC server: its settings, threads, start and stop.
#ifndef EMA_SERVER_RPC_RPC_SERVER_H_
#define EMA_SERVER_RPC_RPC_SERVER_H_

#include <grpcpp/server.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpc/health/v1/health.pb.h"
#include "server/base/heartbeat.h"
#include "server/base/observer.h"
#include "server/base/rpc_limits.h"
#include "server/base/steady_wait.h"
#include "server/core/model_store.h"
#include "server/rpc/call_queue.h"
#include "server/rpc/lane_server.h"
#include "server/rpc/listener.h"
#include "server/rpc/model_service.h"
#include "server/rpc/open_connections.h"
#include "server/rpc/operator_service.h"
#include "server/rpc/rpc_context.h"
#include "server/rpc/served_certificate.h"
#include "server/rpc/tls.h"
#include "server/rpc/worker.h"

namespace ema {

// Owns a listener for each address, the completion queues with one thread each, the server's ends
// of same-host lanes with one thread each, the workers (see the last members), a thread that ends
// stalled streams, and one that reloads certificate and tokens if there are any.
class RpcServer {
 public:
  struct Options {
    // As Listener::Bind() takes them.
    std::vector<std::string> listen_addresses = {"127.0.0.1:50051"};
    // For all addresses except unix sockets.
    TlsFiles tls;
    RpcLimits limits;
    // Completion queues. One is fastest where trainer and server share two cores.
    int thread_count = 1;
    // Clients of this host and user may push and pull through shared memory.
    bool same_host_lane = true;
    std::string lane_socket;  // --lane-socket; may be empty.
    // Limit of the windows (SharedMemory::CreateWindow()) of all these clients together.
    int64_t max_window_bytes = int64_t{1} << 30;
    // Outlives the server. Null: every caller may do everything.
    Authenticator* authenticator = nullptr;
    // A thread without progress for this time counts as stuck: `worker_timeout` for threads that
    // calls need, `disk_timeout` for threads that wait for the disk, where a sync of a large file
    // takes long.
    absl::Duration worker_timeout = absl::Seconds(30);
    absl::Duration disk_timeout = absl::Minutes(5);
    std::shared_ptr<Heartbeats> heartbeats = std::make_shared<Heartbeats>();
    ServerObserver* observer = &ServerObserver::None();  // Outlives the server.
    GroupCalls* group = nullptr;  // Outlives the server. Null: the server is not in a group.
    // Outlives the server. Null: the server follows no other one.
    const FollowedServer* followed = nullptr;
    ServingProcess process;
    LogSink log;
  };

  // Bytes that one stalled stream can hold because of gRPC's window probing (measured, 1.51.1).
  static constexpr int64_t kMaxWindowBytes = int64_t{27} << 20;
  // Memory for messages that are being received, other than pushes: unary calls, and the requests
  // of pulls and watches, arrive before their callers are known.
  static constexpr int64_t kRequestBytes = int64_t{512} << 20;
  // Unary calls that may wait for each of their workers.
  static constexpr int64_t kMaxWaitingCalls = 64;
  // Memory of the requests that wait for all workers together.
  static constexpr int64_t kWaitingBytes = int64_t{269} << 20;

  // Bytes that gRPC may hold for one push stream: its window, or a message that has arrived in
  // part.
  static int64_t PushBytes(const RpcLimits& limits) {
    return std::max(kMaxWindowBytes, 2 * limits.max_message_bytes);
  }

  // Serves when it returns. `checkpoints` outlives the server. Errors as Listener::Bind() and
  // ServedCertificate::Open(), or INTERNAL: gRPC did not start.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(std::shared_ptr<ModelStore> store,
                                                          Checkpoints* checkpoints,
                                                          const Options& options);
  ~RpcServer();  // Shutdown(now) if it has not been called.

  // The port of the first listen address.
  int port() const { return listeners_.front()->port(); }
  // Options::listen_addresses with the bound ports, separated by commas.
  std::string addresses() const;

  // False: health() reports an error from now on. True after Start(), unless the server is in a
  // group: then the caller sets it when the server has joined.
  void SetServing(bool serving) { is_serving_.store(serving, std::memory_order_relaxed); }
  // From now on calls that start work are rejected: see IsRejectedWhileDraining().
  void StartDraining() { context_.admission.StartDraining(); }
  // The answer to health checks: OK, or why the server does not serve: it is draining, or has not
  // joined its group yet (UNAVAILABLE, DRAINING, in both cases); it is a replica without a version;
  // its device is broken; or a thread is stuck. Never blocks.
  absl::Status health() const;
  // The same for checkpoints: the error of health(), of the checkpoint store, or a stuck disk
  // thread. NOT_FOUND, NO_DATA_DIR: there are none.
  absl::Status checkpoints_health() const;

  RpcUsage usage() const;
  // nullopt: the server does not use TLS.
  std::optional<ServedCertificate::State> certificate() const;

  // Stops accepting, cancels calls that still run at `deadline`, and joins all threads. Blocks.
  void Shutdown(SteadyTime deadline);

 private:
  RpcServer(std::shared_ptr<ModelStore> store, Checkpoints* checkpoints, const Options& options);

  // Starts all threads except those of listeners and lanes. REQUIRES: gRPC's server runs.
  void StartThreads();
  absl::StatusOr<grpc::health::v1::HealthCheckResponse> CheckHealth(
      const grpc::health::v1::HealthCheckRequest& request) const;
  // UNAVAILABLE: a thread that is needed for it is stuck.
  absl::Status CheckWorkers(Heartbeats::NeededFor needed_for, absl::Duration timeout) const;
  std::vector<OperatorService::Limit> Limits() const;
  void ServeQueue(CallQueue* queue);
  // Waits for `interval`, or until the calling thread has to end: then true.
  bool MustStopWithin(absl::Duration interval) ABSL_LOCKS_EXCLUDED(mu_);
  // The loops of the two threads besides queues and workers.
  void CheckStalled();
  void WatchFiles(Heartbeat* heartbeat);
  // Ends slow pulls of models that have refused a reader for lack of a pin.
  void EndSlowPinningPulls();

  const Options options_;
  RpcContext context_;
  ModelService models_;
  OperatorService operator_;
  std::atomic<bool> is_serving_ = false;  // Relaxed: a probe may see it late.
  OpenConnections connections_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::unique_ptr<LaneServer> lanes_;  // Null: no lanes.
  std::vector<std::unique_ptr<CallQueue>> queues_;
  std::unique_ptr<ServedCertificate> certificate_;  // Null: no TLS.
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::thread> queue_threads_;  // One for each of queues_.
  std::thread watchdog_;
  std::thread file_watch_;  // Separate from the watchdog: reading files may take long.

  absl::Mutex mu_;
  bool is_shut_down_ ABSL_GUARDED_BY(mu_) = false;
  bool is_stopping_ ABSL_GUARDED_BY(mu_) = false;  // Both threads above end.
  SteadyWait stop_wait_;                           // Woken when `is_stopping_` changes.

  // Last: calls that wait there refer to the members above. Requests that create or change a model
  // may have a manifest, those that restore a model may have the layout of a rank, and pulls may
  // have a long list of tensors. All others are short.
  static constexpr int64_t kShortBytes = int64_t{4} << 20;
  static constexpr int64_t kLongBytes = int64_t{64} << 20;
  static_assert(13 * kShortBytes / 4 + 4 * kLongBytes == kWaitingBytes);
  Worker disk_calls_{"disk-calls", kMaxWaitingCalls, kShortBytes};
  Worker saving_calls_{"saving-calls", kMaxWaitingCalls, kShortBytes};
  Worker computing_calls_{"computing-calls", kMaxWaitingCalls, kShortBytes / 2};
  // Started in a group only.
  Worker saving_parts_{"saving-parts", kMaxWaitingCalls, kShortBytes / 8};
  Worker computing_parts_{"computing-parts", kMaxWaitingCalls, kShortBytes / 8};
  Worker copying_parts_{"copying-parts", kMaxWaitingCalls, kShortBytes / 8};
  Worker reading_copies_{"reading-copies", kMaxWaitingCalls, kShortBytes / 8};
  Worker moving_calls_{"moving-calls", kMaxWaitingCalls, kShortBytes / 4};
  // Always started.
  Worker creating_calls_{"creating-calls", kMaxWaitingCalls, kLongBytes};
  Worker restoring_calls_{"restoring-calls", kMaxWaitingCalls, kLongBytes};
  // Started in a group only.
  Worker changing_calls_{"changing-calls", kMaxWaitingCalls, kLongBytes};
  // A pull has at most one function queued or running in each of these.
  Worker disk_reader_;
  Worker device_reader_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_RPC_SERVER_H_
