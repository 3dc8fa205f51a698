// SPDX-License-Identifier: Apache-2.0
//
// Brings a checkpoint back into a model.
#ifndef EMA_SERVER_CHECKPOINT_RESTORE_H_
#define EMA_SERVER_CHECKPOINT_RESTORE_H_

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"
#include "server/format/file_system.h"
#include "server/format/manifest_json.h"
#include "server/format/verify.h"

namespace ema {

// `status` with "model "m", checkpoint "c": " before its message. REQUIRES: it is not OK.
absl::Status LocateError(const absl::Status& status, std::string_view model,
                         std::string_view checkpoint);

// The checkpoint's version in new blocks of `model`, a model of the same tensors: one that was made
// with ConfigOf(checkpoint), or one that is to go back to it. Only those of the model's present
// tracks are in the result that are of the same name, do the same with each tensor, are compensated
// or not alike, and have as many schedules. Every byte that is read is verified, but for the files
// of tracks that are left out. DATA_LOSS, CHECKPOINT_CORRUPT: a byte is wrong or missing; the
// message names track and tensor. FAILED_PRECONDITION, MODEL_DIFFERS: other tensors.
// RESOURCE_EXHAUSTED: no memory. UNAVAILABLE: the disk failed. INTERNAL, DEVICE. Calls `rest`, if
// it is given, as VerifyCheckpoint() does, but from several threads. Nothing stays allocated after
// an error. Blocks on the disk.
absl::StatusOr<std::shared_ptr<Snapshot>> ReadCheckpoint(FileSystem& file_system,
                                                         const std::string& path,
                                                         const CheckpointManifest& checkpoint,
                                                         Model& model,
                                                         const RestBetweenReads& rest = nullptr);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_RESTORE_H_
