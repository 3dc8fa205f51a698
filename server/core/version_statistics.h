// SPDX-License-Identifier: Apache-2.0
//
// Statistics of a model's versions: norms of the averages, and their distances from the weights.
#ifndef EMA_SERVER_CORE_VERSION_STATISTICS_H_
#define EMA_SERVER_CORE_VERSION_STATISTICS_H_

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/version.h"
#include "ema/version_id.h"
#include "server/core/model.h"
#include "server/core/model_overview.h"
#include "server/core/snapshot.h"
#include "server/core/version_history.h"

namespace ema {

// Returns the record of a version (all zero: the newest) with the statistics of `tracks`, in that
// order; empty: of all tracks that average a tensor. The device computes missing statistics from
// the values in memory, and the record keeps them while it is remembered. Pins the version, and
// blocks until it has been read. Errors as VersionHistory::Pin() and TrackTable::FindIn().
// INVALID_ARGUMENT, BAD_REQUEST: a track averages nothing. RESOURCE_EXHAUSTED or INTERNAL: as
// Device::SumSquares().
absl::StatusOr<Version> ComputeStatistics(Model& model, const VersionId& id,
                                          absl::Span<const std::string> tracks);

// The statistics that a version's record keeps of a track; nullopt: none, or the record has been
// forgotten.
std::optional<TrackStatistics> FindStatistics(const VersionHistory& history, const VersionId& id,
                                              std::string_view track);

// The statistics of `tracks` over the tensors of one partition of a model, in that order, without
// the tracks that average none of them. `version` is the partition's. The record does not keep
// them. Blocks until the tensors have been read. Errors as ComputeStatistics().
absl::StatusOr<std::vector<TrackStatistics>> ComputePartStatistics(
    Model& partition, const Snapshot& version, absl::Span<const std::string> tracks);

// INVALID_ARGUMENT, BAD_REQUEST: statistics of a track that averages no tensor are requested.
absl::Status AveragesNothingError(const TrackSnapshot& track);

// The statistics in the remembered records, oldest first; if there are more than `limit`, `limit`
// of them at even distances.
std::vector<StatisticsPoint> StatisticsHistory(const VersionHistory& history, size_t limit);

}  // namespace ema

#endif  // EMA_SERVER_CORE_VERSION_STATISTICS_H_
