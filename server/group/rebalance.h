// SPDX-License-Identifier: Apache-2.0
//
// Moves the tensors of a model to other members of the group.
#ifndef EMA_SERVER_GROUP_REBALANCE_H_
#define EMA_SERVER_GROUP_REBALANCE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/v1/ema_service.pb.h"
#include "server/base/log_event.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/group/group_models.h"
#include "server/group/hosted_models.h"

namespace ema::group {

// Handles RebalanceModel of ema_service.proto. Calls `save`, which makes the newest version
// durable, if this server is the home and all partitions run; pushes are rejected meanwhile. After
// an error the placement is the old one, or, after REGISTRY_UNAVAILABLE, perhaps the new one.
// Blocks on the registry, the disk and the save.
absl::StatusOr<v1::RebalanceModelResponse> RebalanceModel(GroupModels& models, HostedModels& hosted,
                                                          CheckpointStore* checkpoints,
                                                          const v1::RebalanceModelRequest& request,
                                                          absl::FunctionRef<absl::Status()> save,
                                                          const LogSink& log);

// Moves the tensors of a model from the members in `lost`, whose processes do not run, to those
// that run, which load them from the newest checkpoint. Any server may call it, and several may.
// ABORTED: the model does not have that incarnation any more, or a process runs again.
// FAILED_PRECONDITION: another process of the model does not run. NOT_FOUND: there is no such
// model, or it has no checkpoint. RESOURCE_EXHAUSTED, MEMORY_BUDGET: the other members do not have
// the memory. UNAVAILABLE: the registry. Blocks on the registry and the disk.
absl::StatusOr<v1::RebalanceModelResponse> ReplaceMembers(GroupModels& models, HostedModels& hosted,
                                                          CheckpointStore& checkpoints,
                                                          const std::string& model,
                                                          int64_t incarnation,
                                                          const std::vector<std::string>& lost,
                                                          const LogSink& log);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_REBALANCE_H_
