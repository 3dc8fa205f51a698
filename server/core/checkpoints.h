// SPDX-License-Identifier: Apache-2.0
//
// What calls need of the versions on a disk: between the layers that know RPCs and those that know
// files.
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

// The checkpoints of all models of a server. Thread-safe. Calls may block on the disk for as long
// as a model takes to write or read, but for FindLabel(), CheckMayCreate() and health(): not for a
// thread that serves RPCs. Their errors are those of the calls in ema_service.proto; without a data
// directory it is NO_DATA_DIR.
class Checkpoints {
 public:
  virtual ~Checkpoints() = default;

  struct SaveRequest {
    VersionId id;  // All zero: the newest. Incarnation 0: whichever is kept.
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

  // Rolls the model back to one of the two; `id` with incarnation 0: the newest of that number.
  virtual absl::StatusOr<Version> Restore(Model& model, const VersionId& id,
                                          std::string_view label) = 0;
  // Before the run of `launch` opens: brings the model to where the trainer stands. Does nothing if
  // that run is open already, or the model stands there; but a rollback that is only in memory is
  // saved. Returns the newest version then, for Model::JoinRun(); nullopt: the run is open.
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
  // Whether a model of that name may be created now. Never blocks. FAILED_PRECONDITION,
  // ALL_CHECKPOINTS_CORRUPT: the server found only corrupt checkpoints of it at its start, and
  // Forget() has not been called since. No such model is in memory.
  virtual absl::Status CheckMayCreate(std::string_view model_name) = 0;
  // Before a model is deleted. OK: Forget() finds a disk that can be written. UNAVAILABLE,
  // STORE_READ_ONLY or DISK_FAILED.
  virtual absl::Status CheckMayForget() = 0;
  // After a model has been deleted, so that a restart does not bring it back: sets its checkpoints
  // aside.
  virtual absl::Status Forget(std::string_view model_name) = 0;
  // Removes what Forget() has set aside, also of models of that name that were deleted before.
  // After an error some of it is still there.
  virtual absl::Status Purge(std::string_view model_name) = 0;

  // OK while versions can be saved. UNAVAILABLE, STORE_READ_ONLY: not any more, until the server is
  // started again, or, as the message says, until the disk is writable again. Never blocks.
  virtual absl::Status health() const = 0;

  // Which version has the label. Never blocks. NOT_FOUND, LABEL_NOT_FOUND, listing the labels.
  virtual absl::StatusOr<VersionId> FindLabel(Model& model, std::string_view label) = 0;
  // The versions of a model that are on the disk with all tracks, or, `with_partial`, with some:
  // newest first. Without a data directory none.
  virtual absl::StatusOr<std::vector<KnownVersion>> OnDisk(Model& model, bool with_partial) = 0;
  // One track of a version on the disk, to be read from there: TrackSnapshot::stored. Nothing of it
  // is in memory; removing the checkpoint does not hinder whoever holds it, but it is not read
  // after this has gone. A checkpoint of which a byte turns out to be wrong, now or then, is set
  // aside. OUT_OF_RANGE, VERSION_NOT_KEPT, also where only other tracks were saved, which the
  // message lists. NOT_FOUND, TRACK_NOT_FOUND: all tracks were saved, and it is none of them.
  virtual absl::StatusOr<SnapshotRef> OpenVersion(Model& model, const VersionId& id,
                                                  std::string_view track) = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_CHECKPOINTS_H_
