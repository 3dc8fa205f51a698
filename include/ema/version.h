// SPDX-License-Identifier: Apache-2.0
//
// The record of a version of a model, and of what each track did in it.
#ifndef EMA_VERSION_H_
#define EMA_VERSION_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ema/tensor_spec.h"
#include "ema/time.h"
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
  WireDtype wire_dtype = WireDtype::kAsPushed;  // That of the step's weights.
  std::optional<VersionId> restored_from;       // Set if a rollback to it made this version.
  // Statistics of some tracks, in any order. From ListVersions(), Watch() and ModelInfo::latest:
  // those computed so far.
  std::vector<TrackStatistics> statistics;

  VersionId id() const { return {number, incarnation}; }
};

}  // namespace ema

#endif  // EMA_VERSION_H_
