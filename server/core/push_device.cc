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
#include "server/device/ema_kernel.h"

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
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kNonFinite,
                     absl::StrCat("step ", plan_.step, ": tensor \"",
                                  model_.manifest->tensor(first.tensor_index).name,
                                  "\" holds NaN or infinity at element ", first.element,
                                  ", pushed by rank ", rank, "; the step is dropped"));
  }
  for (const NonFiniteElement& element : elements) skipped_tensors_.insert(element.tensor_index);
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
  bool saw_non_finite = false;
  for (const std::shared_ptr<DeviceStream>& device_stream : draining) {
    const absl::StatusOr<bool> synchronized = device_stream->Synchronize();
    status.Update(synchronized.status());
    saw_non_finite |= synchronized.value_or(false);
  }
  Memory unused;
  absl::MutexLock lock(&mu_);
  unused = EndWorkLocked(rank);
  RankState& state = ranks_[rank];
  state.saw_non_finite |= saw_non_finite;
  state.device_status.Update(status);
  return state.device_status;
}

absl::Status PushSession::CheckFinite(int64_t rank) {
  {
    absl::MutexLock lock(&mu_);
    if (ended_.has_value()) return *ended_;
    if (!ranks_[rank].saw_non_finite || model_.non_finite == NonFinitePolicy::kAllow) {
      return absl::OkStatus();
    }
    BeginWorkLocked(rank);
  }
  absl::StatusOr<std::vector<NonFiniteElement>> elements = FindNonFinite(*run_->layout(rank));
  Memory unused;
  absl::MutexLock lock(&mu_);
  unused = EndWorkLocked(rank);
  EMA_RETURN_IF_ERROR(elements.status());
  if (elements->empty() && model_.non_finite == NonFinitePolicy::kReject) {
    // No track that is due keeps it.
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kNonFinite,
                     absl::StrCat("step ", plan_.step, ": a tensor pushed by rank ", rank,
                                  " holds NaN or infinity; the step is dropped"));
  }
  return TakeNonFiniteLocked(rank, *elements);
}

absl::StatusOr<std::vector<PushSession::NonFiniteElement>> PushSession::FindNonFinite(
    const RankLayout& layout) const {
  constexpr int64_t kMaxElements = int64_t{1} << 18;
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceStream> stream, model_.device->NewStream());
  std::vector<std::byte> host;
  std::vector<NonFiniteElement> found;
  absl::Status status;
  // Of one block's elements from `element` on, at most; how many there were.
  const auto look = [&](int64_t tensor_index, int64_t element,
                        int64_t count) -> absl::StatusOr<int64_t> {
    for (size_t t = 0; t < plan_.tracks.size(); ++t) {
      const TrackBlocks& next = memory_.next[t];
      if (next.blocks.empty() || !Changes(plan_.tracks[t], tensor_index)) continue;
      const Track& track = *plan_.tracks[t].track;
      const StorageLayout::Entry& entry = track.layout().entry(tensor_index);
      const int64_t size = DtypeSize(entry.dtype);
      const int64_t byte = entry.offset + element * size;
      const int64_t block = track.FindBlock(byte);
      count = std::min({count, (track.block_start(block + 1) - byte) / size, kMaxElements});
      host.resize(count * size);
      EMA_RETURN_IF_ERROR(stream->CopyToHost(
          host.data(), next.blocks[block]->data() + (byte - track.block_start(block)),
          count * size));
      EMA_RETURN_IF_ERROR(stream->Synchronize().status());
      // Without targets it only looks.
      if (const auto index = FoldOnCpu({entry.dtype, host.data(), count, {}})) {
        found.push_back({tensor_index, element + *index});
      }
      break;
    }
    return count;
  };
  layout.ForEachStretch(0, PushedBytes(layout), [&](const RankLayout::Stretch& stretch) {
    const int64_t end = stretch.tensor_element + stretch.element_count;
    for (int64_t element = stretch.tensor_element; element < end;) {
      const bool is_known = !found.empty() && found.back().tensor_index == stretch.tensor_index;
      if (is_known || !IsFloat(stretch.dtype)) break;
      const absl::StatusOr<int64_t> count = look(stretch.tensor_index, element, end - element);
      status = count.status();
      if (!status.ok()) return false;
      element += *count;
    }
    return true;
  });
  EMA_RETURN_IF_ERROR(status);
  return found;
}

}  // namespace ema
