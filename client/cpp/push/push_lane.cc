// SPDX-License-Identifier: Apache-2.0
//
// The part of a push that goes through a same-host lane.
#include <utility>

#include "client/cpp/push/push.h"
#include "client/cpp/transport/convert.h"
#include "client/cpp/transport/lanes.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {

absl::StatusOr<PendingPush::Impl::Committed> PendingPush::Impl::SendByLane(
    std::unique_ptr<LanePipe> lane) {
  const auto stop = [this] { return interrupt_.fired() || SteadyNow() >= deadline_; };
  const auto failure = [&](const absl::Status& error) {
    if (interrupt_.fired()) return absl::CancelledError("interrupted");
    if (SteadyNow() >= deadline_)
      return absl::DeadlineExceededError("the lane did not end in time");
    absl::Status status = client_internal::WhyFailed(*lane, error);
    // The next try goes by gRPC, unless the server has a reason of its own.
    avoids_lanes_ = GetErrorReason(status) == ErrorReason::kUnspecified;
    return status;
  };

  v1::LaneRequest message;
  *message.mutable_push() = BeginStream(Lane::kSharedMemory);
  message.set_authorization(run_->client().token().Authorization());
  absl::Status sent = client_internal::SendRequest(*lane, message, stop);
  if (!sent.ok()) return failure(sent);
  for (const int64_t chunk : chunks_to_send_) {
    if (lane->HasIncoming()) {
      return failure(absl::UnavailableError("the server has ended the same-host lane"));
    }
    const absl::StatusOr<std::byte*> place = lane->ReserveChunk(stop);
    if (!place.ok()) return failure(place.status());
    const std::optional<uint32_t> crc32c = writer_->Copy(chunk, *place);
    if (!crc32c.has_value())
      return absl::CancelledError("the weights were released, or cannot be read");
    const int64_t length_bytes = run_->chunks().length_bytes(chunk);
    lane->SendChunk(run_->chunks().offset(chunk), length_bytes, *crc32c);
    sent_bytes_.fetch_add(length_bytes, std::memory_order_relaxed);
  }
  const std::optional<uint32_t> digest = CheckedDigest();
  if (!digest.has_value())
    return absl::CancelledError("the weights were released, or cannot be read");
  gate_.HaveRead();
  v1::PushCommit& commit = *message.mutable_commit();
  commit.set_chunk_count(static_cast<int64_t>(chunks_to_send_.size()));
  commit.set_total_bytes(BytesToSend());
  commit.set_digest(*digest);
  sent = client_internal::SendRequest(*lane, message, stop);
  if (!sent.ok()) return failure(sent);
  const absl::StatusOr<LanePipe::Frame> frame = lane->Receive(stop);
  if (!frame.ok()) return failure(frame.status());
  EMA_ASSIGN_OR_RETURN(const v1::LaneResponse response, client_internal::ParseResponse(*frame));
  if (!response.has_pushed() || !response.pushed().has_version()) {
    return client_internal::MalformedReply("Push without a version");
  }
  run_->client().GiveBackLane(std::move(lane));
  return FromResponse(response.pushed());
}

}  // namespace ema
