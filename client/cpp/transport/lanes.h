// SPDX-License-Identifier: Apache-2.0
//
// The same-host lanes (server/wire/lane_pipe.h) of a client.
#ifndef EMA_CLIENT_CPP_TRANSPORT_LANES_H_
#define EMA_CLIENT_CPP_TRANSPORT_LANES_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ema/v1/lane.pb.h"
#include "server/wire/lane_pipe.h"

namespace ema::client_internal {

// Opens lanes on demand, and keeps them for later calls. Thread-safe.
class LanePool {
 public:
  // Sets the server's offer; lanes of earlier offers are dropped.
  void SetOffer(const v1::GetLaneResponse& offer) ABSL_LOCKS_EXCLUDED(mu_);

  // A lane for one call. UNAVAILABLE: why there is none; use gRPC.
  absl::StatusOr<std::unique_ptr<LanePipe>> Take() ABSL_LOCKS_EXCLUDED(mu_);
  // Opens a lane for which the server maps `window`. RESOURCE_EXHAUSTED: the server has no memory
  // for it. UNAVAILABLE: there is no lane, or the server does not answer until `stop` returns true.
  absl::StatusOr<std::unique_ptr<LanePipe>> OpenWithWindow(const SharedMemory& window,
                                                           const LanePipe::Stop& stop)
      ABSL_LOCKS_EXCLUDED(mu_);
  // To be called after a successful call. After a failed call drop the lane instead. Closes the
  // lane if there are `max_idle` others that no call uses.
  void Return(std::unique_ptr<LanePipe> lane,
              int64_t max_idle = std::numeric_limits<int64_t>::max()) ABSL_LOCKS_EXCLUDED(mu_);
  // OK: as far as is known, the server offers lanes that this process can open. UNAVAILABLE: why
  // there are none.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  mutable absl::Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_) =
      absl::UnavailableError("the server has not said whether it offers same-host lanes");
  std::string socket_name_ ABSL_GUARDED_BY(mu_);  // Valid if `status_` is OK.
  std::vector<std::unique_ptr<LanePipe>> idle_ ABSL_GUARDED_BY(mu_);
};

absl::Status SendRequest(LanePipe& lane, const v1::LaneRequest& request,
                         const LanePipe::Stop& stop);
// Parses a response; a LaneError becomes the result.
absl::StatusOr<v1::LaneResponse> ParseResponse(const LanePipe::Frame& frame);
// The cause of a failed call, after sending ended with `error`: the server's error, if it has sent
// one, else `error`.
absl::Status WhyFailed(LanePipe& lane, const absl::Status& error);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_LANES_H_
