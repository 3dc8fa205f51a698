// SPDX-License-Identifier: Apache-2.0
//
// A server's description of a model, and the plan of due pushes.
#ifndef EMA_MODEL_INFO_H_
#define EMA_MODEL_INFO_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ema/manifest.h"
#include "ema/track.h"
#include "ema/version.h"

namespace ema {

struct ModelInfo {
  std::string name;
  Manifest manifest;  // Empty in ListModels().
  std::vector<TrackConfig> tracks;
  // The tracks after the next commit; absent: no change.
  std::optional<std::vector<TrackConfig>> pending_tracks;
  int64_t plan_revision = 0;
  int64_t max_pinned_versions = 0;
  NonFinitePolicy non_finite = NonFinitePolicy::kReject;
  int64_t reserved_bytes = 0;
  std::optional<Version> latest;
  int64_t run_epoch = 0;
  struct AttachedFile {
    std::string name;  // Checked by ValidateName(), so it is safe as a file name.
    int64_t total_bytes = 0;
  };
  std::vector<AttachedFile> attached_files;  // Sorted by name.
};

// The tracks and their states, which determine the due pushes.
struct RunPlan {
  struct Entry {
    TrackConfig track;
    TrackState state;
    int64_t track_id = 0;  // Differs from that of a removed track of the same name.
  };
  int64_t revision = 0;  // Grows with every change of the tracks, also across restarts.
  std::vector<Entry> tracks;
  // True: pushes may omit the run's frozen tensors (not with PushOptions::frozen_changed), because
  // every track that is not paused equals the values that the run pushed last.
  bool may_omit_frozen = false;
};

}  // namespace ema

#endif  // EMA_MODEL_INFO_H_
