// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/stream_admission.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "server/rpc/authorization.h"

namespace ema {

absl::Status RevokedError() {
  return MakeError(absl::StatusCode::kUnauthenticated, ErrorReason::kBadToken,
                   "the call's token is not known any more, or not for this");
}

bool StreamCall::MayGoOn(const Authenticator& authenticator) const {
  if (method_.empty()) return true;
  const absl::StatusOr<Access> access = Authorize(&authenticator, method_, authorization_);
  return access.ok() && (!model_.has_value() || access->Covers(*model_));
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

absl::Status StreamAdmission::Enter(StreamCall* call, const Authenticator* authenticator) {
  absl::MutexLock lock(&mu_);
  // Under the lock, so that EndRevoked() comes after it, or has been before the question.
  if (authenticator != nullptr && !call->MayGoOn(*authenticator)) return RevokedError();
  if (static_cast<int64_t>(calls_.size()) >= limit_ && !EndLongestStalledLocked()) {
    return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyStreams,
                     absl::StrCat("the server has ", limit_, " ", kind_,
                                  " streams open, as many as it may have"),
                     retry_delay_);
  }
  calls_.emplace(call, Progress());
  return absl::OkStatus();
}

absl::Status StreamAdmission::SetModel(StreamCall* call, std::string_view model,
                                       const Authenticator* authenticator) {
  absl::MutexLock lock(&mu_);
  call->SetModel(model);
  if (authenticator != nullptr && !call->MayGoOn(*authenticator)) return RevokedError();
  return absl::OkStatus();
}

void StreamAdmission::Leave(StreamCall* call) {
  absl::MutexLock lock(&mu_);
  calls_.erase(call);
}

int64_t StreamAdmission::open_count() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int64_t>(calls_.size());
}

void StreamAdmission::CheckStalled(SteadyTime now) {
  const absl::Duration window = absl::FromChrono(stall_timeout_) / 3;
  absl::MutexLock lock(&mu_);
  for (auto& [call, progress] : calls_) {
    progress.Measure(*call, now, window, min_bytes_per_second_);
    if (call->WaitingTime(now) > stall_timeout_) call->End(StreamEnd::kStalled);
  }
}

void StreamAdmission::Progress::Measure(const StreamCall& call, SteadyTime now,
                                        absl::Duration window, int64_t min_bytes_per_second) {
  const int64_t bytes = call.byte_count();
  if (window_begin.has_value()) {
    const absl::Duration elapsed = absl::FromChrono(now - *window_begin);
    if (elapsed < window) return;
    is_slow = static_cast<double>(bytes - window_begin_bytes) <
              static_cast<double>(min_bytes_per_second) * absl::ToDoubleSeconds(elapsed);
  }
  window_begin = now;
  window_begin_bytes = bytes;
}

void StreamAdmission::SetPinned(StreamCall* call, const VersionId& version) {
  absl::MutexLock lock(&mu_);
  if (const auto it = calls_.find(call); it != calls_.end()) it->second.pinned_version = version;
}

int64_t StreamAdmission::EndSlowPulls(std::string_view model, const VersionId& version) {
  absl::MutexLock lock(&mu_);
  int64_t count = 0;
  for (const auto& [call, progress] : calls_) {
    if (!progress.is_slow || progress.pinned_version != version || call->model() != model) continue;
    call->End(StreamEnd::kStalled);
    ++count;
  }
  return count;
}

void StreamAdmission::EndRevoked(const Authenticator& authenticator) {
  absl::MutexLock lock(&mu_);
  for (const auto& [call, progress] : calls_) {
    if (!call->MayGoOn(authenticator)) call->End(StreamEnd::kRevoked);
  }
}

bool StreamAdmission::EndLongestStalledLocked() {
  const auto now = SteadyNow();
  const auto longest =
      std::max_element(calls_.begin(), calls_.end(), [now](const auto& a, const auto& b) {
        return a.first->WaitingTime(now) < b.first->WaitingTime(now);
      });
  if (longest == calls_.end()) return false;
  StreamCall* const stalled = longest->first;
  const bool must_wait = stalled->WaitingTime(now) < stall_timeout_ / 10 || now < next_end_time_;
  if (newcomers_ == Newcomers::kMayWait && must_wait) return false;
  next_end_time_ = now + stall_timeout_ / 40;
  stalled->End(StreamEnd::kStalled);
  calls_.erase(longest);
  return true;
}

}  // namespace ema
