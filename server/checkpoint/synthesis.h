// SPDX-License-Identifier: Apache-2.0
//
// Builds averages of other lengths from the checkpoints on the disk.
#ifndef EMA_SERVER_CHECKPOINT_SYNTHESIS_H_
#define EMA_SERVER_CHECKPOINT_SYNTHESIS_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/checkpoint_folder.h"
#include "server/core/checkpoints.h"
#include "server/core/model.h"

namespace ema {

// What a call ends with after reading `checkpoint` has given `status`.
using ReadErrorHandler =
    absl::FunctionRef<absl::Status(const std::string& checkpoint, const absl::Status& status)>;

// As Synthesize in ema_service.proto: reads and verifies each checkpoint that has a weight, once,
// and gives the result to model.tracks().AddSynthesized(). Only float32 values are read: of a
// compensated track the rounded average. Averaged buffers, and what is copied, are the newest
// source's. Thread-safe. Blocks on the disk for as long as it takes to read them; of the store's
// locks it holds none meanwhile, so saves and DeleteModel() go on. Ends soon with the model's error
// when that is closed. What it needs besides the result and as much again is small: a few MiB, and
// the checkpoints' manifests.
absl::StatusOr<Synthesis> Synthesize(CheckpointFolder& folder, Model& model,
                                     const SynthesisRequest& request, ReadErrorHandler on_error);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_SYNTHESIS_H_
