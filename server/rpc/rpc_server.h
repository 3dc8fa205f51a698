// SPDX-License-Identifier: Apache-2.0
//
// The gRPC server: its settings, threads and life.
#ifndef EMA_SERVER_RPC_RPC_SERVER_H_
#define EMA_SERVER_RPC_RPC_SERVER_H_

#include <grpcpp/server.h>

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
// of same-host lanes with one thread each, and one thread each for: calls that look at what is on
// the disk, calls that save (one after another, over all models), calls that restore versions,
// calls that compute over whole versions, what pulls read from the disk, what pulls read from an
// accelerator, ending what has stalled, and looking at the user's files (certificate and tokens),
// if there are any.
class RpcServer {
 public:
  struct Options {
    // As Listener::Bind() takes them.
    std::vector<std::string> listen_addresses = {"127.0.0.1:50051"};
    // Of all addresses but unix sockets.
    TlsFiles tls;
    RpcLimits limits;
    // Completion queues. One is fastest where trainer and server share two cores.
    int thread_count = 1;
    // Clients of this host and user may push and pull through shared memory.
    bool same_host_lane = true;
    // Who may call what; outlives the server. Null: everybody everything.
    Authenticator* authenticator = nullptr;
    // A worker that has been silent for so long is taken for stuck: one that calls need; and one
    // that waits for the disk, where a sync of a large file takes its time.
    absl::Duration worker_timeout = absl::Seconds(30);
    absl::Duration disk_timeout = absl::Minutes(5);
    std::shared_ptr<Heartbeats> heartbeats = std::make_shared<Heartbeats>();
    ServerObserver* observer = &ServerObserver::None();  // Outlives the server.
    ServingProcess process;
    LogSink log;
  };

  // What gRPC's window probing lets one stalled stream hold (measured, 1.51.1).
  static constexpr int64_t kMaxWindowBytes = int64_t{27} << 20;
  // Beside RpcLimits::max_arriving_requests: of health checks, which need no token.
  static constexpr int64_t kMaxArrivingProbes = 8;
  // Calls that may wait for each of the threads that run calls.
  static constexpr int64_t kMaxWaitingCalls = 64;
  // Bytes of those that are long, all together; or what the longest message has.
  static constexpr int64_t kMaxWaitingBytes = int64_t{64} << 20;

  // Serves when it returns. `checkpoints` outlives the server. Errors as Listener::Bind() and
  // ServedCertificate::Open(), or INTERNAL: gRPC did not start.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(std::shared_ptr<ModelStore> store,
                                                          Checkpoints* checkpoints,
                                                          const Options& options);
  ~RpcServer();  // Shutdown(now) if it has not been called.

  // Of the first listen address.
  int port() const { return listeners_.front()->port(); }
  // As Options::listen_addresses, with the ports that are bound, separated by commas.
  std::string addresses() const;

  // False: health() is not OK. True from Start() on.
  void SetServing(bool serving) { serving_.store(serving, std::memory_order_relaxed); }
  // From here on calls that begin something are refused, UNAVAILABLE, DRAINING: see BeginsWork().
  void RefuseWork() { context_.refuses_work.store(true, std::memory_order_relaxed); }
  // What health checks answer: OK, or why the server does not serve: it drains, its device is
  // broken, or a thread is stuck. Never blocks.
  absl::Status health() const;
  // The same of checkpoints: what of health() stands against them, too, and the store's own.
  // NOT_FOUND, NO_DATA_DIR: there are none.
  absl::Status checkpoints_health() const;

  RpcUsage usage() const;
  // Absent: the server does not speak TLS.
  std::optional<ServedCertificate::State> certificate() const;

  // Stops accepting, ends what is running at `deadline`, joins all threads. Blocks.
  void Shutdown(SteadyTime deadline);

 private:
  RpcServer(std::shared_ptr<ModelStore> store, Checkpoints* checkpoints, const Options& options);

  // All but the listeners' and the lanes'. REQUIRES: gRPC's server runs.
  void StartThreads();
  absl::StatusOr<grpc::health::v1::HealthCheckResponse> CheckHealth(
      const grpc::health::v1::HealthCheckRequest& request) const;
  // UNAVAILABLE: a worker that this needs is stuck.
  absl::Status CheckWorkers(Heartbeats::Need need, absl::Duration timeout) const;
  std::vector<OperatorService::Limit> Limits() const;
  void ServeQueue(CallQueue* queue);
  // False after `interval`; true, perhaps sooner: the thread that calls it is to end.
  bool MustStopWithin(absl::Duration interval) ABSL_LOCKS_EXCLUDED(mu_);
  // What threads of their own do until then.
  void CheckStalled();
  // Ends slow pulls of models that have refused a reader for lack of a pin.
  void EndPullsThatHoldPins();
  void WatchFiles(Heartbeat* heartbeat);

  const Options options_;
  RpcContext context_;
  ModelService models_;
  OperatorService operator_;
  std::atomic<bool> serving_ = false;  // Relaxed: a probe may see it late.
  OpenConnections connections_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::unique_ptr<LaneServer> lanes_;  // Null: there are none.
  std::vector<std::unique_ptr<CallQueue>> queues_;
  std::unique_ptr<ServedCertificate> certificate_;  // Null: no TLS.
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::thread> queue_threads_;  // As queues_.
  std::thread watchdog_;
  std::thread file_watch_;  // Not the watchdog: reading files may take long.

  absl::Mutex mu_;
  bool is_shut_down_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;  // Both end.
  SteadyWait stop_wait_;                        // Woken when `stopping_` changes.

  // Calls that wait there refer to what is above.
  Worker quick_calls_{"quick-calls", kMaxWaitingCalls};
  Worker saving_calls_{"saving-calls", kMaxWaitingCalls};
  Worker restoring_calls_{"restoring-calls", kMaxWaitingCalls};
  Worker computing_calls_{"computing-calls", kMaxWaitingCalls};
  // A pull has at most one function in either.
  Worker disk_reader_;
  Worker device_reader_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_RPC_SERVER_H_
