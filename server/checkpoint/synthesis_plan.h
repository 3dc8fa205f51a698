// SPDX-License-Identifier: Apache-2.0
//
// Chooses the checkpoints from which a synthesized average is built, and their weights. Reads
// manifests only.
#ifndef EMA_SERVER_CHECKPOINT_SYNTHESIS_PLAN_H_
#define EMA_SERVER_CHECKPOINT_SYNTHESIS_PLAN_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/track.h"
#include "server/core/checkpoints.h"
#include "server/core/model.h"
#include "server/format/checkpoint_name.h"
#include "server/format/manifest_json.h"

namespace ema {

// A checkpoint of the model, without its weights.
struct StoredCheckpoint {
  CheckpointId id;
  CheckpointManifest manifest;
};

struct SynthesisPlan {
  // One track of one checkpoint, which outlives the plan.
  struct Source {
    const StoredCheckpoint* checkpoint = nullptr;
    const CheckpointTrack* track = nullptr;
    double weight = 0;  // They sum to 1; 0: its averages are not read.
  };
  TrackConfig config;  // The result's; it has the sources' tensors.
  // Sorted by the track's name and step.
  std::vector<Source> sources;
  // The source of everything that is not averaged.
  Source newest;
  Version record;
  double residual = 0;
};

// Errors as Synthesize in ema_service.proto. `manifest`: of the whole model, of which `model` may
// be one partition. `checkpoints`: newest first, of this manifest, and on the branch that the model
// is on (see BranchWalk).
// REQUIRES: the model has a version. O(n^3) for n sources, of which there are at most 1024.
absl::StatusOr<SynthesisPlan> PlanSynthesis(const Model& model, const Manifest& manifest,
                                            const SynthesisRequest& request,
                                            absl::Span<const StoredCheckpoint> checkpoints);

// The content of a SynthesisPlan with names in place of pointers, so that it can be sent to the
// other servers of a model: each of them builds its own tensors.
struct SynthesisOrder {
  struct Source {
    CheckpointId checkpoint;
    std::string track;
    double weight = 0;
  };
  TrackConfig config;
  std::vector<Source> sources;
  Source newest;
  Version record;
};
SynthesisOrder OrderOf(const SynthesisPlan& plan);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_SYNTHESIS_PLAN_H_
