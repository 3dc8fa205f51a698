// SPDX-License-Identifier: Apache-2.0
//
// One pull from one server.
#ifndef EMA_CLIENT_CPP_PULL_PULLER_H_
#define EMA_CLIENT_CPP_PULL_PULLER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/pull/message_pieces.h"
#include "ema/client.h"
#include "ema/v1/ema_service.pb.h"
#include "server/wire/chunk_codec.h"

namespace ema::client_internal {

// One pull, over as many calls as it takes. For one thread.
class Puller {
 public:
  Puller(v1::PullRequest request, const Client::PullTarget* target,
         const std::function<void(int64_t)>* on_progress)
      : request_(std::move(request)),
        original_request_(request_),
        wants_newest_(request_.version() == 0),
        target_(*target),
        on_progress_(*on_progress) {}

  // Calls `server` until the pull has ended, with retries: through a lane if there is one, else by
  // gRPC. Continues where the last call has ended.
  absl::Status Run(Client::Impl& server, SteadyTime deadline, Interrupt* interrupt);
  // Resets the pull, so that Run() begins again with the version that the request now means: the
  // newest one, or that of the label or step. Returns false and does nothing if the request names a
  // version number, or no header has arrived.
  bool StartOver();

  PullInfo TakeInfo() && {
    info_->received_bytes = received_bytes_;
    info_->lane = lane_;
    return *std::move(info_);
  }

 private:
  // One call, from where the last one ended.
  absl::Status Attempt(Call& call);
  // The same through a lane.
  absl::Status AttemptByLane(LanePipe& lane, const std::string& authorization,
                             const LanePipe::Stop& stop);
  void Begin(Lane lane);
  absl::Status OnMessage(grpc::ByteBuffer& message);
  absl::Status OnHeader(const v1::PullHeader& header);
  // `copy(to)` copies the data, and returns their CRC32C, or 0 if `header.skips_checksum`.
  template <typename Copy>
  absl::Status OnChunk(const ChunkHeader& header, Copy copy);
  absl::Status OnTrailer(const v1::PullTrailer& trailer);

  v1::PullRequest request_;
  const v1::PullRequest original_request_;
  const bool wants_newest_;
  const Client::PullTarget& target_;
  const std::function<void(int64_t)>& on_progress_;

  std::optional<PullInfo> info_;
  std::span<std::byte> memory_;
  absl::Status target_error_;  // Never retried, whatever its code.
  int64_t position_ = 0;       // The bytes before it are complete: Attempt() continues here.
  int64_t received_bytes_ = 0;
  MessagePieces pieces_;

  bool may_use_lane_ = true;  // False: it has been tried.

  // The state of the running call.
  Lane lane_ = Lane::kGrpc;
  bool has_header_ = false;
  bool has_trailer_ = false;
  bool omits_unchanged_ = false;
  // The server rejected a call through a lane before any data arrived, and would reject it over
  // gRPC for the same reason.
  bool is_refused_ = false;
  int64_t chunk_count_ = 0;
  int64_t chunk_bytes_ = 0;
  uint32_t digest_ = 0;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PULL_PULLER_H_
