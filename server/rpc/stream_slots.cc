// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/stream_slots.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "server/rpc/authorization.h"

namespace ema {
namespace {

// The part of `peer` (see LogCaller.peer) that tells callers apart: no port, and of an IPv6 address
// only the first 64 bits, because one host usually has all addresses of a /64.
std::string CallerAddress(std::string_view peer) {
  const std::string_view host = peer.substr(0, peer.rfind(':'));
  // gRPC escapes the brackets: "ipv6:%5B2001:db8::7%5D:4711". Another '%' can begin a zone.
  constexpr std::string_view kIpv6 = "ipv6:%5B";
  if (!host.starts_with(kIpv6)) return std::string(host);
  const std::string text(host.substr(kIpv6.size(), host.find('%', kIpv6.size()) - kIpv6.size()));
  in6_addr address;
  if (inet_pton(AF_INET6, text.c_str(), &address) != 1) return std::string(host);
  std::fill_n(address.s6_addr + 8, 8, 0);
  char prefix[INET6_ADDRSTRLEN] = "";
  inet_ntop(AF_INET6, &address, prefix, sizeof(prefix));
  return absl::StrCat("ipv6:", prefix, "/64");
}

}  // namespace

absl::Status FairShareError(const std::string& kind) {
  constexpr absl::Duration kRetryDelay = absl::Milliseconds(50);
  return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyStreams,
                   absl::StrCat("all ", kind, " streams are in use (--max-", kind,
                                "-streams); this client had the most of them, and a client with "
                                "fewer needed one"),
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
  slot.caller = {authorization, CallerAddress(peer)};
  if (model.has_value()) slot.model.emplace(*model);
  absl::MutexLock lock(&mu_);
  if (static_cast<int64_t>(slots_.size()) >= options_.limit && !EvictLocked(slot.caller)) {
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

int64_t StreamSlots::EndPullsAboveFairShare(StreamCall* call) {
  absl::MutexLock lock(&mu_);
  const auto found = slots_.find(call);
  if (found == slots_.end()) return 0;
  const Slot& own = found->second;
  const auto pins = [&own](const Slot& slot) {
    return slot.pinned_version.has_value() && slot.model == own.model;
  };
  std::map<VersionId, absl::flat_hash_set<Caller>> callers;  // Of each pinned version.
  for (const auto& [other, slot] : slots_) {
    if (pins(slot)) callers[*slot.pinned_version].insert(slot.caller);
  }
  absl::flat_hash_map<Caller, int64_t> counts = {{own.caller, 0}};
  int64_t most = 0;
  for (const auto& [version, of_version] : callers) {
    for (const Caller& caller : of_version) most = std::max(most, ++counts[caller]);
  }
  // With a difference of one, the two callers would end each other's pulls for ever.
  if (most < counts[own.caller] + 2) return 0;
  int64_t ended = 0;
  for (const auto& [version, of_version] : callers) {
    if (of_version.size() > 1 || counts[*of_version.begin()] < most) continue;
    for (const auto& [other, slot] : slots_) {
      if (!pins(slot) || slot.pinned_version != version) continue;
      other->End(StreamEnd::kOverFairShare);
      ++ended;
    }
    break;
  }
  return ended;
}

void StreamSlots::EndRevoked(const Authenticator& authenticator) {
  absl::MutexLock lock(&mu_);
  for (const auto& [call, slot] : slots_) {
    if (!Authorize(&authenticator, options_.method, slot.caller.first, slot.model).ok()) {
      call->End(StreamEnd::kRevoked);
    }
  }
}

bool StreamSlots::EvictLocked(const Caller& newcomer) {
  absl::flat_hash_map<Caller, int64_t> counts = {{newcomer, 0}};
  int64_t most = 0;
  for (const auto& [call, slot] : slots_) most = std::max(most, ++counts[slot.caller]);
  const int64_t own = counts[newcomer];
  // With a difference of one, the two callers would evict each other for ever.
  const bool is_over_share = most > own + 1;
  const SteadyTime now = SteadyNow();
  auto longest = slots_.end();
  for (auto it = slots_.begin(); it != slots_.end(); ++it) {
    if (counts[it->second.caller] < (is_over_share ? most : own)) continue;
    if (longest == slots_.end() || it->first->WaitingTime(now) > longest->first->WaitingTime(now)) {
      longest = it;
    }
  }
  if (longest == slots_.end()) return false;
  if (is_over_share) {
    longest->first->End(StreamEnd::kOverFairShare);
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
