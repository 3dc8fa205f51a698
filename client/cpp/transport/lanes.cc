// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/lanes.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/transport/convert_replies.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

constexpr int64_t kProtocol = 3;

absl::Status CheckOffer(const v1::GetLaneResponse& offer) {
  const std::string host_id = HostId();
  if (offer.host_id().empty()) {
    return absl::UnavailableError("the server offers no same-host lanes");
  }
  if (host_id.empty() || offer.host_id() != host_id) {
    return absl::UnavailableError("the server is not on this host");
  }
  if (offer.protocol() == kProtocol) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the server's same-host lanes have protocol ",
                                             offer.protocol(), ", this client's ", kProtocol));
}

}  // namespace

void LanePool::SetOffer(const v1::GetLaneResponse& offer) {
  absl::Status status = CheckOffer(offer);
  std::vector<std::unique_ptr<LanePipe>> before;  // Destroyed without the lock.
  absl::MutexLock lock(&mu_);
  status_ = std::move(status);
  socket_name_ = offer.socket_name();
  before.swap(idle_);
}

absl::Status LanePool::status() const {
  absl::MutexLock lock(&mu_);
  return status_;
}

absl::StatusOr<std::unique_ptr<LanePipe>> LanePool::Take() {
  std::string socket_name;
  {
    absl::MutexLock lock(&mu_);
    EMA_RETURN_IF_ERROR(status_);
    if (!idle_.empty()) {
      std::unique_ptr<LanePipe> lane = std::move(idle_.back());
      idle_.pop_back();
      // The server may have ended it meanwhile.
      if (!lane->HasIncoming()) return lane;
    }
    socket_name = socket_name_;
  }
  absl::StatusOr<std::unique_ptr<LanePipe>> lane = LanePipe::Connect(socket_name);
  if (lane.ok()) return lane;
  // In another container, of another user, or the server has been restarted.
  const absl::Status status = absl::UnavailableError(lane.status().message());
  absl::MutexLock lock(&mu_);
  if (socket_name_ == socket_name) status_ = status;
  return status;
}

absl::StatusOr<std::unique_ptr<LanePipe>> LanePool::OpenWithWindow(const SharedMemory& window,
                                                                   const LanePipe::Stop& stop) {
  std::string socket_name;
  {
    absl::MutexLock lock(&mu_);
    EMA_RETURN_IF_ERROR(status_);
    socket_name = socket_name_;
  }
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<LanePipe> lane, LanePipe::Connect(socket_name, &window));
  const absl::StatusOr<LanePipe::Frame> frame = lane->Receive(stop);
  if (absl::IsCancelled(frame.status())) {
    return absl::UnavailableError("the server did not map the window in time");
  }
  if (!frame.ok()) return absl::UnavailableError(frame.status().message());
  EMA_ASSIGN_OR_RETURN(const v1::LaneResponse response, ParseResponse(*frame));
  if (response.window().is_mapped()) return lane;
  return absl::ResourceExhaustedError(
      "the server's memory for windows is used up (--max-window-bytes)");
}

void LanePool::Return(std::unique_ptr<LanePipe> lane, int64_t max_idle) {
  absl::MutexLock lock(&mu_);
  if (status_.ok() && std::ssize(idle_) < max_idle) idle_.push_back(std::move(lane));
}

absl::Status SendRequest(LanePipe& lane, const v1::LaneRequest& request,
                         const LanePipe::Stop& stop) {
  return lane.SendMessage(request.SerializeAsString(), stop);
}

absl::StatusOr<v1::LaneResponse> ParseResponse(const LanePipe::Frame& frame) {
  v1::LaneResponse response;
  if (frame.is_chunk || !response.ParseFromString(frame.message)) {
    return MalformedReply("not a LaneResponse");
  }
  if (response.has_error()) return ErrorOf(response.error());
  return response;
}

absl::Status WhyFailed(LanePipe& lane, const absl::Status& error) {
  while (lane.HasIncoming()) {
    const absl::StatusOr<LanePipe::Frame> frame = lane.Receive(nullptr);
    if (!frame.ok()) return error;
    if (frame->is_chunk) continue;
    EMA_RETURN_IF_ERROR(ParseResponse(*frame).status());
  }
  return error;
}

}  // namespace ema::client_internal
