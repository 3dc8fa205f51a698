// SPDX-License-Identifier: Apache-2.0
//
// Wires device, models, checkpoints and RPCs together.
#ifndef EMA_SERVER_SERVER_H_
#define EMA_SERVER_SERVER_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "server/core/commit_statistics.h"
#include "server/core/model_store.h"
#include "server/core/no_checkpoints.h"
#include "server/ops/options.h"
#include "server/ops/token_file.h"
#include "server/rpc/rpc_server.h"

namespace ema {

// One EMA server: Start, serve, Drain.
class Server {
 public:
  // Freed buffers that main() lets the heap keep.
  static constexpr int64_t kKeptHeapBytes = int64_t{256} << 20;

  // Loads the newest checkpoints and serves. The message of an error says what to do.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options);
  // On this device, whatever `options` say.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       std::shared_ptr<Device> device);

  int port() const { return rpc_->port(); }

  // Health turns NOT_SERVING; sessions that are open may commit, for at most the drain grace; then
  // every model's newest version is saved (if there is a data directory) and running pulls get what
  // is left of the grace. Blocks. What has broken the device, or else the first error of a save,
  // which the process should exit with; all else is done all the same.
  absl::Status Drain();

 private:
  explicit Server(const ServerOptions& options) : options_(options) {}

  const ServerOptions options_;
  NoCheckpoints no_checkpoints_;
  std::unique_ptr<TokenFile> tokens_;  // Null: callers need none.
  std::shared_ptr<ModelStore> store_;
  std::unique_ptr<CheckpointManager> checkpoints_;  // Null without a data directory.
  std::unique_ptr<CommitStatistics> statistics_;    // Null if they are only asked for.
  std::unique_ptr<RpcServer> rpc_;  // Last, so that it goes first: its calls use the others.
};

}  // namespace ema

#endif  // EMA_SERVER_SERVER_H_
