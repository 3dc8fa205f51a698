// SPDX-License-Identifier: Apache-2.0
//
// The versions of a model in memory and on the disk, and which of them belongs to a step, for a
// reader or a resuming trainer.
#ifndef EMA_SERVER_CORE_KNOWN_VERSIONS_H_
#define EMA_SERVER_CORE_KNOWN_VERSIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/version_id.h"
#include "server/core/version_history.h"

namespace ema {

struct KnownVersion {
  VersionId id;
  int64_t step = 0;
  // Its values are in memory, or on the disk with all tracks.
  bool can_restore = false;
  std::optional<VersionId> restored_from;  // Known only while its record is in memory.

  friend bool operator==(const KnownVersion&, const KnownVersion&) = default;
};

// Merges the records of `history` with the versions on the disk; newest first, each once.
std::vector<KnownVersion> MergeKnownVersions(const VersionHistory& history,
                                             absl::Span<const KnownVersion> on_disk);

// Finds the branch of `latest`: the versions that led to it, itself included, but not those that a
// rollback has discarded. A rollback to version v makes a new version with v's values and step:
// both are on the branch, and those between the two are not.
class BranchWalk {
 public:
  explicit BranchWalk(const Version& latest)
      : latest_(latest.id()), version_(latest.number + 1), step_(latest.step) {}

  // Whether a version is on the branch. Must be called for all versions in turn, newest first.
  // `restored_from`: where the branch continues after a rollback, if known.
  bool AdvanceIfOnBranch(const VersionId& id, int64_t step,
                         const std::optional<VersionId>& restored_from);

 private:
  const VersionId latest_;
  int64_t version_;  // The next version on the branch has a number below this,
  int64_t step_;     // and a step not above this.
};

// The versions of `known`, newest first, that are on the branch of `latest`.
std::vector<KnownVersion> BranchOf(absl::Span<const KnownVersion> known, const Version& latest);

// The version that an uninterrupted run would have had just after `step`, for a trainer that
// resumes there. `step` is before the newest version's; `branch` is a result of BranchOf(). Not
// every step makes a version, so the result is the version of `step`, or the last one before it if
// no other came in between. That is certain if the next version is known and is of a later step, or
// if `is_complete`: `branch` lacks no version. nullopt: it is not certain, or the version cannot be
// restored.
std::optional<VersionId> VersionAfterStep(absl::Span<const KnownVersion> branch, int64_t step,
                                          bool is_complete = false);

// The newest version of `step` on `branch` that can be restored; `branch` begins with the model's
// newest version. OUT_OF_RANGE: VERSION_NOT_YET, from StepNotYetError(); VERSION_NOT_KEPT: the
// message lists the nearest steps.
absl::StatusOr<VersionId> VersionAtStep(std::string_view model_name,
                                        absl::Span<const KnownVersion> branch, int64_t step);
// The error for a step after the newest version's: OUT_OF_RANGE, VERSION_NOT_YET.
absl::Status StepNotYetError(std::string_view model_name, int64_t step, const VersionId& latest,
                             int64_t latest_step);

// "step 10 (version 3), step 20 (version 4)": the 16 versions that can be restored whose steps are
// nearest to `step`, in the order of their steps; "none" if there are none.
std::string ListNearest(absl::Span<const KnownVersion> known, int64_t step);

}  // namespace ema

#endif  // EMA_SERVER_CORE_KNOWN_VERSIONS_H_
