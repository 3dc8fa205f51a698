// SPDX-License-Identifier: Apache-2.0
#include "server/core/next_snapshot.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr int64_t kZerosBytes = int64_t{64} << 10;

// Finite, as JSON has no infinity: a weight may be tiny.
double Quotient(double dividend, double divisor) {
  return std::min(dividend / divisor, std::numeric_limits<double>::max());
}

// The new blocks; where there is none, the base's. References are moved: counting those of a
// thousand blocks up and down took most of a commit's time.
Blocks TakeBlocks(std::vector<std::shared_ptr<Block>>& next, const Blocks* base) {
  if (next.empty()) return base != nullptr ? *base : Blocks();
  Blocks blocks(std::make_move_iterator(next.begin()), std::make_move_iterator(next.end()));
  for (size_t i = 0; base != nullptr && i < blocks.size(); ++i) {
    if (blocks[i] == nullptr) blocks[i] = (*base)[i];
  }
  return blocks;
}

// The kept weights after an update, whose `state` and `values` are the new ones. `pushed`: the new
// blocks of its weights; where there is none, the newest weights' before.
std::vector<BlocksRef> TakeLatestWeights(const TrackPlan& plan, const TrackState& state,
                                         const Blocks& values,
                                         std::vector<std::shared_ptr<Block>>& pushed) {
  if (!plan.updates[0].due) return plan.base->latest_weights;
  if (state[0].averaged_count <= 1) return {std::make_shared<const Blocks>(values)};
  std::vector<BlocksRef> latest = plan.base->latest_weights;
  const BlocksRef newest = latest.back();
  const int64_t kept_count = plan.track->config().schedule.kept_weights_count();
  if (std::ssize(latest) == kept_count) latest.erase(latest.begin());
  latest.push_back(
      pushed.empty() ? newest : std::make_shared<const Blocks>(TakeBlocks(pushed, newest.get())));
  return latest;
}

// The weight in the dtype in which the track's averages are computed.
double AppliedWeight(const TrackPlan& plan, double weight) {
  return plan.track->config().dtype == Dtype::kFloat64 ? weight : static_cast<float>(weight);
}

}  // namespace

absl::StatusOr<std::unique_ptr<NextSnapshot>> NextSnapshot::Create(const ModelView& model,
                                                                   const TrainerRun& run,
                                                                   const StepPlan& plan,
                                                                   SnapshotRef base) {
  std::unique_ptr<NextSnapshot> next(new NextSnapshot(model, run, plan, std::move(base)));
  EMA_RETURN_IF_ERROR(next->Allocate());
  return next;
}

bool NextSnapshot::Changes(const TrackPlan& plan, int64_t tensor_index) const {
  const TensorAction action = plan.track->action(tensor_index);
  if (action == TensorAction::kIgnore) return false;
  if (plan_.omits_frozen && run_.is_frozen(tensor_index)) return false;
  const Schedule::Update& update = plan.updates[plan.track->schedule_index(tensor_index)];
  // With weight 0, also where it is held before its start, the average stays; a copy is always new.
  return update.due && (update.update_weight != 0 || action == TensorAction::kCopy);
}

bool NextSnapshot::IsAssigned(const TrackPlan& plan, int64_t tensor_index) {
  if (plan.track->action(tensor_index) == TensorAction::kCopy) return true;
  const double weight = plan.updates[plan.track->schedule_index(tensor_index)].update_weight;
  return AppliedWeight(plan, weight) == 1;
}

absl::Span<const BlocksRef> NextSnapshot::EarlierWeights(const TrackPlan& plan) {
  const Schedule::Update& update = plan.updates[0];
  const bool is_mean = plan.track->config().schedule.kept_weights_count() > 0 && update.due &&
                       update.update_weight > 0 && update.update_weight < 1;
  return is_mean ? plan.base->latest_weights : absl::Span<const BlocksRef>();
}

NonFiniteElement NextSnapshot::Locate(NonFiniteElement element) const {
  for (const TrackPlan& plan : plan_.tracks) {
    if (!Changes(plan, element.source_id)) continue;
    const StorageLayout& layout = plan.track->layout();
    while (true) {
      const StorageLayout::Entry& entry = layout.entry(element.source_id);
      const int64_t count = entry.length_bytes / DtypeSize(entry.dtype);
      if (element.element < count) return element;
      element.element -= count;
      ++element.source_id;
    }
  }
  return element;
}

absl::Status NextSnapshot::Allocate() {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceStream> stream, model_.device->NewStream());
  next_.resize(plan_.tracks.size());
  next_weights_.resize(plan_.tracks.size());
  bool needs_zeros = false;
  for (size_t t = 0; t < plan_.tracks.size(); ++t) {
    const TrackPlan& plan = plan_.tracks[t];
    if (!IsDue(plan.updates)) continue;
    const Blocks* const base = plan.base != nullptr ? &plan.base->blocks : nullptr;
    EMA_RETURN_IF_ERROR(AllocateTrack(plan, base, next_[t], *stream));
    if (const auto earlier = EarlierWeights(plan); !earlier.empty()) {
      EMA_RETURN_IF_ERROR(AllocateTrack(plan, earlier.back().get(), next_weights_[t], *stream));
    }
    needs_zeros |= std::any_of(plan.updates.begin(), plan.updates.end(),
                               [](const Schedule::Update& update) { return update.from_zero; });
  }
  if (needs_zeros) {
    EMA_ASSIGN_OR_RETURN(zeros_, model_.device->Allocate(kZerosBytes));
    EMA_RETURN_IF_ERROR(stream->Zero(zeros_->data(), kZerosBytes));
  }
  return stream->Synchronize().status();
}

absl::Status NextSnapshot::AllocateTrack(const TrackPlan& plan, const Blocks* base,
                                         TrackBlocks& next, DeviceStream& stream) const {
  const Track& track = *plan.track;
  const absl::Span<const StorageLayout::Entry> entries = track.layout().entries();
  std::vector<std::shared_ptr<Block>> blocks(track.block_count());
  std::vector<Range> kept;  // Adjacent tensors are one range.
  // On a GPU many small copies are slow: tensors between two kept ones in the same block are copied
  // with them, and then overwritten by the fold.
  const auto extends_range = [&](int64_t offset) {
    return !kept.empty() && !model_.device->is_host() &&
           track.FindBlock(kept.back().end - 1) == track.FindBlock(offset);
  };
  bool is_previous_kept = false;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].length_bytes == 0) continue;
    const bool is_kept = base != nullptr && !Changes(plan, i);
    if (is_kept) {
      if (!is_previous_kept && !extends_range(entries[i].offset)) {
        kept.push_back({.begin = entries[i].offset});
      }
      kept.back().end = entries[i].offset + entries[i].length_bytes;
    }
    is_previous_kept = is_kept;
    if (is_kept) continue;
    const int64_t last = track.FindBlock(entries[i].offset + entries[i].length_bytes - 1);
    for (int64_t block = track.FindBlock(entries[i].offset); block <= last; ++block) {
      if (blocks[block] != nullptr) continue;
      EMA_ASSIGN_OR_RETURN(blocks[block], model_.device->Allocate(track.block_size(block)));
    }
  }
  const auto is_null = [](const std::shared_ptr<Block>& block) { return block == nullptr; };
  if (std::all_of(blocks.begin(), blocks.end(), is_null)) return absl::OkStatus();
  next = std::move(blocks);
  for (const Range& range : kept) {
    EMA_RETURN_IF_ERROR(CopyFromBase(track, *base, next, range, stream));
  }

  // Padding between tensors is served to readers: it must not show what the memory held before.
  int64_t end = 0;
  for (const StorageLayout::Entry& entry : entries) {
    while (end < entry.offset) {
      const int64_t block = track.FindBlock(end);
      const int64_t n = std::min(entry.offset, track.block_start(block + 1)) - end;
      if (next[block] != nullptr) {
        EMA_RETURN_IF_ERROR(stream.Zero(next[block]->data() + end - track.block_start(block), n));
      }
      end += n;
    }
    end = entry.offset + entry.length_bytes;
  }
  return absl::OkStatus();
}

absl::Status NextSnapshot::CopyFromBase(const Track& track, const Blocks& base,
                                        const TrackBlocks& next, Range range,
                                        DeviceStream& stream) {
  for (int64_t byte = range.begin; byte < range.end;) {
    const int64_t block = track.FindBlock(byte);
    const int64_t in_block = byte - track.block_start(block);
    const int64_t n = std::min(range.end, track.block_start(block + 1)) - byte;
    byte += n;
    if (next[block] == nullptr) continue;
    EMA_RETURN_IF_ERROR(
        stream.Copy(next[block]->data() + in_block, base[block]->data() + in_block, n));
  }
  return absl::OkStatus();
}

absl::Status NextSnapshot::RestoreTensors(const absl::btree_set<int64_t>& tensors) const {
  if (tensors.empty()) return absl::OkStatus();
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceStream> stream, model_.device->NewStream());
  for (size_t t = 0; t < plan_.tracks.size(); ++t) {
    if (next_[t].empty()) continue;
    const TrackPlan& plan = plan_.tracks[t];
    for (const int64_t tensor : tensors) {
      const StorageLayout::Entry& entry = plan.track->layout().entry(tensor);
      const Range range{entry.offset, entry.offset + entry.length_bytes};
      EMA_RETURN_IF_ERROR(CopyFromBase(*plan.track, plan.base->blocks, next_[t], range, *stream));
      if (next_weights_[t].empty()) continue;
      EMA_RETURN_IF_ERROR(CopyFromBase(*plan.track, *EarlierWeights(plan).back(), next_weights_[t],
                                       range, *stream));
    }
  }
  return stream->Synchronize().status();
}

absl::StatusOr<std::shared_ptr<Snapshot>> NextSnapshot::Finish(
    const absl::btree_set<int64_t>& skipped, uint32_t frozen_crc32c) {
  EMA_RETURN_IF_ERROR(RestoreTensors(skipped));
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->record = NewRecord(skipped);
  snapshot->frozen_digest = FrozenDigest(frozen_crc32c);
  for (size_t t = 0; t < plan_.tracks.size(); ++t) {
    const TrackPlan& plan = plan_.tracks[t];
    if (plan.base == nullptr && !IsDue(plan.updates)) continue;
    snapshot->record.tracks.push_back(RecordOf(plan));
    snapshot->tracks.push_back(
        TakeTrack(t, snapshot->record.number, snapshot->frozen_digest, skipped));
  }
  return snapshot;
}

Version NextSnapshot::NewRecord(const absl::btree_set<int64_t>& skipped) const {
  Version record;
  // Nothing is committed between a session's start and its end.
  record.number = base_ != nullptr ? base_->record.number + 1 : 1;
  record.step = plan_.step;
  record.time = plan_.time;
  record.run_epoch = run_.epoch();
  record.wire_dtype = run_.layout(0)->wire_dtype();
  record.skipped_tensor_count = static_cast<int64_t>(skipped.size());
  for (const int64_t tensor : skipped) {
    if (record.skipped_tensors.size() == Version::kMaxNamedTensors) break;
    record.skipped_tensors.push_back(model_.manifest->tensor(tensor).name);
  }
  return record;
}

TrackSnapshot NextSnapshot::TakeTrack(size_t t, int64_t version, int64_t frozen_digest,
                                      const absl::btree_set<int64_t>& skipped) {
  const TrackPlan& plan = plan_.tracks[t];
  TrackBlocks& next = next_[t];
  TrackSnapshot track;
  track.track = plan.track;
  if (plan.base != nullptr) {
    track.last_steps = plan.base->last_steps;
    track.block_versions = plan.base->block_versions;
  }
  track.state = NextState(plan.track->config(), plan.state, plan.updates, plan_.time);
  track.last_steps.resize(plan.updates.size());
  for (size_t i = 0; i < plan.updates.size(); ++i) {
    if (plan.updates[i].due) track.last_steps[i] = plan_.step;
  }
  track.frozen_digest = FrozenDigestOf(plan, frozen_digest, skipped);
  track.block_versions.resize(std::max(track.block_versions.size(), next.size()));
  for (size_t i = 0; i < next.size(); ++i) {
    if (next[i] != nullptr) track.block_versions[i] = version;
  }
  track.blocks = TakeBlocks(next, plan.base != nullptr ? &plan.base->blocks : nullptr);
  if (plan.track->config().schedule.kept_weights_count() > 0) {
    track.latest_weights = TakeLatestWeights(plan, track.state, track.blocks, next_weights_[t]);
  }
  return track;
}

int64_t NextSnapshot::FrozenDigest(uint32_t frozen_crc32c) const {
  if (!run_.has_frozen()) return 0;
  if (plan_.omits_frozen) return base_->frozen_digest;
  return int64_t{run_.frozen_set_digest() ^ frozen_crc32c} + 1;
}

int64_t NextSnapshot::FrozenDigestOf(const TrackPlan& plan, int64_t pushed,
                                     const absl::btree_set<int64_t>& skipped) const {
  // An average that equals a value stays equal to it, unless it begins with zeros.
  const bool is_equal = plan.base != nullptr && plan.base->frozen_digest == pushed;
  for (int64_t i = 0; i < model_.manifest->tensor_count(); ++i) {
    if (!run_.is_frozen(i) || plan.track->action(i) == TensorAction::kIgnore) continue;
    if (skipped.contains(i)) return 0;
    const Schedule::Update& update = plan.updates[plan.track->schedule_index(i)];
    const bool changes = Changes(plan, i);
    if (changes && IsAssigned(plan, i)) continue;
    // Infinity minus infinity is no number.
    const bool stays_equal = !update.from_zero && model_.non_finite != NonFinitePolicy::kAllow;
    if (!is_equal || (changes && !stays_equal)) return 0;
  }
  return pushed;
}

TrackVersion NextSnapshot::ScheduleRecord(const TrackPlan& plan, size_t i) const {
  // Half of the distance between 1 and the next larger number of the dtype.
  const double unit = plan.track->config().dtype == Dtype::kFloat64 ? 0x1p-53 : 0x1p-24;
  const Schedule& schedule = *SchedulesOf(plan.track->config())[i];
  const Schedule::Update& update = plan.updates[i];
  const bool has_state = plan.base != nullptr && i < plan.base->state.size();
  const Schedule::State next =
      schedule.Next(i < plan.state.size() ? plan.state[i] : Schedule::State(), update, plan_.time);
  TrackVersion record{.updated = update.due,
                      .elapsed = update.elapsed,
                      .update_count = next.update_count,
                      .averaged_count = next.averaged_count,
                      .config = schedule.ToString()};
  const double weight = update.update_weight;
  if (!update.due || weight == 0) return record;
  record.update_weight = AppliedWeight(plan, weight);
  const int64_t steps = has_state ? plan_.step - plan.base->last_steps[i] : 1;
  record.window_steps = Quotient(static_cast<double>(steps), weight);
  // A mean of the last k is computed again at each update, so it cannot stall.
  const bool can_stall = !schedule.is_copy() && schedule.kept_weights_count() == 0;
  if (can_stall && weight < 1) record.stall_gap = Quotient(unit, weight);
  return record;
}

TrackVersion NextSnapshot::RecordOf(const TrackPlan& plan) const {
  TrackVersion record = ScheduleRecord(plan, 0);
  record.track = plan.track->name();
  record.config = plan.track->config_text();
  for (const TensorRule& rule : plan.track->config().tensor_rules) {
    if (!rule.schedule.has_value()) continue;
    record.rules.push_back(ScheduleRecord(plan, record.rules.size() + 1));
    record.rules.back().track = rule.pattern;
  }
  return record;
}

}  // namespace ema
