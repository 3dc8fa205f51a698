// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints whose model the registry has lost: it is empty, or was restored from an old backup.
#ifndef EMA_SERVER_GROUP_RECOVER_H_
#define EMA_SERVER_GROUP_RECOVER_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/log_event.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/group/member.h"
#include "server/group/model_record.h"

namespace ema::group {

// OK: the folder of a model that the registry does not have has no checkpoint with all tracks.
// FAILED_PRECONDITION: it has one. A new model would begin a new average there, and retention would
// remove the old ones. The message names the newest and the ways out. Waits for the disk.
absl::Status CheckHasNoCheckpoints(CheckpointStore& checkpoints, const std::string& model);

// Rebuilds the record of a model from the checkpoints in its folder: the next incarnation, on the
// members that run now, which begins with the checkpoint that LATEST names. Returns the record.
// NOT_FOUND, CHECKPOINT_NOT_FOUND: there is no checkpoint whose manifest can be read.
// FAILED_PRECONDITION: the registry has the model, and is not older than the folder. UNAVAILABLE,
// MODEL_BUSY: the model is being created, deleted or changed. Errors also as PlaceTensors().
// Blocks on the registry and the disk.
absl::StatusOr<ModelRecord> RecoverRecord(Member& member, CheckpointStore& checkpoints,
                                          const std::string& model, const LogSink& log);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_RECOVER_H_
