// SPDX-License-Identifier: Apache-2.0
//
// A server's description of a model: its tracks, its versions, and the plan of due pushes.
#ifndef EMA_MODEL_INFO_H_
#define EMA_MODEL_INFO_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ema/manifest.h"
#include "ema/time.h"
#include "ema/track.h"
#include "ema/version_id.h"

namespace ema {

// What one track did at one version; ema.v1.TrackRecord says what each field means.
struct TrackVersion {
  std::string track;
  bool updated = false;
  double update_weight = 0;
  double elapsed = 0;
  int64_t update_count = 0;
  int64_t averaged_count = 0;
  double window_steps = 0;
  std::string config;
  double stall_gap = 0;
  std::vector<TrackVersion> rules;  // For each tensor rule with a schedule, in their order.
};

// Norm and distance of one track at one version; ema.v1.TrackStatistics says what each field means.
struct TrackStatistics {
  std::string track;
  double norm = 0;
  std::optional<double> distance;
};

// The record of one commit; ema.v1.VersionRecord says what each field means.
struct Version {
  static constexpr size_t kMaxNamedTensors = 16;

  int64_t incarnation = 0;
  int64_t number = 0;
  int64_t step = 0;
  TrainingTime time;
  int64_t run_epoch = 0;
  std::vector<TrackVersion> tracks;
  absl::Time commit_time;
  // The number, and the first kMaxNamedTensors names, of tensors that kept their values because the
  // pushed values were not finite.
  int64_t skipped_tensor_count = 0;
  std::vector<std::string> skipped_tensors;
  WireDtype wire_dtype = WireDtype::kAsPushed;  // Of the step's weights.
  std::optional<VersionId> restored_from;       // Set if a rollback to it made this version.
  // Statistics of some tracks, in any order. From ListVersions(), Watch() and ModelInfo::latest:
  // those computed so far.
  std::vector<TrackStatistics> statistics;

  VersionId id() const { return {number, incarnation}; }
};

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
