// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/window_chunks.h"

#include <iterator>
#include <optional>

#include "client/cpp/push/push_messages.h"
#include "ema/internal/status_macros.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {
namespace {

// How long the server may take to notice the end of a lane. It polls at least every 50 ms.
constexpr absl::Duration kPeerEndGrace = absl::Seconds(1);

}  // namespace

WindowChunks::~WindowChunks() {
  if (sent_.empty()) return;
  // For a server that hangs, only one of the lanes waits.
  if (!staged_->ring().is_discarded() && lane_->AwaitPeerEnd(After(SteadyNow(), kPeerEndGrace))) {
    EndLoans(0, /*is_read=*/false);
  } else {
    staged_->ring().DiscardWindow();
  }
}

absl::Status WindowChunks::Send(int64_t chunk, const LanePipe::Stop& stop) {
  // The ring has at least twice as many buffers as the lanes have places for chunks, so if there is
  // a place, there is a buffer.
  EMA_RETURN_IF_ERROR(lane_->AwaitPlace(stop));
  EndLoans(lane_->unread_frame_count(), /*is_read=*/true);
  const std::optional<ChunkWriter::Loan> loan = writer_->Borrow(chunk);
  if (!loan.has_value()) return UnreadableError();
  sent_.push_back({.chunk = chunk, .slot = loan->slot});
  lane_->SendWindowChunk(plan_->offset(chunk), loan->bytes, loan->crc32c);
  return absl::OkStatus();
}

void WindowChunks::EndLoans(int64_t remaining, bool is_read) {
  for (; std::ssize(sent_) > remaining; sent_.pop_front()) {
    staged_->EndLoan(sent_.front().chunk, sent_.front().slot, is_read);
  }
}

}  // namespace ema::client_internal
