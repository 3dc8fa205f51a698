// SPDX-License-Identifier: Apache-2.0
//
// The checkpoints of a server that has no disk for them.
#ifndef EMA_SERVER_CORE_NO_CHECKPOINTS_H_
#define EMA_SERVER_CORE_NO_CHECKPOINTS_H_

#include <optional>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"
#include "server/core/checkpoints.h"

namespace ema {

// Calls fail with FAILED_PRECONDITION, NO_DATA_DIR, except that CheckMayCreate(), CheckMayForget(),
// Forget() and Purge() succeed, as there is nothing to lose; OnDisk() is empty; and OpenVersion()
// fails like VersionHistory::Pin(), else with OUT_OF_RANGE, VERSION_NOT_KEPT. Thread-safe; never
// blocks.
class NoCheckpoints : public Checkpoints {
 public:
  absl::StatusOr<Saved> Save(Model&, const SaveRequest&) override { return NoDataDir(); }
  absl::StatusOr<CheckpointInfo> Get(Model&, std::string_view) override { return NoDataDir(); }
  absl::StatusOr<Listing> List(Model&) override { return NoDataDir(); }
  absl::Status Delete(Model&, std::string_view) override { return NoDataDir(); }
  absl::StatusOr<Version> Restore(Model&, const VersionId&, std::string_view) override {
    return NoDataDir();
  }
  absl::StatusOr<std::optional<VersionId>> Resume(Model&, const Launch&,
                                                  const ResumePoint&) override {
    return NoDataDir();
  }
  absl::StatusOr<CheckpointLabel> SetLabel(Model&, const std::string&, const VersionId&) override {
    return NoDataDir();
  }
  absl::Status RemoveLabel(Model&, const std::string&) override { return NoDataDir(); }
  absl::StatusOr<MetricResult> ReportMetric(Model&, const CheckpointLabel&) override {
    return NoDataDir();
  }
  absl::StatusOr<Synthesis> Synthesize(Model&, const SynthesisRequest&) override {
    return NoDataDir();
  }
  absl::Status CheckMayCreate(std::string_view) override { return absl::OkStatus(); }
  absl::Status CheckMayForget() override { return absl::OkStatus(); }
  absl::Status Forget(std::string_view) override { return absl::OkStatus(); }
  absl::Status Purge(std::string_view) override { return absl::OkStatus(); }
  absl::Status health() const override { return NoDataDir(); }
  absl::StatusOr<VersionId> FindLabel(Model&, std::string_view label) override {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoDataDir,
                     absl::StrCat("label: ", Quoted(label),
                                  " given, but the server was started without --data-dir, so it "
                                  "keeps no labels"));
  }
  absl::StatusOr<std::vector<KnownVersion>> OnDisk(Model&, bool) override {
    return std::vector<KnownVersion>();
  }
  absl::StatusOr<SnapshotRef> OpenVersion(Model& model, const VersionId& id,
                                          std::string_view) override {
    // For its error, which names the newest version.
    EMA_RETURN_IF_ERROR(model.history().Pin(id.version, id.incarnation).status());
    return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                     "the version is in memory only");
  }

 private:
  static absl::Status NoDataDir() {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoDataDir,
                     "the server was started without --data-dir, so it keeps no checkpoints");
  }
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_NO_CHECKPOINTS_H_
