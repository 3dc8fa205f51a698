// SPDX-License-Identifier: Apache-2.0
//
// The part of PushSession that makes the next snapshot: its blocks at the start; the wait for
// devices that write them on their own, and tell only afterwards what they have found; what it says
// at the end.
#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/core/push_session.h"

namespace ema {
namespace {

constexpr int64_t kZerosBytes = int64_t{64} << 10;

// JSON has no infinity, and a weight may be next to nothing.
double Quotient(double dividend, double divisor) {
  return std::min(dividend / divisor, std::numeric_limits<double>::max());
}

// The track's values of the tensor become those that are pushed.
bool IsAssigned(const Track& track, int64_t tensor_index, const Schedule::Update& update) {
  if (track.action(tensor_index) == TensorAction::kCopy) return true;
  return track.config().compensated ? update.update_weight == 1
                                    : static_cast<float>(update.update_weight) == 1;
}

// The new blocks, and the base's (null: there is none) where there are none. References are moved:
// to count those of a thousand blocks up and down took most of a commit.
Blocks TakeBlocks(std::vector<std::shared_ptr<Block>>& next, const Blocks* base) {
  if (next.empty()) return base != nullptr ? *base : Blocks();
  Blocks blocks(std::make_move_iterator(next.begin()), std::make_move_iterator(next.end()));
  for (size_t i = 0; base != nullptr && i < blocks.size(); ++i) {
    if (blocks[i] == nullptr) blocks[i] = (*base)[i];
  }
  return blocks;
}

}  // namespace

absl::Status PushSession::Allocate() {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceStream> stream, model_.device->NewStream());
  memory_.next.resize(plan_.tracks.size());
  bool needs_zeros = false;
  for (size_t t = 0; t < plan_.tracks.size(); ++t) {
    const TrackPlan& plan = plan_.tracks[t];
    if (!IsDue(plan.updates)) continue;
    EMA_RETURN_IF_ERROR(AllocateTrack(plan, memory_.next[t], *stream));
    needs_zeros |= std::any_of(plan.updates.begin(), plan.updates.end(),
                               [](const Schedule::Update& update) { return update.from_zero; });
  }
  if (needs_zeros) {
    EMA_ASSIGN_OR_RETURN(memory_.zeros, model_.device->Allocate(kZerosBytes));
    EMA_RETURN_IF_ERROR(stream->Zero(memory_.zeros->data(), kZerosBytes));
  }
  return stream->Synchronize().status();
}

absl::Status PushSession::AllocateTrack(const TrackPlan& plan, TrackBlocks& next,
                                        DeviceStream& stream) const {
  const Track& track = *plan.track;
  const absl::Span<const StorageLayout::Entry> entries = track.layout().entries();
  std::vector<std::shared_ptr<Block>> blocks(track.block_count());
  std::vector<Range> kept;  // Neighbours are one.
  // On a GPU a copy costs more than its bytes: what changes between two that are kept is copied
  // with them, if that is less than a block, and folded over.
  const auto goes_on = [&](int64_t offset) {
    return !kept.empty() && !model_.device->is_host() &&
           track.FindBlock(kept.back().end - 1) == track.FindBlock(offset);
  };
  bool is_previous_kept = false;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].length_bytes == 0) continue;
    const bool is_kept = plan.base != nullptr && !Changes(plan, i);
    if (is_kept) {
      if (!is_previous_kept && !goes_on(entries[i].offset)) {
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
  if (track.config().compensated) {
    for (const std::shared_ptr<Block>& block : blocks) {
      std::shared_ptr<Block>& low_block = next.low_blocks.emplace_back();
      if (block == nullptr) continue;
      EMA_ASSIGN_OR_RETURN(low_block, model_.device->Allocate(block->size_bytes()));
    }
  }
  next.blocks = std::move(blocks);
  for (const Range& range : kept) EMA_RETURN_IF_ERROR(CopyFromBase(plan, next, range, stream));

  // Padding between tensors is served to readers: it must not show what the memory held before.
  int64_t end = 0;
  for (const StorageLayout::Entry& entry : entries) {
    while (end < entry.offset) {
      const int64_t block = track.FindBlock(end);
      const int64_t n = std::min(entry.offset, track.block_start(block + 1)) - end;
      for (const auto* padded : {&next.blocks, &next.low_blocks}) {
        if (padded->empty() || (*padded)[block] == nullptr) continue;
        EMA_RETURN_IF_ERROR(
            stream.Zero((*padded)[block]->data() + end - track.block_start(block), n));
      }
      end += n;
    }
    end = entry.offset + entry.length_bytes;
  }
  return absl::OkStatus();
}

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
                     "; the step is dropped",
                     // Such as an attention mask: no later step is any better.
                     tensor.is_buffer ? "; if the buffer is meant to hold them, make the model "
                                        "anew with tracks that ignore it, and do not push it"
                                      : ""));
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

absl::Status PushSession::AwaitDevice(int64_t rank, std::optional<int64_t> stream) {
  std::vector<std::shared_ptr<DeviceStream>> awaited;
  {
    absl::MutexLock lock(&mu_);
    RankState& state = ranks_[rank];
    const auto is_idle = [&state]() { return state.work_count == 0; };
    if (!stream.has_value()) mu_.Await(absl::Condition(&is_idle));
    for (auto it = queued_.lower_bound({rank, stream.value_or(0)});
         it != queued_.end() && it->first.first == rank;) {
      if (stream.value_or(it->first.second) != it->first.second) break;
      awaited.push_back(std::move(it->second));
      it = queued_.erase(it);
    }
    if (awaited.empty()) return state.device_status;
    BeginWorkLocked(rank);
  }
  absl::Status status;
  std::vector<NonFiniteElement> non_finite;
  for (const std::shared_ptr<DeviceStream>& device_stream : awaited) {
    const auto told = CatchExceptions([&] { return device_stream->Synchronize(); });
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
  absl::btree_map<int64_t, int64_t> found = ranks_[rank].non_finite;
  std::vector<NonFiniteElement> elements;
  // In the order in which a device that tells at once tells of them, so that both name the same.
  for (const Shard& shard : run_->layout(rank)->shards()) {
    if (found.empty()) break;
    const auto it = found.find(shard.tensor_index);
    if (it == found.end()) continue;
    elements.push_back({it->first, it->second});
    found.erase(it);
  }
  return TakeNonFiniteLocked(rank, elements);
}

absl::Status PushSession::CopyFromBase(const TrackPlan& plan, const TrackBlocks& next, Range range,
                                       DeviceStream& stream) {
  const Track& track = *plan.track;
  for (int64_t byte = range.begin; byte < range.end;) {
    const int64_t block = track.FindBlock(byte);
    const int64_t in_block = byte - track.block_start(block);
    const int64_t n = std::min(range.end, track.block_start(block + 1)) - byte;
    byte += n;
    if (next.blocks[block] == nullptr) continue;
    EMA_RETURN_IF_ERROR(stream.Copy(next.blocks[block]->data() + in_block,
                                    plan.base->blocks[block]->data() + in_block, n));
    if (next.low_blocks.empty()) continue;
    EMA_RETURN_IF_ERROR(stream.Copy(next.low_blocks[block]->data() + in_block,
                                    plan.base->low_blocks[block]->data() + in_block, n));
  }
  return absl::OkStatus();
}

absl::Status PushSession::RestoreTensors(const Memory& memory,
                                         const absl::btree_set<int64_t>& tensors) const {
  if (tensors.empty()) return absl::OkStatus();
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceStream> stream, model_.device->NewStream());
  for (size_t t = 0; t < plan_.tracks.size(); ++t) {
    if (memory.next[t].blocks.empty()) continue;
    for (const int64_t tensor : tensors) {
      const StorageLayout::Entry& entry = plan_.tracks[t].track->layout().entry(tensor);
      const Range range{entry.offset, entry.offset + entry.length_bytes};
      EMA_RETURN_IF_ERROR(CopyFromBase(plan_.tracks[t], memory.next[t], range, *stream));
    }
  }
  return stream->Synchronize().status();
}

absl::StatusOr<PushSession::Taken> PushSession::TakeSnapshot() {
  constexpr size_t kNamedTensors = 16;
  absl::btree_set<int64_t> skipped;
  {
    absl::MutexLock lock(&mu_);
    if (ended_.has_value()) return Taken();
    ++work_count_;  // So that an End() meanwhile does not free the memory.
    skipped = skipped_tensors_;
  }
  const absl::Cleanup let_go = [this] {
    Memory unused;  // Destroyed without the lock.
    absl::MutexLock lock(&mu_);
    --work_count_;
    unused = TakeUnusedMemoryLocked();
  };
  // All ranks have committed: nobody folds any more.
  EMA_RETURN_IF_ERROR(RestoreTensors(memory_, skipped));
  auto snapshot = std::make_shared<Snapshot>();
  Version& record = snapshot->record;
  // Nothing is committed between a session's start and its end.
  record.number = memory_.base != nullptr ? memory_.base->record.number + 1 : 1;
  record.step = plan_.step;
  record.time = plan_.time;
  record.run_epoch = run_->epoch();
  record.wire_dtype = run_->layout(0)->wire_dtype();
  record.skipped_tensor_count = static_cast<int64_t>(skipped.size());
  for (const int64_t tensor : skipped) {
    if (record.skipped_tensors.size() == kNamedTensors) break;
    record.skipped_tensors.push_back(model_.manifest->tensor(tensor).name);
  }
  snapshot->frozen_digest = FrozenDigest();
  for (size_t t = 0; t < plan_.tracks.size(); ++t) {
    const TrackPlan& plan = plan_.tracks[t];
    if (plan.base == nullptr && !IsDue(plan.updates)) continue;
    record.tracks.push_back(RecordOf(plan));
    TrackBlocks& next = memory_.next[t];
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
    track.frozen_digest = FrozenDigestOf(plan, snapshot->frozen_digest, skipped);
    track.block_versions.resize(std::max(track.block_versions.size(), next.blocks.size()));
    for (size_t i = 0; i < next.blocks.size(); ++i) {
      if (next.blocks[i] != nullptr) track.block_versions[i] = record.number;
    }
    track.blocks = TakeBlocks(next.blocks, plan.base != nullptr ? &plan.base->blocks : nullptr);
    track.low_blocks =
        TakeBlocks(next.low_blocks, plan.base != nullptr ? &plan.base->low_blocks : nullptr);
    snapshot->tracks.push_back(std::move(track));
  }
  return Taken{memory_.end, std::move(snapshot)};
}

int64_t PushSession::FrozenDigest() const {
  if (!run_->has_frozen()) return 0;
  if (plan_.omits_frozen) return memory_.base->frozen_digest;
  uint32_t crc32c = run_->frozen_set_digest();
  absl::MutexLock lock(&mu_);
  for (const RankState& rank : ranks_) crc32c ^= rank.frozen_crc32c;
  return int64_t{crc32c} + 1;
}

int64_t PushSession::FrozenDigestOf(const TrackPlan& plan, int64_t pushed,
                                    const absl::btree_set<int64_t>& skipped) const {
  // An average that equals a value stays equal to it, unless it begins with zeros.
  const bool is_equal = plan.base != nullptr && plan.base->frozen_digest == pushed;
  for (int64_t i = 0; i < model_.manifest->tensor_count(); ++i) {
    if (!run_->is_frozen(i) || plan.track->action(i) == TensorAction::kIgnore) continue;
    if (skipped.contains(i)) return 0;
    const Schedule::Update& update = plan.updates[plan.track->schedule_index(i)];
    const bool changes = Changes(plan, i);
    if (changes && IsAssigned(*plan.track, i, update)) continue;
    if (!is_equal || (changes && update.from_zero)) return 0;
  }
  return pushed;
}

TrackVersion PushSession::ScheduleRecord(const TrackPlan& plan, size_t i) const {
  // Bits of a float32's fraction, the hidden one included.
  constexpr double kFloatUnit = 0x1p-24;
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
  const bool is_compensated = plan.track->config().compensated;
  record.update_weight = is_compensated ? weight : static_cast<float>(weight);
  const int64_t steps = has_state ? plan_.step - plan.base->last_steps[i] : 1;
  record.window_steps = Quotient(static_cast<double>(steps), weight);
  if (!schedule.is_copy() && !is_compensated && weight < 1) {
    record.stall_gap = Quotient(kFloatUnit, weight);
  }
  return record;
}

TrackVersion PushSession::RecordOf(const TrackPlan& plan) const {
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
