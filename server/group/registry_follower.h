// SPDX-License-Identifier: Apache-2.0
//
// Makes this server's partitions follow the group's registry.
#ifndef EMA_SERVER_GROUP_REGISTRY_FOLLOWER_H_
#define EMA_SERVER_GROUP_REGISTRY_FOLLOWER_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/base/log_event.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/core/model_store.h"
#include "server/format/manifest_json.h"
#include "server/group/group_history.h"
#include "server/group/hosted_models.h"
#include "server/group/hosted_partition.h"
#include "server/group/member.h"
#include "server/group/model_record.h"
#include "server/group/part_copies.h"
#include "server/group/retried_work.h"

namespace ema::group {

// Keeps the table of hosted partitions equal to the records: a partition lives as long as its
// model's record names this process for it. A partition whose incarnation has ended is dropped. If
// the next one begins with a checkpoint or a copy, a new partition is made, and loads its tensors.
// If a record names an earlier process of this member, the next incarnation is begun. Removes
// copies that no record needs.
//
// Thread-safe. Works on two threads of its own, as loading takes long.
class RegistryFollower {
 public:
  // All outlive this. `checkpoints` null: there is no data directory.
  RegistryFollower(HostedModels* hosted, ModelStore* store, CheckpointStore* checkpoints,
                   PartCopies* copies, LogSink log)
      : hosted_(*hosted),
        store_(*store),
        checkpoints_(checkpoints),
        copies_(*copies),
        log_(std::move(log)) {}

  // Begins the work, and calls `on_change` now and after each change of the registry, on any
  // thread. It must not block. REQUIRES: HostedModels::Start(member) has been called. Call once.
  void Start(Member* member, std::function<void()> on_change);
  // Makes a running load end soon; no other one begins.
  void StopLoading() { is_stopping_.store(true, std::memory_order_relaxed); }
  // Ends the work and its threads.
  void Stop();

  // What has happened to the group since Start().
  const GroupHistory& history() const { return history_; }
  // Why the partition of the model could not be made here at the last attempt; OK: it could, or
  // there was no attempt.
  absl::Status LoadError(std::string_view model) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // After a change of the registry. Errors: the registry or the disk failed.
  absl::Status Reconcile() ABSL_LOCKS_EXCLUDED(mu_, hosted_.change_mu());
  absl::Status FollowRecord(Member& member, const std::string& model, HostedPartition& partition)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(hosted_.change_mu());

  // Loads all partitions that do not have the first version of their incarnation yet. Blocks for as
  // long as reading them takes.
  absl::Status LoadPartitions() ABSL_LOCKS_EXCLUDED(mu_, hosted_.change_mu());
  // After a failed LoadPartition(): if its base is lost, begins an incarnation without it.
  void HandleLostBase(Member& member, const std::string& model, const ModelRecord& record,
                      const absl::Status& problem);
  bool MustLoad(const Member& member, const std::string& model, const ModelRecord& record) const;
  absl::Status LoadPartition(Member& member, const std::string& model, const ModelRecord& record)
      ABSL_LOCKS_EXCLUDED(mu_, hosted_.change_mu());
  // The manifest of the checkpoint, or copy, with which the incarnation of `record` begins.
  absl::StatusOr<CheckpointManifest> ReadBase(const std::string& model, const ModelRecord& record,
                                              size_t partition);
  // On the home: makes the folder of the model's checkpoints follow the record. Errors are in the
  // log: the record decides which checkpoints count.
  void BeginIncarnation(const std::string& model, const ModelRecord& record);
  void NoteLoadEnded(const std::string& model, const ModelRecord& record,
                     const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

  HostedModels& hosted_;
  ModelStore& store_;
  CheckpointStore* const checkpoints_;
  PartCopies& copies_;
  const LogSink log_;

  std::atomic<bool> is_stopping_ = false;  // Relaxed: ends a running load a moment later.
  GroupHistory history_;
  mutable absl::Mutex mu_;
  std::map<std::string, absl::Status, std::less<>> load_errors_ ABSL_GUARDED_BY(mu_);  // By model.

  // Their threads use all of the above.
  RetriedWork reconciling_{[this] { return Reconcile(); }};
  // The whole model waits for a partition, so its load is retried soon.
  RetriedWork loading_{[this] { return LoadPartitions(); }, /*longest_delay=*/absl::Seconds(2)};
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_REGISTRY_FOLLOWER_H_
