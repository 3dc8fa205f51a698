// SPDX-License-Identifier: Apache-2.0
//
// Caps the concurrent pushes, pulls and watches, ends pushes and pulls that stall, and all that may
// not continue.
#ifndef EMA_SERVER_RPC_STREAM_SLOTS_H_
#define EMA_SERVER_RPC_STREAM_SLOTS_H_

#include <atomic>
#include <cstdint>
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

// Why the server ends a stream.
enum class StreamEnd {
  kStalled,  // Its peer has exchanged nothing for too long, or is a slow reader: EndSlowPulls().
  // Its caller has the most slots or pins, and a caller that has fewer needs a slot or a pin.
  kOverFairShare,
  kRevoked,  // Its token is no longer valid for the call.
};
// RESOURCE_EXHAUSTED, TOO_MANY_STREAMS: the error that kOverFairShare gives a push over gRPC, or a
// watch that is not writing. Other calls over gRPC are cancelled; calls over a lane get ABORTED,
// STALLED. `kind` as in StreamSlots::Options.
absl::Status FairShareError(const std::string& kind);
// UNAUTHENTICATED, BAD_TOKEN: the error that kRevoked gives a caller.
absl::Status RevokedError();

// A push, a pull or a watch, as StreamSlots sees it. End(), WaitingTime() and byte_count() are
// called from any thread, the rest on the call's own thread.
class StreamCall {
 public:
  // Asks the call to end soon. Must not call StreamSlots, which holds its lock meanwhile.
  virtual void End(StreamEnd why) = 0;
  // How long the call has waited for its peer; zero if it is not waiting.
  SteadyTime::duration WaitingTime(SteadyTime now) const;
  // Bytes of a pull that its peer has accepted.
  int64_t byte_count() const { return byte_count_.load(std::memory_order_relaxed); }

 protected:
  ~StreamCall() = default;
  // Starts the timing of a call, which works until SetWaiting(true).
  void BeginTiming();
  void SetWaiting(bool waiting);
  void CountBytes(int64_t bytes) { byte_count_.fetch_add(bytes, std::memory_order_relaxed); }
  // The total times that the call has waited and worked until the last SetWaiting(), and its time.
  SteadyTime::duration waited() const { return waited_; }
  SteadyTime::duration worked() const { return worked_; }
  SteadyTime marked_time() const { return marked_time_; }

 private:
  // Ticks of the steady clock; 0: not waiting. Relaxed: a stall may be seen one check later.
  std::atomic<int64_t> waiting_since_ = 0;
  std::atomic<int64_t> byte_count_ = 0;  // Relaxed: for a rate.
  SteadyTime marked_time_;
  SteadyTime::duration waited_ = {};
  SteadyTime::duration worked_ = {};
};

// The slots of one kind of stream. When all are in use, a new stream may get the slot of another:
//
// - If a caller has at least two slots more than the caller of the new stream, the caller with the
//   most slots loses the stream that has waited longest. So callers converge to equal shares, and
//   none can keep others out, however it uses its slots. A caller is a token and an IPv4 address or
//   IPv6 /64.
// - Otherwise, among the streams whose callers have at least as many slots as the new stream's
//   caller, the one that has stalled longest is evicted, if it has exchanged nothing for a tenth of
//   the stall time-out. Two such evictions are at least a fortieth of the time-out apart: on a slow
//   path, where no message arrives in that time, streams would otherwise evict each other for ever.
//
// Thread-safe.
//
// Order for one call: Enter(), SetModel() and SetPinnedVersion() as they become known, Leave()
// before the call is destroyed.
class StreamSlots {
 public:
  struct Options {
    std::string_view kind;    // A literal: "push", "pull" or "watch".
    std::string_view method;  // A literal, such as "/ema.v1.EmaService/Push".
    int64_t limit = 0;
    absl::Duration stall_timeout;  // A stream that has stalled for longer is ended.
    absl::Duration retry_delay;    // When a client that finds no slot should retry.
    // A pull is slow if it moves less than this over a third of the time-out. 0: none is slow.
    int64_t min_bytes_per_second = 0;
  };
  explicit StreamSlots(const Options& options) : options_(options) {}

  // `authorization` and `model` as for Authorize(), `peer` as LogCaller.peer. RESOURCE_EXHAUSTED,
  // TOO_MANY_STREAMS: no slot.
  absl::Status Enter(StreamCall* call, const std::string& authorization, std::string_view peer,
                     std::optional<std::string_view> model) ABSL_LOCKS_EXCLUDED(mu_);
  // These three do nothing for a call that has no slot, or has lost it.
  void SetModel(StreamCall* call, std::string_view model) ABSL_LOCKS_EXCLUDED(mu_);
  void SetPinnedVersion(StreamCall* call, const VersionId& version) ABSL_LOCKS_EXCLUDED(mu_);
  void Leave(StreamCall* call) ABSL_LOCKS_EXCLUDED(mu_);

  int64_t open_count() const ABSL_LOCKS_EXCLUDED(mu_);

  // Ends streams that have stalled for longer than the time-out, and measures which pulls are slow.
  // To be called several times in a third of the time-out.
  void EndStalled(SteadyTime now) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the slow pulls that pin `version` of `model`, and returns their number.
  int64_t EndSlowPulls(std::string_view model, const VersionId& version) ABSL_LOCKS_EXCLUDED(mu_);
  // Call when the pull `call` got TOO_MANY_PINS. If a caller pins at least two versions of the same
  // model more than the caller of `call`, ends its pulls of the oldest version that no one else
  // pins. So callers converge to equal shares of the pins. Returns the number of ended pulls.
  int64_t EndPullsAboveFairShare(StreamCall* call) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the streams whose callers `authenticator` would refuse now.
  void EndRevoked(const Authenticator& authenticator) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // A token and the address of a host; see CallerAddress() in the source file.
  using Caller = std::pair<std::string, std::string>;
  struct Slot {
    Caller caller;
    std::optional<std::string> model;
    std::optional<VersionId> pinned_version;
    // The window over which the speed is being measured, and the result of the one before.
    std::optional<SteadyTime> window_begin;
    int64_t window_begin_bytes = 0;
    bool is_slow = false;
  };

  void MeasureSpeed(const StreamCall& call, Slot& slot, SteadyTime now) const;
  // Evicts a stream to make room for one of `newcomer`. False: none may be evicted.
  bool EvictLocked(const Caller& newcomer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  mutable absl::Mutex mu_;
  absl::flat_hash_map<StreamCall*, Slot> slots_ ABSL_GUARDED_BY(mu_);
  SteadyTime next_eviction_time_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_STREAM_SLOTS_H_
