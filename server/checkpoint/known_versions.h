// SPDX-License-Identifier: Apache-2.0
//
// Which versions of a model there are, in memory and on the disk, and which of them a trainer that
// stands at some step is to go on from.
#ifndef EMA_SERVER_CHECKPOINT_KNOWN_VERSIONS_H_
#define EMA_SERVER_CHECKPOINT_KNOWN_VERSIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "ema/version_id.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"

namespace ema {

struct KnownVersion {
  VersionId id;
  int64_t step = 0;
  // Its values are in memory, or on the disk with all tracks.
  bool can_restore = false;
  std::optional<VersionId> restored_from;  // As far as it is in memory.

  friend bool operator==(const KnownVersion&, const KnownVersion&) = default;
};

// From the model's records and what is on the disk; newest first, each once.
std::vector<KnownVersion> KnownVersions(const Model& model,
                                        absl::Span<const CheckpointStore::Stored> stored);

// Of `known`, newest first, what `latest` has come from, itself included: not futures that were
// given up by going back. Where steps and versions grow together it is one branch; a version that
// was restored, and what came of restoring it, have the same step, and both are on it.
std::vector<KnownVersion> BranchOf(absl::Span<const KnownVersion> known,
                                   const VersionRecord& latest);

// The version on `branch` (as BranchOf() gives it) that an uninterrupted run has after `step`, a
// step before the newest version's: of that step, or the last one before, if the version after that
// is known to be of a later step, or `is_complete`: there was none between that is not on `branch`.
// nullopt: it is not known which, or cannot be restored.
std::optional<VersionId> VersionAfterStep(absl::Span<const KnownVersion> branch, int64_t step,
                                          bool is_complete = false);

// "step 10 (version 3), step 20 (version 4)": the 16 that can be restored with steps nearest to
// `step`, in the order of their steps; "none".
std::string ListNearest(absl::Span<const KnownVersion> known, int64_t step);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_KNOWN_VERSIONS_H_
