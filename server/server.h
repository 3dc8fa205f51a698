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
#include "server/core/checkpoints.h"
#include "server/core/commit_statistics.h"
#include "server/core/model_store.h"
#include "server/follow/follower.h"
#include "server/memory_formula.h"
#include "server/ops/http_server.h"
#include "server/ops/metrics.h"
#include "server/ops/options.h"
#include "server/ops/server_state.h"
#include "server/ops/token_file.h"
#include "server/rpc/admission.h"
#include "server/rpc/rpc_server.h"
#include "server/server_group.h"

namespace ema {

// One EMA server: Start(), serve, Drain(). Files: server.cc, and server_status.cc for the HTTP
// pages.
class Server {
 public:
  // Callbacks to the process, from any thread. Both may be empty.
  struct Hooks {
    // The checkpoints are loaded, and no RPC is served yet: from now on the process may hold state
    // that is not on the disk.
    std::function<void()> on_recovered;
    // A client has requested a drain: the process is to call Drain() soon, but not inside this
    // callback. Returns false if a drain was requested before.
    std::function<bool()> on_drain_requested;
  };

  // Loads the newest checkpoints, serves, and joins its group. HTTP starts first, and reports
  // "recovering" until all of this is done. An error's message says what to do. `device` is used
  // instead of options.device; null: options.device decides.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       const Hooks& hooks = {},
                                                       std::shared_ptr<Device> device = nullptr);

  ~Server();

  int port() const { return rpc_->port(); }

  // Health turns NOT_SERVING at once, but all calls are served for the drain delay. Then new work
  // is rejected, and open sessions may commit, within the drain grace. Then every model's newest
  // version is saved (if there is a data directory), and running pulls get the rest of the grace.
  // Blocks. Returns the error that broke the device, else the first error of a save, for the
  // process to exit with; no error stops the drain.
  absl::Status Drain();

 private:
  explicit Server(const ServerOptions& options) : options_(options) {}

  // Writes to the log, and shows errors on the status page.
  LogSink Sink();
  CheckpointManager::Options CheckpointOptions();
  RpcServer::Options RpcOptions(const Hooks& hooks);
  // The parts of Start(), in its order.
  absl::Status OpenTokens();
  // REQUIRES: --follow is given.
  absl::Status CreateFollower();
  absl::Status OpenCheckpoints();
  void MakeStore(std::shared_ptr<Device> device);
  absl::Status StartHttp();
  absl::Status StartRpc(const Hooks& hooks);
  // UNAVAILABLE while checkpoints are loaded, else RpcServer::health().
  absl::Status Health() const ABSL_LOCKS_EXCLUDED(mu_);
  ServerState State(bool with_history) const ABSL_LOCKS_EXCLUDED(mu_);

  const ServerOptions options_;
  const absl::Time start_time_ = absl::Now();
  Metrics metrics_;
  const std::shared_ptr<Heartbeats> heartbeats_ = std::make_shared<Heartbeats>();
  MemoryFormula formula_;  // Constant once HTTP has started, like store_ and checkpoints_.
  int64_t incarnation_ = 0;
  Checkpoints no_checkpoints_;
  std::unique_ptr<TokenFile> tokens_;  // Null: calls need no token.
  std::shared_ptr<ModelStore> store_;
  std::unique_ptr<ServerGroup> group_;              // Null: the server is in no group.
  std::unique_ptr<CheckpointManager> checkpoints_;  // Null without a data directory.
  std::unique_ptr<CommitStatistics> statistics_;    // Null: computed only on request.
  std::unique_ptr<Follower> follower_;              // Null: the server follows no other one.
  FollowedServer followed_;                         // Of `follower_`.
  std::unique_ptr<RpcServer> rpc_;  // Destroyed before the above, which its calls use.
  mutable absl::Mutex mu_;
  // Equals rpc_ once it serves; null before.
  RpcServer* serving_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::unique_ptr<HttpServer> http_;  // Uses all of the above. Null: no HTTP.
};

}  // namespace ema

#endif  // EMA_SERVER_SERVER_H_
