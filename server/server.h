// SPDX-License-Identifier: Apache-2.0
//
// Wires device, models, checkpoints and RPCs together.
#ifndef EMA_SERVER_SERVER_H_
#define EMA_SERVER_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/heartbeat.h"
#include "server/base/log_event.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "server/core/commit_statistics.h"
#include "server/core/model_store.h"
#include "server/core/no_checkpoints.h"
#include "server/memory_formula.h"
#include "server/ops/http_server.h"
#include "server/ops/metrics.h"
#include "server/ops/options.h"
#include "server/ops/server_state.h"
#include "server/ops/token_file.h"
#include "server/rpc/rpc_server.h"

namespace ema {

// One EMA server: Start, serve, Drain. Files: server.cc, and server_status.cc for what HTTP shows.
class Server {
 public:
  // What the process has to do. Both may be empty, and may be called from any thread.
  struct Hooks {
    // Before the first client can get in: until then there is nothing that only this process has.
    std::function<void()> on_recovered;
    // A client has asked for Drain(), which is not to be called here, but soon. False: somebody has
    // asked before.
    std::function<bool()> on_drain_asked;
  };

  // Loads the newest checkpoints and serves; HTTP comes first, and says that it is not ready. The
  // message of an error says what to do. `device`: whatever `options` say; null: what they say.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       const Hooks& hooks = {},
                                                       std::shared_ptr<Device> device = nullptr);

  int port() const { return rpc_->port(); }

  // Health turns NOT_SERVING at once; for the drain delay everything goes on; then what is new is
  // refused, and sessions that are open may commit, for at most the drain grace; then every model's
  // newest version is saved (if there is a data directory) and running pulls get what is left of
  // the grace. Blocks. What has broken the device, or else the first error of a save, which the
  // process should exit with; all else is done all the same.
  absl::Status Drain();

 private:
  explicit Server(const ServerOptions& options) : options_(options) {}

  // The log, whose errors the status page shows, too.
  LogSink Sink();
  CheckpointManager::Options CheckpointOptions();
  RpcServer::Options RpcOptions(const Hooks& hooks);
  // The parts of Start(), in its order.
  absl::Status OpenTokens();
  absl::Status OpenCheckpoints();
  void MakeStore(std::shared_ptr<Device> device);
  absl::Status StartHttp();
  absl::Status StartRpc(const Hooks& hooks);
  // OK: it serves. UNAVAILABLE: it recovers, or as RpcServer::health().
  absl::Status Health() const ABSL_LOCKS_EXCLUDED(mu_);
  ServerState State(bool with_history) const ABSL_LOCKS_EXCLUDED(mu_);

  const ServerOptions options_;
  const absl::Time start_time_ = absl::Now();
  Metrics metrics_;
  const std::shared_ptr<Heartbeats> heartbeats_ = std::make_shared<Heartbeats>();
  MemoryFormula formula_;  // Constant once HTTP has started, as store_ and checkpoints_.
  int64_t incarnation_ = 0;
  NoCheckpoints no_checkpoints_;
  std::unique_ptr<TokenFile> tokens_;  // Null: callers need none.
  std::shared_ptr<ModelStore> store_;
  std::unique_ptr<CheckpointManager> checkpoints_;  // Null without a data directory.
  std::unique_ptr<CommitStatistics> statistics_;    // Null if they are only asked for.
  std::unique_ptr<RpcServer> rpc_;  // Behind the others, so that it goes first: its calls use them.
  mutable absl::Mutex mu_;
  // rpc_, from the moment when it serves.
  RpcServer* serving_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::unique_ptr<HttpServer> http_;  // Uses all of the above. Null: there is none.
};

}  // namespace ema

#endif  // EMA_SERVER_SERVER_H_
