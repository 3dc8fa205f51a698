// SPDX-License-Identifier: Apache-2.0
//
// The same-host lanes of a client.
#ifndef EMA_CLIENT_CPP_TRANSPORT_LANES_H_
#define EMA_CLIENT_CPP_TRANSPORT_LANES_H_

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

// Opened when they are needed, and kept for the next call. Thread-safe.
class LanePool {
 public:
  // Takes what the server has said of its lanes; those before go.
  void SetOffer(const v1::GetLaneResponse& offer) ABSL_LOCKS_EXCLUDED(mu_);

  // A lane for one call. Null: there is none; gRPC has to do.
  std::unique_ptr<LanePipe> Take() ABSL_LOCKS_EXCLUDED(mu_);
  // After a call that has succeeded. A lane with which one has failed is to be dropped instead.
  void GiveBack(std::unique_ptr<LanePipe> lane) ABSL_LOCKS_EXCLUDED(mu_);
  // False: there is none, as far as is known.
  bool has_offer() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  mutable absl::Mutex mu_;
  std::string socket_name_ ABSL_GUARDED_BY(mu_);  // Empty: there are none.
  std::vector<std::unique_ptr<LanePipe>> idle_ ABSL_GUARDED_BY(mu_);
};

absl::Status SendRequest(LanePipe& lane, const v1::LaneRequest& request,
                         const LanePipe::Stop& stop);
// The next message, or what its LaneError says.
absl::StatusOr<v1::LaneResponse> ParseResponse(const LanePipe::Frame& frame);
// Why a call has failed with which sending ended with `error`: what the server has said, if it has.
absl::Status WhyFailed(LanePipe& lane, const absl::Status& error);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_LANES_H_
