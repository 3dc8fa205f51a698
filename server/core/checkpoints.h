// SPDX-License-Identifier: Apache-2.0
//
// The interface to the versions on the disk, called by the RPC layer and overridden by the
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
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/resume_point.h"
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

// The checkpoints of all models of a server. Thread-safe. All calls except FindLabel(),
// CheckMayCreate() and health() may block on the disk for as long as writing or reading a model
// takes, so completion-queue threads must not make them. Errors are those of the calls in
// ema_service.proto.
//
// The functions of this class are those of a server without a data directory, which never block:
// they fail with FAILED_PRECONDITION, NO_DATA_DIR, unless their comments say otherwise. With a data
// directory all are overridden.
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
  virtual absl::StatusOr<Saved> Save(Model&, const SaveRequest&) { return NoDataDir(); }
  virtual absl::StatusOr<CheckpointInfo> Get(Model&, std::string_view /*name*/) {
    return NoDataDir();
  }
  virtual absl::StatusOr<CheckpointList> List(Model&) { return NoDataDir(); }
  virtual absl::Status Delete(Model&, std::string_view /*name*/) { return NoDataDir(); }

  // Rolls the model back to the version `id` or to that with the label, whichever is given.
  // Incarnation 0: the newest version of that number.
  virtual absl::StatusOr<Version> Restore(Model&, const VersionId& /*id*/,
                                          std::string_view /*label*/) {
    return NoDataDir();
  }
  // Rolls the model back to the version from which a resuming trainer continues, before the run of
  // the launch opens. Does nothing if that run is open. If the model is at that version already,
  // only saves a rollback that is in memory only. Returns the resulting newest version, for
  // Model::JoinRun(); nullopt: the run is open.
  virtual absl::StatusOr<std::optional<VersionId>> Resume(Model&, const Launch&,
                                                          const ResumePoint&) {
    return NoDataDir();
  }

  virtual absl::StatusOr<CheckpointLabel> SetLabel(Model&, const std::string& /*label*/,
                                                   const VersionId&) {
    return NoDataDir();
  }
  virtual absl::Status RemoveLabel(Model&, const std::string& /*label*/) { return NoDataDir(); }
  // The score has the label's name, a metric and its direction, and the version that was evaluated.
  virtual absl::StatusOr<MetricResult> ReportMetric(Model&, const CheckpointLabel& /*score*/) {
    return NoDataDir();
  }

  virtual absl::StatusOr<Synthesis> Synthesize(Model&, const SynthesisRequest&) {
    return NoDataDir();
  }
  // Whether a model of that name may be created. Never blocks. FAILED_PRECONDITION,
  // ALL_CHECKPOINTS_CORRUPT: at its start the server found only corrupt checkpoints of the model,
  // and SetAsideAll() has not succeeded since. No such model is in memory. Without a data
  // directory: OK.
  virtual absl::Status CheckMayCreate(std::string_view /*model_name*/) { return absl::OkStatus(); }
  // Call before deleting a model. OK: the disk is writable, which SetAsideAll() needs, or there is
  // no data directory. UNAVAILABLE, STORE_READ_ONLY or DISK_FAILED.
  virtual absl::Status CheckMaySetAside() { return absl::OkStatus(); }
  // Call after deleting a model: sets its checkpoints aside, so that a restart does not load it
  // again. Without a data directory: OK.
  virtual absl::Status SetAsideAll(std::string_view /*model_name*/) { return absl::OkStatus(); }
  // Removes the checkpoints that SetAsideAll() has set aside, of all deleted models of that name.
  // After an error some may remain. Without a data directory: OK.
  virtual absl::Status Purge(std::string_view /*model_name*/) { return absl::OkStatus(); }

  // OK while versions can be saved. UNAVAILABLE, STORE_READ_ONLY: they cannot; the message says
  // whether a restart or a writable disk ends that. Never blocks.
  virtual absl::Status health() const { return NoDataDir(); }

  // The version that has the label. Never blocks. NOT_FOUND, LABEL_NOT_FOUND: the message lists the
  // labels.
  virtual absl::StatusOr<VersionId> FindLabel(Model&, std::string_view /*label*/) {
    return NoDataDir();
  }
  // The versions of a model that are on the disk, newest first. `with_partial`: including those
  // with only some tracks. Empty without a data directory.
  virtual absl::StatusOr<std::vector<KnownVersion>> OnDisk(Model&, bool /*with_partial*/) {
    return std::vector<KnownVersion>();
  }
  // Opens one track of a version on the disk for reading (TrackSnapshot::stored); loads no weights.
  // Removing the checkpoint does not affect a held result, but it must not be read after this
  // object is destroyed. A checkpoint found to be corrupt, now or during a later read, is set
  // aside. OUT_OF_RANGE, VERSION_NOT_KEPT: the version is not on the disk, or only with other
  // tracks, which the message lists. NOT_FOUND, TRACK_NOT_FOUND: it was saved with all tracks, and
  // has no such track. Without a data directory: an error of VersionHistory::Pin(), or
  // VERSION_NOT_KEPT.
  virtual absl::StatusOr<SnapshotRef> OpenVersion(Model& model, const VersionId& id,
                                                  std::string_view /*track*/) {
    // For its error, which names the newest version.
    EMA_RETURN_IF_ERROR(model.history().Pin(id.version, id.incarnation).status());
    return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                     "the version is in memory only");
  }

 private:
  static absl::Status NoDataDir() {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoDataDir,
                     "the server was started without --data-dir, so it keeps no checkpoints and no "
                     "labels");
  }
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_CHECKPOINTS_H_
