// SPDX-License-Identifier: Apache-2.0
//
// Begins the next incarnation of a model on several servers.
#ifndef EMA_SERVER_GROUP_NEXT_INCARNATION_H_
#define EMA_SERVER_GROUP_NEXT_INCARNATION_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/log_event.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/group/member.h"
#include "server/group/model_record.h"

namespace ema::group {

// Whether `record` is ACTIVE and names an earlier process of this member, whose part of the model
// is lost. False while the registry does not have this process as the member: then it may itself be
// the earlier one.
bool NamesEarlierProcess(const Member& member, const ModelRecord& record);

// Replaces `record`, of which NamesEarlierProcess() is true, in the registry: all partitions return
// to the newest checkpoint or copy, and this process has the place of the earlier one. A model with
// neither is lost, so its record is erased. Does nothing if the record has changed: the watch
// reports it. `checkpoints`: null without a data directory. FAILED_PRECONDITION: the registry is
// older than the group's folder. UNAVAILABLE: the registry or the disk failed. Blocks on both.
absl::Status BeginIncarnationAfterRestart(Member& member, CheckpointStore* checkpoints,
                                          const std::string& model, const ModelRecord& record,
                                          const LogSink& log);

// Begins the next incarnation from the newest other checkpoint, because the base of `record` cannot
// be loaded: `problem` is DATA_LOSS, or it is not on the disk. Sets a checkpoint aside that was the
// base. If the base was a copy, and there is no checkpoint, the model is lost, and its record is
// erased. Does nothing if the record has changed. NOT_FOUND, CHECKPOINT_NOT_FOUND: the model has no
// older checkpoint, so nothing has changed. UNAVAILABLE: the registry or the disk failed. Blocks on
// both.
absl::Status BeginIncarnationWithoutBase(Member& member, CheckpointStore& checkpoints,
                                         const std::string& model, const ModelRecord& record,
                                         const absl::Status& problem, const LogSink& log);

// For NextIncarnation(): the newest incarnation among the model's checkpoints on the disk; 0: there
// are none. `checkpoints`: as above. Waits for the disk.
absl::StatusOr<int64_t> NewestStoredIncarnation(CheckpointStore* checkpoints,
                                                const std::string& model);

// The name of the checkpoint that the folder's LATEST names, if it is on the disk and `record` does
// not have it. A save adds a checkpoint to the record before it changes LATEST, so such a record
// comes from an old backup. Nullopt: the record has it. Waits for the disk.
absl::StatusOr<std::optional<std::string>> FindUnrecordedLatest(CheckpointStore& checkpoints,
                                                                const std::string& model,
                                                                const ModelRecord& record);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_NEXT_INCARNATION_H_
