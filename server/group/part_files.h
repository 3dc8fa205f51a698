// SPDX-License-Identifier: Apache-2.0
//
// Writes and reads the files of one partition of a model that is on several servers.
#ifndef EMA_SERVER_GROUP_PART_FILES_H_
#define EMA_SERVER_GROUP_PART_FILES_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/v1/group.pb.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/checkpoint/data_directory.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"
#include "server/format/manifest_json.h"
#include "server/format/verify.h"
#include "server/group/model_record.h"

namespace ema::group {

// Handles GroupService.SavePart for `partition`. If the version is not published here yet, waits
// some seconds for it. Errors also as WriteVerifiedPart().
absl::StatusOr<v1::SavePartResponse> SavePart(CheckpointStore& store, Model& partition,
                                              const v1::SavePartRequest& request);

// Writes the files of `partition` as WritePart(), and reads them back. Errors also as VerifyPart().
absl::StatusOr<CheckpointManifest> WriteVerifiedPart(DataDirectory& data, const std::string& path,
                                                     Model& partition, const Snapshot& snapshot,
                                                     const WriteOptions& options);

// Reads the manifest of a group's checkpoint of a model. DATA_LOSS, CHECKPOINT_CORRUPT; NOT_FOUND:
// it is not on the disk. Waits for the disk, like LoadPart().
absl::StatusOr<CheckpointManifest> ReadGroupCheckpoint(CheckpointStore& store,
                                                       const std::string& model,
                                                       const GroupCheckpoint& checkpoint);

// Loads the tensors of `partition` from the checkpoint `whole`, the base of `record`, as the newest
// version of `model`. On the home, also loads the attached files. Calls `rest` as ReadCheckpoint()
// does, and returns its errors. REQUIRES: nothing has been committed.
absl::Status LoadPart(CheckpointStore& store, const CheckpointManifest& whole,
                      const ModelRecord& record, size_t partition, Model& model,
                      const PauseHook& rest);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_PART_FILES_H_
