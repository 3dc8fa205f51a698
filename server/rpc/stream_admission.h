// SPDX-License-Identifier: Apache-2.0
//
// How many calls that take memory there may be, and which of them end so that others get in.
#ifndef EMA_SERVER_RPC_STREAM_ADMISSION_H_
#define EMA_SERVER_RPC_STREAM_ADMISSION_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ema/version_id.h"
#include "server/base/authenticator.h"
#include "server/base/steady_wait.h"

namespace ema {

// Why a stream is ended by the server.
enum class StreamEnd {
  kStalled,  // Its peer has done nothing for too long, or too little: see EndSlowPulls().
  kRevoked,  // Its caller may not do this any more.
};
// UNAUTHENTICATED, BAD_TOKEN: what a caller is told by kRevoked.
absl::Status RevokedError();

// A call that may wait for its peer. Its completions are on one thread; End() and MayGoOn() are
// called from others.
class StreamCall {
 public:
  // Who has called, which method, and for which model; without `model`, any model is allowed until
  // StreamAdmission::SetModel(). To be called before Enter(), or never.
  void SetCaller(std::string_view method, std::string authorization,
                 std::optional<std::string_view> model) {
    method_ = method;
    authorization_ = std::move(authorization);
    if (model.has_value()) model_.emplace(*model);
  }
  // For StreamAdmission::SetModel(), which holds its lock meanwhile: MayGoOn() may be called from
  // another thread.
  void SetModel(std::string_view model) { model_.emplace(model); }
  // Whether the caller would be let in now.
  bool MayGoOn(const Authenticator& authenticator) const;
  // How long the call has waited for its peer; zero: it does not.
  SteadyTime::duration WaitingTime(SteadyTime now) const;
  // Ends the call, soon. From any thread.
  virtual void End(StreamEnd why) = 0;
  // The peer has taken, or sent, so many bytes more. On the call's thread.
  void CountBytes(int64_t bytes) { byte_count_.fetch_add(bytes, std::memory_order_relaxed); }
  int64_t byte_count() const { return byte_count_.load(std::memory_order_relaxed); }
  // Which model the call is about, if that is known. Under the lock of SetModel()'s admission.
  const std::optional<std::string>& model() const { return model_; }

 protected:
  ~StreamCall() = default;
  // The call begins here, and works. On the call's thread, as all that follows.
  void BeginTiming();
  void SetWaiting(bool waiting);
  // Of the whole call, up to the last SetWaiting().
  SteadyTime::duration waited() const { return waited_; }
  SteadyTime::duration worked() const { return worked_; }
  // When the last SetWaiting() was.
  SteadyTime marked_time() const { return marked_time_; }

 private:
  // Ticks of the steady clock; 0: not waiting. Relaxed: a stall may be seen one check later.
  std::atomic<int64_t> waiting_since_ = 0;
  SteadyTime marked_time_;
  SteadyTime::duration waited_ = {};
  SteadyTime::duration worked_ = {};
  // Constant while it has a place; model_ changes under the admission's lock.
  std::string_view method_;
  std::string authorization_;
  std::optional<std::string> model_;

  std::atomic<int64_t> byte_count_ = 0;  // Relaxed: for a rate.
};

// Admits calls of one kind up to a limit, and ends those that stall: the streams of pushes, pulls
// and watches, requests that are arriving (of unary calls, too), and health checks. When all places
// are taken, a new call gets that of the one whose peer has done nothing for longest, if that is a
// tenth of the time-out: stalled peers do not keep others out for all of it. One call at a time
// loses its place so, with a pause of a fortieth: where the path is slow and no message arrives in
// that time, calls would else take each other's places for ever. Thread-safe.
//
// A call is slow while it has moved fewer bytes than a minimum rate allows, over a window of a
// third of the time-out. A slow pull may continue until it holds a version whose place another
// reader needs: see EndSlowPulls().
//
// Order for one call: StreamCall::SetCaller(), so that Enter() and EndRevoked() know whom to ask
// about (not needed where no authenticator is given); Enter(); SetModel() here, if SetCaller() had
// no model; Leave(), before the call is destroyed.
class StreamAdmission {
 public:
  enum class Newcomers {
    kMayWait,
    // They get the place of the peer who has done nothing for longest, however short that is.
    kAlwaysEnter,
  };
  // `retry_delay`: when those are told to come back who find no place.
  // `min_bytes_per_second`: what is slower is slow; 0: nothing is.
  StreamAdmission(std::string kind, int64_t limit, std::chrono::nanoseconds stall_timeout,
                  absl::Duration retry_delay = absl::Milliseconds(50),
                  Newcomers newcomers = Newcomers::kMayWait, int64_t min_bytes_per_second = 0)
      : kind_(std::move(kind)),
        limit_(limit),
        stall_timeout_(stall_timeout),
        retry_delay_(retry_delay),
        newcomers_(newcomers),
        min_bytes_per_second_(min_bytes_per_second) {}

  // RESOURCE_EXHAUSTED, TOO_MANY_STREAMS. OK: `call` is checked for stalls until Leave().
  // UNAUTHENTICATED, BAD_TOKEN: since it was let in, `authenticator` has learnt of something else;
  // null: nobody is asked.
  absl::Status Enter(StreamCall* call, const Authenticator* authenticator = nullptr)
      ABSL_LOCKS_EXCLUDED(mu_);
  // What `call`, which has a place, is about. UNAUTHENTICATED, BAD_TOKEN: as Enter().
  absl::Status SetModel(StreamCall* call, std::string_view model,
                        const Authenticator* authenticator) ABSL_LOCKS_EXCLUDED(mu_);
  // Again, or without Enter(): does nothing.
  void Leave(StreamCall* call) ABSL_LOCKS_EXCLUDED(mu_);
  int64_t open_count() const ABSL_LOCKS_EXCLUDED(mu_);
  // `call`, a pull that has a place, pins that version of its model.
  void SetPinned(StreamCall* call, const VersionId& version) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends those that have stalled for the whole time-out, and finds out which ones are slow. Called
  // several times in a window.
  void CheckStalled(SteadyTime now) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the slow pulls that pin `version` of `model`. Returns how many these are.
  int64_t EndSlowPulls(std::string_view model, const VersionId& version) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends those whose callers `authenticator` would not let in any more.
  void EndRevoked(const Authenticator& authenticator) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Progress {
    // Finds out whether the call has been slow, if a window has passed.
    void Measure(const StreamCall& call, SteadyTime now, absl::Duration window,
                 int64_t min_bytes_per_second);

    bool is_slow = false;  // In the last whole window.
    std::optional<SteadyTime> window_begin;
    int64_t window_begin_bytes = 0;
    std::optional<VersionId> pinned_version;  // By a pull.
  };

  // False: none has stalled.
  bool EndLongestStalledLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string kind_;
  const int64_t limit_;
  const std::chrono::nanoseconds stall_timeout_;
  const absl::Duration retry_delay_;
  const Newcomers newcomers_;
  const int64_t min_bytes_per_second_;
  mutable absl::Mutex mu_;
  absl::flat_hash_map<StreamCall*, Progress> calls_ ABSL_GUARDED_BY(mu_);
  SteadyTime next_end_time_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_STREAM_ADMISSION_H_
