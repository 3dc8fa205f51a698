// SPDX-License-Identifier: Apache-2.0
//
// Creates and deletes the models of the group.
#ifndef EMA_SERVER_GROUP_MODEL_LIFECYCLE_H_
#define EMA_SERVER_GROUP_MODEL_LIFECYCLE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/v1/ema_service.pb.h"
#include "ema/v1/group.pb.h"
#include "server/base/log_event.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/core/model_config.h"
#include "server/group/hosted_models.h"
#include "server/group/hosted_partition.h"
#include "server/group/member.h"
#include "server/group/model_record.h"
#include "server/group/peers.h"

namespace ema::group {

// Creates and deletes models together with the other members. A model's record is ACTIVE only after
// all members have reserved their partitions, and it is erased only after the model's checkpoints
// have been set aside; a call that is interrupted leaves it CREATING or DELETING.
//
// Thread-safe. Calls block on the registry.
class ModelLifecycle {
 public:
  // `hosted` and `peers` outlive this, `checkpoints` too. Null: there is no data directory.
  ModelLifecycle(HostedModels* hosted, Peers* peers, CheckpointStore* checkpoints, LogSink log)
      : hosted_(*hosted), peers_(*peers), checkpoints_(checkpoints), log_(std::move(log)) {}

  struct Created {
    ModelRecord record;
    bool is_new = false;  // False: it existed already, perhaps with another configuration.
  };
  // Creates a model, unless there is one of that name. `config`: that of `request`, validated.
  // UNAVAILABLE, MODEL_BUSY: another call creates or deletes it. Errors also as PlaceTensors() and
  // ReservePartition() of GroupCalls. FAILED_PRECONDITION: the model's folder has checkpoints.
  absl::StatusOr<Created> Create(const v1::CreateModelRequest& request, const ModelConfig& config);
  // As in GroupCalls.
  absl::StatusOr<v1::ReservePartitionResponse> ReservePartition(
      const v1::ReservePartitionRequest& request);
  absl::StatusOr<v1::RecoverModelResponse> Recover(const std::string& model);
  absl::Status Delete(const std::string& model, bool purge);

 private:
  absl::StatusOr<ModelRecord> CreateNew(Member& member, const v1::CreateModelRequest& request,
                                        const ModelConfig& config);
  // Makes all members reserve their partitions. The error names the member.
  absl::Status ReserveAll(const Member& member, const v1::CreateModelRequest& request,
                          const ModelRecord& record);
  absl::StatusOr<std::shared_ptr<HostedPartition>> Reserve(
      Member& member, const v1::ReservePartitionRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(hosted_.change_mu());
  // The first part of Delete() for a model that the registry does not have, but whose folder has
  // checkpoints: puts a record, so that no such model is created meanwhile. ABORTED: there is a
  // record now.
  absl::Status ReserveName(Member& member, const std::string& model);
  // The second part of Delete(), for a record that is DELETING.
  absl::Status FinishDeletion(Member& member, const std::string& model, int64_t revision,
                              bool purge);

  HostedModels& hosted_;
  Peers& peers_;
  CheckpointStore* const checkpoints_;
  const LogSink log_;
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_MODEL_LIFECYCLE_H_
