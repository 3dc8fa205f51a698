// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/lane_sender.h"

#include <optional>
#include <utility>

#include "client/cpp/push/window_chunks.h"
#include "client/cpp/transport/convert_replies.h"
#include "client/cpp/transport/lanes.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

absl::Status Unreadable() {
  return absl::CancelledError("the weights were released, or cannot be read");
}

// Copies a chunk into the lane, and sends it.
absl::Status SendCopy(const PushMessages& messages, int64_t chunk, LanePipe& lane,
                      const LanePipe::Stop& stop) {
  EMA_ASSIGN_OR_RETURN(std::byte* const slot, lane.ReserveChunk(stop));
  const std::optional<uint32_t> crc32c = messages.writer->Copy(chunk, slot);
  if (!crc32c.has_value()) return Unreadable();
  lane.SendChunk(messages.plan->offset(chunk), messages.plan->length_bytes(chunk), *crc32c);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::PushResponse> SendByLane(const PushMessages& messages, Client::Impl& client,
                                            LanePipe& lane, StagedChunks* window) {
  const auto stop = [&] { return messages.interrupt->fired() || SteadyNow() >= messages.deadline; };
  const auto failure = [&](const absl::Status& error) {
    if (messages.interrupt->fired()) return absl::CancelledError("interrupted");
    if (SteadyNow() >= messages.deadline) {
      return absl::DeadlineExceededError("the lane did not end in time");
    }
    return WhyFailed(lane, error);
  };

  v1::LaneRequest message;
  *message.mutable_push() = messages.begin();
  message.set_authorization(client.token().Authorization());
  absl::Status sent = SendRequest(lane, message, stop);
  if (!sent.ok()) return failure(sent);
  std::optional<WindowChunks> in_window;
  if (window != nullptr) in_window.emplace(messages.plan, messages.writer, window, &lane);
  for (const int64_t chunk : messages.chunks) {
    if (lane.HasIncoming()) {
      return failure(absl::UnavailableError("the server has ended the same-host lane"));
    }
    sent = in_window.has_value() ? in_window->Send(chunk, stop)
                                 : SendCopy(messages, chunk, lane, stop);
    if (!sent.ok()) return failure(sent);
    messages.sent_bytes->fetch_add(messages.plan->length_bytes(chunk), std::memory_order_relaxed);
  }
  const std::optional<uint32_t> digest = messages.digest();
  if (!digest.has_value()) return Unreadable();
  messages.gate->FinishReading();
  v1::PushCommit& commit = *message.mutable_commit();
  commit.set_chunk_count(static_cast<int64_t>(messages.chunks.size()));
  commit.set_total_bytes(messages.total_bytes());
  commit.set_digest(*digest);
  sent = SendRequest(lane, message, stop);
  if (!sent.ok()) return failure(sent);
  const absl::StatusOr<LanePipe::Frame> frame = lane.Receive(stop);
  if (!frame.ok()) return failure(frame.status());
  EMA_ASSIGN_OR_RETURN(v1::LaneResponse response, ParseResponse(*frame));
  if (!response.has_pushed() || !response.pushed().has_version()) {
    return MalformedReply("Push without a version");
  }
  if (in_window.has_value()) in_window->Finish();
  return std::move(*response.mutable_pushed());
}

}  // namespace ema::client_internal
