// SPDX-License-Identifier: Apache-2.0
//
// What a server has as a member of a group.
#ifndef EMA_SERVER_SERVER_GROUP_H_
#define EMA_SERVER_SERVER_GROUP_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ema/group_info.h"
#include "server/base/log_event.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/partitioned_saves.h"
#include "server/core/model_store.h"
#include "server/group/copy_directory.h"
#include "server/group/group_models.h"
#include "server/group/group_saves.h"
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
                                                             LogSink log);
  // If Leave() was not called, the other servers see a crash: the member's key expires by its TTL.
  ~ServerGroup() { Stop(); }

  // Before the data directory is opened, which changes it: checks that it is that of the other
  // members. FAILED_PRECONDITION: it is not, or only one of the two sides has one. Waits for the
  // registry and the disk.
  absl::Status CheckDirectory();

  // How the checkpoint layer saves the group's models. Fails before Join().
  PartitionedSaves* saves() { return &saves_; }
  // Makes models(). `checkpoints` outlives this until Stop(). Null: there is no data directory.
  void Attach(std::shared_ptr<ModelStore> store, CheckpointStore* checkpoints);
  // For the RPC server. REQUIRES: Attach() was called, as for the following functions.
  GroupCalls* models() { return models_.get(); }
  // Joins the group; `port` replaces port 0 of --advertise. Blocks. Errors as Member::Join().
  // FAILED_PRECONDITION: the data directory is not that of the other members.
  absl::Status Join(int port);
  // What this server knows about the group, without asking others. Nullopt: it has not joined the
  // group, or has left it. Thread-safe.
  std::optional<GroupInfo> Describe() const ABSL_LOCKS_EXCLUDED(mu_);
  // Before it leaves: makes the homes of this server's partitions save their newest versions.
  // Errors are in the log. Blocks.
  void SaveAtHomes();
  // Leaves the group. Call once, when no RPC runs any more.
  void Leave() ABSL_LOCKS_EXCLUDED(mu_);
  // Ends all calls to other members, so that saves fail soon. Without Leave(), it is like a crash.
  void Stop();

 private:
  ServerGroup(const ServerOptions& options, LogSink log)
      : options_(options), log_(std::move(log)) {}
  // Checks the id of this server's data directory against the id in the registry, or records it
  // there if this is the group's first server. FAILED_PRECONDITION: the ids differ, or only one of
  // the two says that there is no data directory.
  absl::Status AgreeOnDirectory();
  // `id`: of this server's directory; empty: it has none yet.
  absl::Status CheckSameDirectory(const std::string& id, const std::string& id_of_others) const;
  std::string DirectoryKey() const;

  const ServerOptions options_;
  const LogSink log_;
  std::shared_ptr<ModelStore> store_;
  CheckpointStore* checkpoints_ = nullptr;
  group::GroupSaves saves_;
  std::unique_ptr<Registry> registry_;
  std::unique_ptr<group::Peers> peers_;
  std::unique_ptr<group::CopyDirectory> copies_;  // Null without --copy-dir.
  std::unique_ptr<group::GroupModels> models_;
  std::unique_ptr<group::Member> member_;  // Null before Join(), and after Leave().
  // Held while the group is described, so that Leave() does not destroy the member meanwhile.
  mutable absl::Mutex mu_;
};

}  // namespace ema

#endif  // EMA_SERVER_SERVER_GROUP_H_
