// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/stream_slots.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "server/rpc/authorization.h"

namespace ema {

absl::Status OverShareError(const std::string& kind) {
  constexpr absl::Duration kRetryDelay = absl::Milliseconds(50);
  return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyStreams,
                   absl::StrCat("this client had more than half of the ", kind,
                                " streams that the server allows (--max-", kind,
                                "-streams), and another client needed one"),
                   kRetryDelay);
}

absl::Status RevokedError() {
  return MakeError(absl::StatusCode::kUnauthenticated, ErrorReason::kBadToken,
                   "the token is no longer valid for this call");
}

SteadyTime::duration StreamCall::WaitingTime(SteadyTime now) const {
  const int64_t since = waiting_since_.load(std::memory_order_relaxed);
  return since == 0 ? SteadyTime::duration::zero() : now - SteadyTime(SteadyTime::duration(since));
}

void StreamCall::BeginTiming() {
  marked_time_ = SteadyNow();
  waited_ = worked_ = SteadyTime::duration::zero();
}

void StreamCall::SetWaiting(bool waiting) {
  const SteadyTime now = SteadyNow();
  (waiting ? worked_ : waited_) += now - marked_time_;
  marked_time_ = now;
  waiting_since_.store(waiting ? now.time_since_epoch().count() : 0, std::memory_order_relaxed);
}

absl::Status StreamSlots::Enter(StreamCall* call, const std::string& authorization,
                                std::string_view peer, std::optional<std::string_view> model) {
  Slot slot;
  slot.authorization = authorization;
  slot.address = peer.substr(0, peer.rfind(':'));
  if (model.has_value()) slot.model.emplace(*model);
  absl::MutexLock lock(&mu_);
  if (static_cast<int64_t>(slots_.size()) >= options_.limit && !EvictLocked(slot)) {
    const std::string kind(options_.kind);
    return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyStreams,
                     absl::StrCat(slots_.size(), " ", kind, " streams are open (limit ",
                                  options_.limit, ", --max-", kind, "-streams)"),
                     options_.retry_delay);
  }
  slots_[call] = std::move(slot);
  return absl::OkStatus();
}

void StreamSlots::SetModel(StreamCall* call, std::string_view model) {
  absl::MutexLock lock(&mu_);
  if (const auto it = slots_.find(call); it != slots_.end()) it->second.model.emplace(model);
}

void StreamSlots::SetPinnedVersion(StreamCall* call, const VersionId& version) {
  absl::MutexLock lock(&mu_);
  if (const auto it = slots_.find(call); it != slots_.end()) it->second.pinned_version = version;
}

void StreamSlots::Leave(StreamCall* call) {
  absl::MutexLock lock(&mu_);
  slots_.erase(call);
}

int64_t StreamSlots::open_count() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(slots_.size());
}

void StreamSlots::EndStalled(SteadyTime now) {
  absl::MutexLock lock(&mu_);
  for (auto& [call, slot] : slots_) {
    MeasureSpeed(*call, slot, now);
    if (absl::FromChrono(call->WaitingTime(now)) > options_.stall_timeout) {
      call->End(StreamEnd::kStalled);
    }
  }
}

void StreamSlots::MeasureSpeed(const StreamCall& call, Slot& slot, SteadyTime now) const {
  const int64_t bytes = call.byte_count();
  if (slot.window_begin.has_value()) {
    const absl::Duration elapsed = absl::FromChrono(now - *slot.window_begin);
    if (elapsed < options_.stall_timeout / 3) return;
    slot.is_slow =
        static_cast<double>(bytes - slot.window_begin_bytes) <
        static_cast<double>(options_.min_bytes_per_second) * absl::ToDoubleSeconds(elapsed);
  }
  slot.window_begin = now;
  slot.window_begin_bytes = bytes;
}

int64_t StreamSlots::EndSlowPulls(std::string_view model, const VersionId& version) {
  absl::MutexLock lock(&mu_);
  int64_t count = 0;
  for (const auto& [call, slot] : slots_) {
    if (!slot.is_slow || slot.pinned_version != version || slot.model != model) continue;
    call->End(StreamEnd::kStalled);
    ++count;
  }
  return count;
}

void StreamSlots::EndRevoked(const Authenticator& authenticator) {
  absl::MutexLock lock(&mu_);
  for (const auto& [call, slot] : slots_) {
    if (!Authorize(&authenticator, options_.method, slot.authorization, slot.model).ok()) {
      call->End(StreamEnd::kRevoked);
    }
  }
}

const StreamSlots::Slot* StreamSlots::FindOverShareLocked() const {
  // Boyer and Moore's majority vote ("MJRTY", 1981) leaves the only caller that can have so many.
  const Slot* candidate = nullptr;
  int64_t lead = 0;
  for (const auto& [call, slot] : slots_) {
    if (lead == 0) candidate = &slot;
    lead += slot.IsOfCaller(*candidate) ? 1 : -1;
  }
  if (candidate == nullptr) return nullptr;
  const int64_t count = std::count_if(slots_.begin(), slots_.end(), [candidate](const auto& entry) {
    return entry.second.IsOfCaller(*candidate);
  });
  // Half is rounded up: two callers would evict each other for ever for the odd slot.
  return count > (options_.limit + 1) / 2 ? candidate : nullptr;
}

bool StreamSlots::EvictLocked(const Slot& newcomer) {
  const SteadyTime now = SteadyNow();
  const Slot* const over_share = FindOverShareLocked();
  auto longest = slots_.end();
  for (auto it = slots_.begin(); it != slots_.end(); ++it) {
    if (over_share != nullptr && !it->second.IsOfCaller(*over_share)) continue;
    if (longest == slots_.end() || it->first->WaitingTime(now) > longest->first->WaitingTime(now)) {
      longest = it;
    }
  }
  if (longest == slots_.end()) return false;
  if (over_share != nullptr && !newcomer.IsOfCaller(*over_share)) {
    longest->first->End(StreamEnd::kOverShare);
  } else {
    if (now < next_eviction_time_ ||
        absl::FromChrono(longest->first->WaitingTime(now)) < options_.stall_timeout / 10) {
      return false;
    }
    next_eviction_time_ = After(now, options_.stall_timeout / 40);
    longest->first->End(StreamEnd::kStalled);
  }
  slots_.erase(longest);
  return true;
}

}  // namespace ema
