// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/staged_chunks.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {

StagedChunks::StagedChunks(const RankLayout* layout, const ChunkPlan* plan,
                           absl::Span<const std::span<const std::byte>> shards,
                           absl::Span<Gpu* const> gpus, PinnedRing* ring, WeightsGate* gate,
                           absl::Span<const Strides> strides, SteadyTime deadline,
                           Interrupt* interrupt)
    : layout_(layout),
      plan_(plan),
      weights_(layout, shards, strides),
      gpus_(gpus),
      ring_(ring),
      gate_(gate),
      deadline_(deadline),
      interrupt_(interrupt) {}

StagedChunks::~StagedChunks() { Drop(); }

int64_t StagedChunks::SlotBytes(const RankLayout& layout, const ChunkPlan& plan) {
  const int64_t chunk_bytes = std::min(plan.max_chunk_bytes(), layout.total_bytes());
  // Weights that are rounded for the wire are given in float32.
  return layout.wire_dtype() == WireDtype::kAsPushed ? chunk_bytes : 2 * chunk_bytes;
}

absl::Status StagedChunks::Stage(absl::Span<const int64_t> chunks) {
  absl::MutexLock lock(&mu_);
  // What is there is right, also if the weights have changed.
  const bool is_untouched =
      status_.ok() && chunks == absl::MakeConstSpan(order_) && staged_.size() == started_count_;
  if (!is_untouched && !HoldsLocked(chunks)) {
    DropLocked();
    order_.assign(chunks.begin(), chunks.end());
  }
  StartMoreLocked();
  return status_;
}

bool StagedChunks::Holds(absl::Span<const int64_t> chunks) const {
  absl::MutexLock lock(&mu_);
  return HoldsLocked(chunks);
}

bool StagedChunks::HoldsLocked(absl::Span<const int64_t> chunks) const {
  return started_count_ == order_.size() && status_.ok() &&
         absl::c_all_of(chunks, [this](int64_t chunk) ABSL_SHARED_LOCKS_REQUIRED(mu_) {
           return staged_.contains(chunk);
         });
}

std::optional<int> StagedChunks::Take(int64_t chunk) { return Await(chunk, /*stays=*/false); }

std::optional<int> StagedChunks::Borrow(int64_t chunk) { return Await(chunk, /*stays=*/true); }

void StagedChunks::EndLoan(int64_t chunk, int slot, bool is_read) {
  absl::MutexLock lock(&mu_);
  ring_->Return(slot);
  const auto found = staged_.find(chunk);
  if (!is_read || keeps_ || found == staged_.end() || found->second.slot != slot) return;
  ring_->Return(slot);
  staged_.erase(found);
  StartMoreLocked();
}

std::optional<int> StagedChunks::Await(int64_t chunk, bool stays) {
  Staged staged;
  bool is_kept = false;
  {
    absl::MutexLock lock(&mu_);
    StartMoreLocked();
    const auto found = staged_.find(chunk);
    if (found == staged_.end()) return std::nullopt;
    staged = found->second;
    is_kept = stays || keeps_;
    if (is_kept) {
      ring_->Share(staged.slot);
    } else {
      staged_.erase(found);
    }
  }
  absl::Status waited;
  for (Gpu* gpu : staged.gpus) waited.Update(gpu->Wait(staged.slot, deadline_, *interrupt_));
  if (waited.ok() && !is_kept) return staged.slot;
  absl::MutexLock lock(&mu_);
  if (waited.ok()) {
    // Nobody has to wait for its copies any more.
    staged_.find(chunk)->second.gpus.clear();
    return staged.slot;
  }
  status_.Update(waited);
  if (is_kept) {
    ring_->Return(staged.slot);
  } else {
    failed_.push_back(std::move(staged));
  }
  return std::nullopt;
}

void StagedChunks::StartMoreLocked() {
  while (started_count_ < order_.size() && status_.ok()) {
    const std::optional<int> slot = ring_->TryTake();
    if (!slot.has_value()) return;
    if (!gate_->BeginRead()) {
      ring_->Return(*slot);
      status_ = MakeError(absl::StatusCode::kAborted, ErrorReason::kStepAbandoned,
                          "the weights were released before all of them had been copied");
      return;
    }
    const int64_t chunk = order_[started_count_];
    Staged staged = {.slot = *slot, .gpus = {}};
    status_ = StartCopies(chunk, staged);
    if (!status_.ok()) {
      // Its buffer may have the event of an earlier chunk, which must not be used for this one.
      failed_.push_back(std::move(staged));
    } else {
      staged_.emplace(chunk, std::move(staged));
      ++started_count_;
    }
    gate_->EndRead();
  }
  if (started_count_ < order_.size()) return;
  keeps_ = staged_.size() == order_.size();
  gate_->FinishReading();
}

absl::Status StagedChunks::StartCopies(int64_t chunk, Staged& staged) const {
  std::byte* to = ring_->slot(staged.slot);
  std::vector<Gpu::Copy> copies;
  Gpu* gpu = nullptr;
  absl::Status status;
  const auto queue = [&] {
    if (gpu == nullptr || copies.empty() || !status.ok()) return;
    if (std::find(staged.gpus.begin(), staged.gpus.end(), gpu) == staged.gpus.end()) {
      staged.gpus.push_back(gpu);
    }
    status = gpu->CopyToHost(copies, staged.slot);
    copies.clear();
  };
  ForEachPiece(*layout_, *plan_, chunk, [&](int64_t shard, int64_t offset, int64_t length) {
    if (gpus_[shard] == nullptr) {
      weights_.CopyRange(shard, offset, length, to);
    } else {
      if (gpus_[shard] != gpu) queue();
      gpu = gpus_[shard];
      copies.push_back({to, weights_.ContiguousRange(shard, offset, length)});
    }
    to += weights_.RangeBytes(shard, length);
  });
  queue();
  return status;
}

void StagedChunks::Drop() {
  absl::MutexLock lock(&mu_);
  DropLocked();
}

void StagedChunks::DropLocked() {
  for (auto& [chunk, staged] : staged_) failed_.push_back(std::move(staged));
  staged_.clear();
  // By GPU, and not by their marks: after an error there may be none, and some are queued all the
  // same.
  std::map<Gpu*, bool> is_idle;
  for (const Staged& staged : failed_) {
    bool has_ended = true;
    for (Gpu* gpu : staged.gpus) {
      const auto [found, is_new] = is_idle.emplace(gpu, false);
      if (is_new) found->second = gpu->AwaitIdle(deadline_, *interrupt_);
      has_ended &= found->second;
    }
    if (has_ended) {
      ring_->Return(staged.slot);
    } else {
      ring_->MarkLost(staged.slot);
    }
  }
  failed_.clear();
  order_.clear();
  started_count_ = 0;
  keeps_ = false;
}

absl::Status StagedChunks::status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

}  // namespace ema::client_internal
