// SPDX-License-Identifier: Apache-2.0
//
// Decides which member of a group has which tensors of a model.
#ifndef EMA_SERVER_GROUP_PLACEMENT_H_
#define EMA_SERVER_GROUP_PLACEMENT_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/group/model_record.h"

namespace ema::group {

// Cuts a model's tensors into contiguous runs of whole tensors, one for each member, or fewer if
// there are fewer tensors. The largest run has as few bytes as any such cut permits; within that
// limit each run is as near as possible to an even share. The result depends on the arguments only,
// in all versions of the program.
//
// `tensor_bytes`: by tensor, the memory that it takes on its member, in all tracks and versions
// together. `members`: by name. Partitions follow the order of the names; a checksum of the model's
// name chooses the member of partition 0, so that the homes of many models are spread.
// REQUIRES: there is a tensor, no size is negative, and their sum does not overflow.
//
// UNAVAILABLE: there are no members. RESOURCE_EXHAUSTED, MEMORY_BUDGET: a run needs more than the
// member's free memory.
absl::StatusOr<std::vector<Partition>> PlaceTensors(
    std::string_view model, absl::Span<const int64_t> tensor_bytes,
    const std::map<std::string, MemberRecord>& members);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_PLACEMENT_H_
