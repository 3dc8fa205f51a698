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

// A member on which partitions can be placed.
struct Candidate {
  std::string boot;
  int64_t memory_budget_bytes = 0;
  int64_t free_memory_bytes = 0;
};
using Candidates = std::map<std::string, Candidate>;  // By the member's name.

// All members, for a placement of `model`. Their free memory is the budget without what the tracks
// of all other models need. Attached files and the layouts of runs are not counted.
Candidates CandidatesFor(std::string_view model, const std::map<std::string, MemberRecord>& members,
                         const std::map<std::string, ModelRecord>& models);

// Sets Partition::memory_bytes. `tensor_bytes`: as for PlaceTensors().
void SetMemoryBytes(absl::Span<const int64_t> tensor_bytes, std::vector<Partition>& partitions);

// Cuts a model's tensors into contiguous runs of whole tensors, one for each member, or fewer if
// there are fewer tensors. The largest run has as few bytes as any such cut permits; within that
// limit each run is as near as possible to an even share. The result depends on the arguments only,
// in all versions of the program.
//
// `tensor_bytes`: by tensor, the memory that it takes on its member, in all tracks and versions
// together. Partitions follow the order of the members' names; a checksum of the model's name
// chooses the member of partition 0, so that the homes of many models are spread.
// REQUIRES: there is a tensor, no size is negative, and their sum does not overflow.
//
// UNAVAILABLE: there are no candidates. RESOURCE_EXHAUSTED, MEMORY_BUDGET: a run needs more than
// the member's free memory.
absl::StatusOr<std::vector<Partition>> PlaceTensors(std::string_view model,
                                                    absl::Span<const int64_t> tensor_bytes,
                                                    const Candidates& candidates);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_PLACEMENT_H_
