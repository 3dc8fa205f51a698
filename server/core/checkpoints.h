// SPDX-License-Identifier: Apache-2.0
//
// The interface to the versions on the disk, called by the RPC layer and implemented by the
// checkpoint layer.
#ifndef EMA_SERVER_CORE_CHECKPOINTS_H_
#define EMA_SERVER_CORE_CHECKPOINTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/checkpoint_info.h"
#include "ema/time.h"
#include "ema/version_id.h"
#include "server/core/known_versions.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"

namespace ema {

// Mirrors ema.v1.SynthesizeRequest, which says what each field means.
struct SynthesisRequest {
  std::string name;
  std::variant<double, TrainingDuration> profile;  // sigma_rel, or a half-life.
  int64_t step = 0;
  std::vector<std::string> tracks;
};

// Mirrors ema.v1.SynthesizeResponse.
struct Synthesis {
  struct Source {
    std::string track;
    int64_t step = 0;
    double weight = 0;
  };
  Version record;
  double residual = 0;
  std::vector<Source> sources;
};

// The checkpoints of all models of a server. Thread-safe. All calls except FindLabel(),
// CheckMayCreate() and health() may block on the disk for as long as writing or reading a model
// takes, so completion-queue threads must not make them. Errors are those of the calls in
// ema_service.proto; without a data directory, NO_DATA_DIR.
class Checkpoints {
 public:
  virtual ~Checkpoints() = default;

  struct SaveRequest {
    VersionId id;  // All zero: the newest version. Incarnation 0: any.
    std::vector<std::string> tracks;
    bool async = false;
    std::string label;
  };
  struct Saved {
    Version record;
    std::string name;
    int64_t total_bytes = 0;
    CheckpointInfo::State state = CheckpointInfo::State::kComplete;
  };
  virtual absl::StatusOr<Saved> Save(Model& model, const SaveRequest& request) = 0;
  virtual absl::StatusOr<CheckpointInfo> Get(Model& model, std::string_view name) = 0;
  struct Listing {
    std::vector<CheckpointInfo> checkpoints;  // Newest first.
    std::vector<CheckpointLabel> labels;      // By name.
  };
  virtual absl::StatusOr<Listing> List(Model& model) = 0;
  virtual absl::Status Delete(Model& model, std::string_view name) = 0;

  // Rolls the model back to `id` or to the version with `label`, whichever is given. Incarnation 0:
  // the newest version of that number.
  virtual absl::StatusOr<Version> Restore(Model& model, const VersionId& id,
                                          std::string_view label) = 0;
  // Rolls the model back to the version from which a resuming trainer continues, before the run of
  // `launch` opens. Does nothing if that run is open. If the model is at that version already, only
  // saves a rollback that is in memory only. Returns the resulting newest version, for
  // Model::JoinRun(); nullopt: the run is open.
  virtual absl::StatusOr<std::optional<VersionId>> Resume(Model& model, const Launch& launch,
                                                          const ResumePoint& point) = 0;

  virtual absl::StatusOr<CheckpointLabel> SetLabel(Model& model, const std::string& label,
                                                   const VersionId& id) = 0;
  virtual absl::Status RemoveLabel(Model& model, const std::string& label) = 0;
  struct MetricResult {
    CheckpointLabel label;
    bool moved = false;
  };
  // `score` has the label's name, a metric and its direction, and the version that was evaluated.
  virtual absl::StatusOr<MetricResult> ReportMetric(Model& model, const CheckpointLabel& score) = 0;

  virtual absl::StatusOr<Synthesis> Synthesize(Model& model, const SynthesisRequest& request) = 0;
  // Whether a model of that name may be created. Never blocks. FAILED_PRECONDITION,
  // ALL_CHECKPOINTS_CORRUPT: at its start the server found only corrupt checkpoints of the model,
  // and Forget() has not succeeded since. No such model is in memory.
  virtual absl::Status CheckMayCreate(std::string_view model_name) = 0;
  // Call before deleting a model. OK: the disk is writable, which Forget() needs. UNAVAILABLE,
  // STORE_READ_ONLY or DISK_FAILED.
  virtual absl::Status CheckMayForget() = 0;
  // Call after deleting a model: sets its checkpoints aside, so that a restart does not load it
  // again.
  virtual absl::Status Forget(std::string_view model_name) = 0;
  // Removes the checkpoints that Forget() has set aside, of all deleted models of that name. After
  // an error some may remain.
  virtual absl::Status Purge(std::string_view model_name) = 0;

  // OK while versions can be saved. UNAVAILABLE, STORE_READ_ONLY: they cannot; the message says
  // whether a restart or a writable disk ends that. Never blocks.
  virtual absl::Status health() const = 0;

  // The version that has the label. Never blocks. NOT_FOUND, LABEL_NOT_FOUND: the message lists the
  // labels.
  virtual absl::StatusOr<VersionId> FindLabel(Model& model, std::string_view label) = 0;
  // The versions of a model that are on the disk, newest first. `with_partial`: including those
  // with only some tracks. Empty without a data directory.
  virtual absl::StatusOr<std::vector<KnownVersion>> OnDisk(Model& model, bool with_partial) = 0;
  // Opens one track of a version on the disk for reading (TrackSnapshot::stored); loads no weights.
  // Removing the checkpoint does not affect a held result, but it must not be read after this
  // object is destroyed. A checkpoint found to be corrupt, now or during a later read, is set
  // aside. OUT_OF_RANGE, VERSION_NOT_KEPT: the version is not on the disk, or only with other
  // tracks, which the message lists. NOT_FOUND, TRACK_NOT_FOUND: it was saved with all tracks, and
  // has no such track.
  virtual absl::StatusOr<SnapshotRef> OpenVersion(Model& model, const VersionId& id,
                                                  std::string_view track) = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_CHECKPOINTS_H_
