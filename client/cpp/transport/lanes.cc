// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/lanes.h"

#include <utility>

#include "client/cpp/transport/convert_replies.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

constexpr int64_t kProtocol = 3;

}  // namespace

void LanePool::SetOffer(const v1::GetLaneResponse& offer) {
  const std::string host_id = HostId();
  const bool is_here =
      !host_id.empty() && offer.host_id() == host_id && offer.protocol() == kProtocol;
  std::vector<std::unique_ptr<LanePipe>> before;  // Destroyed without the lock.
  absl::MutexLock lock(&mu_);
  socket_name_ = is_here ? offer.socket_name() : "";
  before.swap(idle_);
}

bool LanePool::has_offer() const {
  absl::MutexLock lock(&mu_);
  return !socket_name_.empty();
}

std::unique_ptr<LanePipe> LanePool::Take() {
  std::string socket_name;
  {
    absl::MutexLock lock(&mu_);
    if (socket_name_.empty()) return nullptr;
    if (!idle_.empty()) {
      std::unique_ptr<LanePipe> lane = std::move(idle_.back());
      idle_.pop_back();
      // The server may have ended it meanwhile.
      if (!lane->HasIncoming()) return lane;
    }
    socket_name = socket_name_;
  }
  absl::StatusOr<std::unique_ptr<LanePipe>> lane = LanePipe::Connect(socket_name);
  if (lane.ok()) return *std::move(lane);
  // In another container, of another user, or the server has been restarted.
  absl::MutexLock lock(&mu_);
  if (socket_name_ == socket_name) socket_name_.clear();
  return nullptr;
}

absl::StatusOr<std::unique_ptr<LanePipe>> LanePool::OpenWithWindow(const SharedMemory& window,
                                                                   const LanePipe::Stop& stop) {
  std::string socket_name;
  {
    absl::MutexLock lock(&mu_);
    socket_name = socket_name_;
  }
  if (socket_name.empty()) return absl::UnavailableError("the server offers no same-host lane");
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<LanePipe> lane, LanePipe::Connect(socket_name, &window));
  const absl::StatusOr<LanePipe::Frame> frame = lane->Receive(stop);
  if (!frame.ok()) return absl::UnavailableError(frame.status().message());
  EMA_ASSIGN_OR_RETURN(const v1::LaneResponse response, ParseResponse(*frame));
  if (response.window().is_mapped()) return lane;
  return absl::ResourceExhaustedError("the server's memory for windows is used up");
}

void LanePool::Return(std::unique_ptr<LanePipe> lane) {
  absl::MutexLock lock(&mu_);
  if (!socket_name_.empty()) idle_.push_back(std::move(lane));
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
