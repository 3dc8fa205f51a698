// SPDX-License-Identifier: Apache-2.0
//
// A model's state in figures, for people and for metrics.
#ifndef EMA_SERVER_CORE_MODEL_OVERVIEW_H_
#define EMA_SERVER_CORE_MODEL_OVERVIEW_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ema/version.h"
#include "ema/version_id.h"

namespace ema {

class Model;

// The state of a model at one moment.
struct ModelOverview {
  struct Track {
    std::string name;
    std::string config;  // As in TrackVersion.
    bool is_paused = false;
    double update_weight = 0;                   // The last update's; 0: not remembered.
    std::optional<TrackStatistics> statistics;  // The newest that are remembered.
  };
  // The open run.
  struct Run {
    int64_t epoch = 0;
    int64_t world_size = 0;
    std::vector<int64_t> missing_ranks;  // Some of those that have not joined.
    bool is_ready = false;
  };
  struct Session {
    int64_t step = 0;
    absl::Duration age;
    std::vector<int64_t> missing_ranks;  // Some of those that have not committed.
  };

  // The newest version; 0: there is none.
  int64_t step = 0;
  VersionId version;
  absl::Time commit_time;  // Meaningless without a version.
  // The newest version on the disk; 0: there is none.
  int64_t durable_step = 0;
  VersionId durable_version;
  std::optional<absl::Time> durable_commit_time;  // Absent: none, or not remembered.
  // The newest step begun in this run; 0: none.
  int64_t begun_step = 0;
  int64_t reserved_bytes = 0;
  std::vector<Track> tracks;
  std::optional<Run> run;
  std::optional<Session> session;
};

// Never waits for a commit.
ModelOverview OverviewOf(const Model& model);

// The statistics of one version.
struct StatisticsPoint {
  int64_t step = 0;
  std::vector<TrackStatistics> tracks;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_MODEL_OVERVIEW_H_
