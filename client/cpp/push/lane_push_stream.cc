// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/lane_push_stream.h"

#include <utility>

#include "client/cpp/transport/convert_replies.h"
#include "client/cpp/transport/lanes.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {

LanePushStream::LanePushStream(RunCore* run, RunCore::PushLane lane, const PushMessages* messages,
                               StagedChunks* staged)
    : run_(run), lane_(std::move(lane)), messages_(messages) {
  if (lane_.has_window) {
    in_window_.emplace(messages->plan, messages->writer, staged, lane_.pipe.get());
  }
}

LanePushStream::~LanePushStream() {
  in_window_.reset();
  if (has_replied_) run_->ReturnLane(std::move(lane_));
}

bool LanePushStream::MustStop() const {
  return is_cancelled_.load(std::memory_order_relaxed) || messages_->interrupt->fired() ||
         SteadyNow() >= messages_->deadline;
}

absl::Status LanePushStream::WhyEnded(const absl::Status& error) {
  if (is_cancelled_.load(std::memory_order_relaxed)) return absl::CancelledError("cancelled");
  if (messages_->interrupt->fired()) return absl::CancelledError("interrupted");
  if (SteadyNow() >= messages_->deadline) {
    return absl::DeadlineExceededError("the lane did not end in time");
  }
  return WhyFailed(*lane_.pipe, error);
}

absl::Status LanePushStream::Send(const v1::LaneRequest& request) {
  const absl::Status sent = SendRequest(*lane_.pipe, request, stop_);
  return sent.ok() ? sent : WhyEnded(sent);
}

absl::Status LanePushStream::SendHeader(const v1::PushHeader& header) {
  v1::LaneRequest request;
  *request.mutable_push() = header;
  request.set_authorization(run_->client().token().Authorization());
  return Send(request);
}

absl::Status LanePushStream::SendCopy(int64_t chunk) {
  EMA_ASSIGN_OR_RETURN(std::byte* const slot, lane_.pipe->ReserveChunk(stop_));
  const std::optional<uint32_t> crc32c = messages_->writer->Copy(chunk, slot);
  if (!crc32c.has_value()) return UnreadableError();
  lane_.pipe->SendChunk(messages_->plan->offset(chunk), messages_->plan->length_bytes(chunk),
                        *crc32c);
  return absl::OkStatus();
}

absl::Status LanePushStream::SendChunk(int64_t chunk) {
  if (lane_.pipe->HasIncoming()) {
    return WhyEnded(absl::UnavailableError("the server has ended the same-host lane"));
  }
  const absl::Status sent =
      in_window_.has_value() ? in_window_->Send(chunk, stop_) : SendCopy(chunk);
  return sent.ok() ? sent : WhyEnded(sent);
}

absl::StatusOr<v1::PushResponse> LanePushStream::Commit(const v1::PushCommit& commit) {
  v1::LaneRequest request;
  *request.mutable_commit() = commit;
  EMA_RETURN_IF_ERROR(Send(request));
  const absl::StatusOr<LanePipe::Frame> frame = lane_.pipe->Receive(stop_);
  if (!frame.ok()) return WhyEnded(frame.status());
  EMA_ASSIGN_OR_RETURN(v1::LaneResponse response, ParseResponse(*frame));
  if (!response.has_pushed() || !response.pushed().has_version()) {
    return MalformedReply("Push without a version");
  }
  if (in_window_.has_value()) in_window_->Finish();
  has_replied_ = true;
  return std::move(*response.mutable_pushed());
}

}  // namespace ema::client_internal
