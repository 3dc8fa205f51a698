// SPDX-License-Identifier: Apache-2.0
//
// Builds averages of other lengths from the checkpoints on the disk.
#ifndef EMA_SERVER_CHECKPOINT_SYNTHESIS_H_
#define EMA_SERVER_CHECKPOINT_SYNTHESIS_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/checkpoint_folder.h"
#include "server/checkpoint/synthesis_plan.h"
#include "server/core/checkpoints.h"
#include "server/core/model.h"

namespace ema {

// Converts `status`, the error of reading `checkpoint`, to the error with which the call fails.
using ReadErrorHandler =
    absl::FunctionRef<absl::Status(const std::string& checkpoint, const absl::Status& status)>;

// Handles Synthesize of ema_service.proto: reads and verifies each checkpoint that has a weight,
// once, and adds the result by model.tracks().AddSynthesized(). The result is float32, whatever the
// sources' dtype. Averaged buffers and copied tensors come from the newest source. Thread-safe.
// Waits for the disk until they are read, but holds no lock of the store meanwhile, so saves and
// DeleteModel() continue. When the model is closed, fails soon with its error. Takes the memory of
// three results, plus a few MiB and the checkpoints' manifests. Of a model on several servers,
// plans here and makes each of them build its tensors, by folder.partitions().
absl::StatusOr<Synthesis> Synthesize(CheckpointFolder& folder, Model& model,
                                     const SynthesisRequest& request, ReadErrorHandler on_error);

// Builds the tensors of one partition of a model, the first of which is tensor `first_tensor` of
// the whole, and adds the result like Synthesize(). Reads the manifests again, and verifies what it
// reads. Errors as Synthesize().
absl::Status SynthesizePart(CheckpointFolder& folder, Model& partition, int64_t first_tensor,
                            const SynthesisOrder& order);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_SYNTHESIS_H_
