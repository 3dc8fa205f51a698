// SPDX-License-Identifier: Apache-2.0
//
// The configurations of a model's partitions.
#ifndef EMA_SERVER_GROUP_PARTITION_CONFIG_H_
#define EMA_SERVER_GROUP_PARTITION_CONFIG_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/core/model_config.h"
#include "server/group/model_record.h"

namespace ema::group {

// By tensor of the model, the memory that it needs in all tracks and versions together.
// RESOURCE_EXHAUSTED, MEMORY_BUDGET: the sum overflows.
absl::StatusOr<std::vector<int64_t>> TensorBytes(const ModelConfig& config);

// `whole` with only the tensors of `place`. INVALID_ARGUMENT, BAD_REQUEST: there are no such
// tensors.
absl::StatusOr<ModelConfig> PartitionConfig(const ModelConfig& whole, const Partition& place);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_PARTITION_CONFIG_H_
