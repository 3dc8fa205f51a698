// SPDX-License-Identifier: Apache-2.0
//
// The part of PushSession that waits for devices which work on their own, and takes what they tell
// only afterwards.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/push_session.h"

namespace ema {

PushSession::Writers::~Writers() {
  for (const std::shared_ptr<DeviceStream>& stream : streams) {
    stream->Synchronize().status().IgnoreError();
  }
}

absl::Status PushSession::TakeNonFiniteLocked(int64_t rank,
                                              absl::Span<const NonFiniteElement> elements) {
  if (elements.empty() || model_.non_finite == NonFinitePolicy::kAllow) return absl::OkStatus();
  // A tensor can be skipped where it has a value that it may keep.
  const bool has_base = std::all_of(
      plan_.tracks.begin(), plan_.tracks.end(),
      [](const TrackPlan& plan) { return plan.base != nullptr || !IsDue(plan.updates); });
  if (model_.non_finite == NonFinitePolicy::kReject || !has_base) {
    const NonFiniteElement& first = elements.front();
    const TensorSpec& tensor = model_.manifest->tensor(first.source_id);
    return MakeError(
        absl::StatusCode::kInvalidArgument, ErrorReason::kNonFinite,
        absl::StrCat("step ", plan_.step, ": tensor \"", tensor.name, "\" holds NaN or infinity",
                     tensor.dtype == Dtype::kFloat64 ? ", or more than a float32 can," : "",
                     " at element ", first.element, ", pushed by rank ", rank,
                     "; the step is dropped"));
  }
  for (const NonFiniteElement& element : elements) skipped_tensors_.insert(element.source_id);
  return absl::OkStatus();
}

void PushSession::BeginWorkLocked(int64_t rank) {
  ++work_count_;
  ++ranks_[rank].work_count;
}

PushSession::Memory PushSession::EndWorkLocked(int64_t rank) {
  --work_count_;
  --ranks_[rank].work_count;
  return TakeUnusedMemoryLocked();
}

absl::Status PushSession::Drain(int64_t rank, std::optional<int64_t> stream) {
  std::vector<std::shared_ptr<DeviceStream>> draining;
  {
    absl::MutexLock lock(&mu_);
    RankState& state = ranks_[rank];
    const auto is_idle = [&state]() { return state.work_count == 0; };
    if (!stream.has_value()) mu_.Await(absl::Condition(&is_idle));
    for (auto it = queued_.lower_bound({rank, stream.value_or(0)});
         it != queued_.end() && it->first.first == rank;) {
      if (stream.value_or(it->first.second) != it->first.second) break;
      draining.push_back(std::move(it->second));
      it = queued_.erase(it);
    }
    if (draining.empty()) return state.device_status;
    BeginWorkLocked(rank);
  }
  absl::Status status;
  std::vector<NonFiniteElement> non_finite;
  for (const std::shared_ptr<DeviceStream>& device_stream : draining) {
    const absl::StatusOr<std::vector<NonFiniteElement>> told = device_stream->Synchronize();
    status.Update(told.status());
    if (told.ok()) non_finite.insert(non_finite.end(), told->begin(), told->end());
  }
  Memory unused;
  absl::MutexLock lock(&mu_);
  unused = EndWorkLocked(rank);
  RankState& state = ranks_[rank];
  for (const NonFiniteElement& told : non_finite) {
    const auto [tensor, element] = Locate(told);
    int64_t& first = state.non_finite.try_emplace(tensor, element).first->second;
    first = std::min(first, element);
  }
  state.device_status.Update(status);
  return state.device_status;
}

absl::Status PushSession::CheckFiniteLocked(int64_t rank) {
  const absl::btree_map<int64_t, int64_t>& found = ranks_[rank].non_finite;
  std::vector<NonFiniteElement> elements;
  // In the order in which a device that tells at once tells of them, so that both name the same.
  for (const Shard& shard : run_->layout(rank)->shards()) {
    if (elements.size() == found.size()) break;
    const auto it = found.find(shard.tensor_index);
    if (it != found.end()) elements.push_back({it->first, it->second});
  }
  return TakeNonFiniteLocked(rank, elements);
}

}  // namespace ema
