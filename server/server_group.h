// SPDX-License-Identifier: Apache-2.0
//
// What a server has as a member of a group.
#ifndef EMA_SERVER_SERVER_GROUP_H_
#define EMA_SERVER_SERVER_GROUP_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/log_event.h"
#include "server/core/model_store.h"
#include "server/group/group_models.h"
#include "server/group/member.h"
#include "server/group/peers.h"
#include "server/ops/options.h"
#include "server/registry/registry.h"

namespace ema {

// Owns the connection to the registry, the calls to other members, and the models of the group.
class ServerGroup {
 public:
  // REQUIRES: the options name a group. INVALID_ARGUMENT: an option cannot be used.
  static absl::StatusOr<std::unique_ptr<ServerGroup>> Create(const ServerOptions& options,
                                                             std::shared_ptr<ModelStore> store,
                                                             LogSink log);
  // Without Leave() before, the other servers see a crash: the member's key expires after its TTL.
  ~ServerGroup();

  // For the RPC server.
  ModelGroup* models() { return models_.get(); }
  // Joins the group; `port` replaces port 0 of --advertise. Blocks. Errors as Member::Join().
  absl::Status Join(int port);
  // Leaves the group. Call once, when no RPC runs any more.
  void Leave();

 private:
  ServerGroup(const ServerOptions& options, std::shared_ptr<ModelStore> store, LogSink log);
  void Stop();

  const ServerOptions options_;
  const std::shared_ptr<ModelStore> store_;
  const LogSink log_;
  std::unique_ptr<Registry> registry_;
  std::unique_ptr<group::Peers> peers_;
  std::unique_ptr<group::GroupModels> models_;
  std::unique_ptr<group::Member> member_;  // Null before Join(), and after Leave().
};

}  // namespace ema

#endif  // EMA_SERVER_SERVER_GROUP_H_
