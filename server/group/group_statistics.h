// SPDX-License-Identifier: Apache-2.0
//
// Statistics of models that are on several servers.
#ifndef EMA_SERVER_GROUP_GROUP_STATISTICS_H_
#define EMA_SERVER_GROUP_GROUP_STATISTICS_H_

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/v1/group.pb.h"
#include "ema/version_id.h"
#include "server/core/model.h"
#include "server/group/fan_out.h"
#include "server/group/model_record.h"

namespace ema::group {

using StatisticsCalls = FanOut<v1::GetPartStatisticsResponse>;

// As ComputeStatistics() for the model of which `home` is partition 0: of the tensors of all
// partitions. `start` sends the request to all other partitions, after setting the fields that
// identify the called process. The sums of the partitions are added in their order, so the results
// may differ from those of one server by some units in the last place. Errors also as `start` and
// of the calls.
absl::StatusOr<Version> ComputeGroupStatistics(
    Model& home, const VersionId& id, absl::Span<const std::string> tracks,
    const std::vector<Partition>& partitions,
    absl::FunctionRef<absl::Status(const v1::GetPartStatisticsRequest&, StatisticsCalls&)> start);

// Handles GroupService.GetPartStatistics for `partition`. If the version is not published here yet,
// waits some seconds for it.
absl::StatusOr<v1::GetPartStatisticsResponse> GetPartStatistics(
    Model& partition, const v1::GetPartStatisticsRequest& request);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_GROUP_STATISTICS_H_
