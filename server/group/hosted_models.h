// SPDX-License-Identifier: Apache-2.0
//
// The partitions that are on this server.
#ifndef EMA_SERVER_GROUP_HOSTED_MODELS_H_
#define EMA_SERVER_GROUP_HOSTED_MODELS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/core/model_config.h"
#include "server/core/model_store.h"
#include "server/group/hosted_partition.h"
#include "server/group/member.h"
#include "server/group/model_record.h"
#include "server/group/peers.h"

namespace ema::group {

// A model of which this server has a partition. Constant.
struct HostedModel {
  std::shared_ptr<HostedPartition> partition;
  ModelConfig config;  // The whole model's.
};

// The table of the models of which this server has a partition. Each of them is also a Model in the
// ModelStore, whose gate is the partition. Also knows this process as a member of its group.
//
// Thread-safe.
class HostedModels {
 public:
  struct Options {
    absl::Duration session_timeout = absl::Seconds(30);
    absl::Duration max_registry_outage = absl::Minutes(10);
    CheckpointStore* checkpoints = nullptr;  // Outlives this. Null: there is no data directory.
    LogSink log;
  };
  // `store` and `peers` outlive this.
  HostedModels(ModelStore* store, Peers* peers, Options options)
      : options_(std::move(options)), store_(*store), peers_(*peers) {}

  // `member` must live until Stop() returns. Call once.
  void Start(Member* member) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the exchange of messages with other members. The models remain in the store.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_, change_mu_);

  // UNAVAILABLE, GROUP_DEGRADED: before Start(), and after Stop().
  absl::StatusOr<Member*> GetMember() const ABSL_LOCKS_EXCLUDED(mu_);
  // HOST:PORT of the partition's process. Empty: it is not in the registry.
  std::string AddressOf(const Partition& partition) const ABSL_LOCKS_EXCLUDED(mu_);
  // Null: this server has no partition of the model.
  std::shared_ptr<const HostedModel> Find(std::string_view model) const ABSL_LOCKS_EXCLUDED(mu_);
  // By the models' names.
  std::map<std::string, std::shared_ptr<const HostedModel>> All() const ABSL_LOCKS_EXCLUDED(mu_);

  // Runs `call`, which starts calls to other members. All of these end, because the owner calls
  // Stop() before Peers::Stop(). `call` must not block, nor use this object. UNAVAILABLE,
  // GROUP_DEGRADED: this server is no member; `call` has not run.
  absl::Status StartCalls(absl::FunctionRef<void(Peers&)> call) const ABSL_LOCKS_EXCLUDED(mu_);

  // --- Changes ---

  // Serializes changes of the table. A caller holds it from its read of the registry to the change
  // that follows from it.
  absl::Mutex& change_mu() const ABSL_LOCK_RETURNED(change_mu_) { return change_mu_; }

  // Makes the partition with that index for this process, `member`, as `record` has it. `config`:
  // of the whole model, validated. RESOURCE_EXHAUSTED, MEMORY_BUDGET. Errors also as
  // ModelStore::CreatePartition(). REQUIRES: the table has no partition of the model.
  absl::StatusOr<std::shared_ptr<HostedPartition>> Add(const Member& member,
                                                       const ModelRecord& record, int64_t index,
                                                       ModelConfig config) ABSL_LOCKS_EXCLUDED(mu_)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);
  // Drops the partition of that incarnation, if it is here. `why_deleted` empty: the model has a
  // newer incarnation.
  void Drop(const std::string& model, int64_t incarnation, const std::string& why_deleted)
      ABSL_LOCKS_EXCLUDED(mu_) ABSL_EXCLUSIVE_LOCKS_REQUIRED(change_mu_);

 private:
  const Options options_;
  ModelStore& store_;
  Peers& peers_;

  mutable absl::Mutex change_mu_ ABSL_ACQUIRED_BEFORE(mu_);
  mutable absl::Mutex mu_;
  Member* member_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::map<std::string, std::shared_ptr<const HostedModel>, std::less<>> models_
      ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_HOSTED_MODELS_H_
