// SPDX-License-Identifier: Apache-2.0
#include "server/group/placement.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "server/base/crc32c.h"

namespace ema::group {
namespace {

// The bytes before each tensor, and those of all tensors.
using Offsets = std::vector<int64_t>;

// Element r: the first tensor from which all tensors to the last fit into r runs of at most
// `run_bytes`. REQUIRES: every tensor fits into a run.
std::vector<size_t> SuffixStarts(const Offsets& offsets, int64_t run_bytes, size_t run_count) {
  std::vector<size_t> starts = {offsets.size() - 1};
  for (size_t i = 0; i < run_count; ++i) {
    const auto start =
        std::lower_bound(offsets.begin(), offsets.end(), offsets[starts.back()] - run_bytes);
    starts.push_back(static_cast<size_t>(start - offsets.begin()));
  }
  return starts;
}

// The bytes of the largest run in the best cut into `run_count` runs.
int64_t LargestRunBytes(const Offsets& offsets, int64_t largest_tensor_bytes, size_t run_count) {
  int64_t least = largest_tensor_bytes;
  int64_t most = offsets.back();
  while (least < most) {
    const int64_t middle = least + (most - least) / 2;
    if (SuffixStarts(offsets, middle, run_count).back() == 0) {
      most = middle;
    } else {
      least = middle + 1;
    }
  }
  return least;
}

// An even share of the tensors from `begin` on, where each tensor larger than that has a run of its
// own.
int64_t EvenShareBytes(const Offsets& offsets, size_t begin, size_t run_count) {
  for (int64_t share = INT64_MAX;;) {
    int64_t bytes = offsets.back() - offsets[begin];
    auto runs = static_cast<int64_t>(run_count);
    for (size_t i = begin; i + 1 < offsets.size(); ++i) {
      const int64_t tensor_bytes = offsets[i + 1] - offsets[i];
      if (tensor_bytes <= share) continue;
      bytes -= tensor_bytes;
      --runs;
    }
    if (bytes / runs == share) return share;
    share = bytes / runs;
  }
}

// Where each run ends: the index after its last tensor. No run is empty.
std::vector<size_t> CutEvenly(const Offsets& offsets, int64_t run_bytes, size_t run_count) {
  const std::vector<size_t> starts = SuffixStarts(offsets, run_bytes, run_count);
  const size_t tensor_count = offsets.size() - 1;
  std::vector<size_t> ends;
  size_t begin = 0;
  for (size_t runs_after = run_count; runs_after-- > 0;) {
    // The tensors after the end must fit into the runs after this one, and each has at least one.
    const auto limit =
        std::upper_bound(offsets.begin(), offsets.end(), offsets[begin] + run_bytes) - 1;
    const size_t least = std::max(begin + 1, starts[runs_after]);
    const size_t most =
        std::min(static_cast<size_t>(limit - offsets.begin()), tensor_count - runs_after);
    const int64_t target = offsets[begin] + EvenShareBytes(offsets, begin, runs_after + 1);
    const auto it = std::lower_bound(offsets.begin() + static_cast<std::ptrdiff_t>(least),
                                     offsets.begin() + static_cast<std::ptrdiff_t>(most), target);
    auto end = static_cast<size_t>(it - offsets.begin());
    if (end > least && target - offsets[end - 1] <= offsets[end] - target) --end;
    ends.push_back(end);
    begin = end;
  }
  return ends;
}

}  // namespace

Candidates CandidatesFor(std::string_view model, const std::map<std::string, MemberRecord>& members,
                         const std::map<std::string, ModelRecord>& models) {
  Candidates candidates;
  for (const auto& [name, member] : members) {
    candidates[name] = {member.boot, member.memory_budget_bytes, member.memory_budget_bytes};
  }
  for (const auto& [name, record] : models) {
    if (name == model) continue;
    for (const Partition& partition : record.partitions) {
      const auto found = candidates.find(partition.member);
      if (found == candidates.end()) continue;
      int64_t& free = found->second.free_memory_bytes;
      free -= std::min(free, partition.memory_bytes);
    }
  }
  return candidates;
}

void SetMemoryBytes(absl::Span<const int64_t> tensor_bytes, std::vector<Partition>& partitions) {
  for (Partition& partition : partitions) {
    const auto first = tensor_bytes.begin() + partition.first_tensor;
    partition.memory_bytes = std::accumulate(first, first + partition.tensor_count, int64_t{0});
  }
}

absl::StatusOr<std::vector<Partition>> PlaceTensors(std::string_view model,
                                                    absl::Span<const int64_t> tensor_bytes,
                                                    const Candidates& candidates) {
  if (candidates.empty()) {
    return absl::UnavailableError(
        absl::StrCat("model \"", std::string(model), "\": the group has no members"));
  }
  Offsets offsets = {0};
  for (const int64_t bytes : tensor_bytes) offsets.push_back(offsets.back() + bytes);
  const size_t run_count = std::min(candidates.size(), tensor_bytes.size());
  const int64_t run_bytes = LargestRunBytes(
      offsets, *std::max_element(tensor_bytes.begin(), tensor_bytes.end()), run_count);

  const uint32_t home = Crc32c(0, std::as_bytes(std::span(model))) % candidates.size();
  auto member = std::next(candidates.begin(), home);
  std::vector<Partition> partitions;
  size_t begin = 0;
  for (const size_t end : CutEvenly(offsets, run_bytes, run_count)) {
    const auto& [name, candidate] = *member;
    const int64_t needed = offsets[end] - offsets[begin];
    if (needed > candidate.free_memory_bytes) {
      // If the member is large enough, a model may be deleted by then.
      const absl::Duration retry_delay =
          needed <= candidate.memory_budget_bytes ? absl::Seconds(10) : absl::ZeroDuration();
      return MakeError(
          absl::StatusCode::kResourceExhausted, ErrorReason::kMemoryBudget,
          absl::StrCat("model \"", std::string(model), "\": partition ", partitions.size(),
                       ", tensors ", begin, " to ", end - 1, ", needs ", needed,
                       " bytes of member \"", name, "\", ", needed - candidate.free_memory_bytes,
                       " too many; ", candidate.free_memory_bytes, " of its ",
                       candidate.memory_budget_bytes, " are free"),
          retry_delay);
    }
    partitions.push_back({.member = name,
                          .boot = candidate.boot,
                          .first_tensor = static_cast<int64_t>(begin),
                          .tensor_count = static_cast<int64_t>(end - begin),
                          .memory_bytes = needed});
    if (++member == candidates.end()) member = candidates.begin();
    begin = end;
  }
  return partitions;
}

}  // namespace ema::group
