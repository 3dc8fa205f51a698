// SPDX-License-Identifier: Apache-2.0
//
// Statistics of a model's versions: norms of the averages, and their distances from the weights.
#ifndef EMA_SERVER_CORE_VERSION_STATISTICS_H_
#define EMA_SERVER_CORE_VERSION_STATISTICS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/model_info.h"
#include "ema/version_id.h"
#include "server/core/model.h"
#include "server/core/model_overview.h"
#include "server/core/version_history.h"

namespace ema {

// The record of a version (all zero: the newest), with the statistics of these of its tracks, in
// that order; none given: of all that average a tensor. The device computes them from the values in
// memory, then the record has them for as long as it is remembered. Pins the version meanwhile, and
// blocks for as long as it takes to read it. Errors as VersionHistory::Pin() and
// TrackTable::FindIn(). INVALID_ARGUMENT, BAD_REQUEST: a track averages nothing. RESOURCE_EXHAUSTED
// or INTERNAL: as Device::SumSquares().
absl::StatusOr<Version> ComputeStatistics(Model& model, const VersionId& id,
                                          absl::Span<const std::string> tracks);

// The statistics that the remembered records have, oldest first; of many, about `limit` at even
// distances.
std::vector<StatisticsPoint> StatisticsHistory(const VersionHistory& history, size_t limit);

}  // namespace ema

#endif  // EMA_SERVER_CORE_VERSION_STATISTICS_H_
