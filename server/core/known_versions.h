// SPDX-License-Identifier: Apache-2.0
//
// Which versions of a model there are, in memory and on the disk; and which of them belongs to a
// step, for a reader, or for a trainer that goes on from there.
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
  std::optional<VersionId> restored_from;  // As far as it is in memory.

  friend bool operator==(const KnownVersion&, const KnownVersion&) = default;
};

// From the records of `history` and what is on the disk; newest first, each once.
std::vector<KnownVersion> KnownVersions(const VersionHistory& history,
                                        absl::Span<const KnownVersion> on_disk);

// Says which versions `latest` has come from, itself included: its branch. Versions that a rollback
// has given up are not on it. A rollback to version v makes a new version with v's values and step:
// both are on the branch, and those between the two are not.
class BranchWalk {
 public:
  explicit BranchWalk(const Version& latest)
      : latest_(latest.id()), version_(latest.number + 1), step_(latest.step) {}

  // True: it is on the branch. To be asked of versions in turn, newest first. One that was restored
  // goes on with what it was restored from, as far as that is known.
  bool Takes(const VersionId& id, int64_t step, const std::optional<VersionId>& restored_from);

 private:
  const VersionId latest_;
  int64_t version_;  // What is on the branch and before those that it has taken is before this,
  int64_t step_;     // and not after this.
};

// Those of `known`, newest first, that are on the branch of `latest`.
std::vector<KnownVersion> BranchOf(absl::Span<const KnownVersion> known, const Version& latest);

// The version that an uninterrupted run would have had just after `step`, for a trainer that goes
// on from there. `step` is before the newest version's; `branch` is as BranchOf() gives it. It is
// the version of that step; or, as not every step makes a version, the last one before it, if it is
// certain that no version came in between: because the next version is known and is of a later
// step, or because `is_complete`: `branch` lacks none. nullopt: that is not certain, or the version
// cannot be restored.
std::optional<VersionId> VersionAfterStep(absl::Span<const KnownVersion> branch, int64_t step,
                                          bool is_complete = false);

// The newest version of `step` on `branch`, which begins with the model's newest version, of those
// whose values are there. OUT_OF_RANGE: VERSION_NOT_YET, as StepNotYet(); VERSION_NOT_KEPT, listing
// the steps next to it.
absl::StatusOr<VersionId> VersionAtStep(std::string_view model_name,
                                        absl::Span<const KnownVersion> branch, int64_t step);
// OUT_OF_RANGE, VERSION_NOT_YET: training has come to `latest` only.
absl::Status StepNotYet(std::string_view model_name, int64_t step, const VersionId& latest,
                        int64_t latest_step);

// "step 10 (version 3), step 20 (version 4)": the 16 that can be restored with steps nearest to
// `step`, in the order of their steps; "none".
std::string ListNearest(absl::Span<const KnownVersion> known, int64_t step);

}  // namespace ema

#endif  // EMA_SERVER_CORE_KNOWN_VERSIONS_H_
