// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/lane_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/base/steady_wait.h"
#include "server/base/stream_copy.h"
#include "server/core/model_store.h"
#include "server/rpc/authorization.h"
#include "server/rpc/grpc_status.h"
#include "server/rpc/push_handler.h"

namespace ema {
namespace {

// The result of a push, once it has ended. Thread-safe.
class PushEnding {
 public:
  void Set(const absl::StatusOr<PushResult>& result) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    result_ = result;
    wait_.WakeAll();
  }
  bool is_set() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return result_.has_value();
  }
  // nullopt: it has not ended after `max_wait`.
  std::optional<absl::StatusOr<PushResult>> Wait(absl::Duration max_wait) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto has_ended = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return result_.has_value(); };
    wait_.AwaitUntil(mu_, After(SteadyNow(), max_wait), has_ended);
    return result_;
  }

 private:
  mutable absl::Mutex mu_;
  std::optional<absl::StatusOr<PushResult>> result_ ABSL_GUARDED_BY(mu_);
  SteadyWait wait_;  // Woken when it is set.
};

}  // namespace

std::string PeerName(int fd) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return "lane";
  return absl::StrCat("lane:pid=", peer.pid);
}

bool LaneConnection::Accept(int fd) {
  peer_ = PeerName(fd);
  // A client has to pass its memory soon.
  const SteadyTime deadline = After(SteadyNow(), absl::Seconds(5));
  const auto is_late = [&] { return is_stopping_.load() || SteadyNow() > deadline; };
  const auto admit_window = [&](int64_t size_bytes) {
    absl::StatusOr<std::unique_ptr<MemoryBudget::Reservation>> reserved =
        windows_->Reserve("a window", size_bytes);
    if (!reserved.ok()) return false;
    window_memory_ = *std::move(reserved);
    return true;
  };
  absl::StatusOr<std::unique_ptr<LanePipe>> pipe = LanePipe::Accept(fd, is_late, admit_window);
  if (!pipe.ok()) return false;
  pipe_ = *std::move(pipe);
  if (!pipe_->has_offered_window()) return true;
  v1::LaneResponse response;
  response.mutable_window()->set_is_mapped(pipe_->has_window());
  return pipe_->SendMessage(response.SerializeAsString(), is_late).ok();
}

void LaneConnection::Run(int fd) {
  if (!Accept(fd)) return;
  while (!is_stopping_.load() && !has_lost_step_) {
    absl::StatusOr<v1::LaneRequest> request = CatchExceptions([this] { return ReceiveRequest(); });
    absl::Status status = request.status();
    if (request.ok()) {
      status = Serve(*std::move(request));
    } else if (is_stopping_.load() || GetErrorReason(status) == ErrorReason::kUnspecified) {
      return;
    }
    if (status.ok()) continue;
    v1::LaneResponse response;
    v1::LaneError* const error = response.mutable_error();
    error->set_code(static_cast<int64_t>(status.code()));
    error->set_message(std::string(status.message()));
    *error->mutable_detail() = DetailOf(status);
    (void)Send(response);  // The client finds the lane closed, too.
    return;
  }
}

absl::StatusOr<v1::LaneRequest> LaneConnection::ReceiveRequest() {
  is_stalled_.store(false, std::memory_order_relaxed);
  is_revoked_.store(false, std::memory_order_relaxed);
  const absl::StatusOr<LanePipe::Frame> frame = pipe_->Receive([this] { return MustEnd(); });
  if (!frame.ok()) return WhyEnded(frame.status());
  v1::LaneRequest request;
  if (frame->is_chunk || !request.ParseFromString(frame->message)) {
    return BadRequest("malformed LaneRequest");
  }
  request.DiscardUnknownFields();  // They would use memory until the call ends.
  return request;
}

absl::Status LaneConnection::Serve(v1::LaneRequest request) {
  BeginTiming();
  const bool is_push = request.has_push();
  if (!is_push && !request.has_pull()) {
    return BadRequest("unexpected LaneRequest; expected the header of a push or a pull");
  }
  const std::string_view method = is_push ? "/ema.v1.EmaService/Push" : "/ema.v1.EmaService/Pull";
  const std::string& model = is_push ? request.push().model() : request.pull().model();
  const auto serve = [&]() -> absl::Status {
    EMA_ASSIGN_OR_RETURN(const Caller caller,
                         rpc_->admission.Admit(method, request.authorization(), peer_, model));
    StreamSlots& slots = is_push ? rpc_->pushes : rpc_->pulls;
    EMA_RETURN_IF_ERROR(slots.Enter(this, caller.authorization, caller.log.peer, model));
    const absl::Cleanup leave = [&] { slots.Leave(this); };
    const LogCallerScope scope(&caller.log);
    return is_push ? ServePush(request.push()) : ServePull(std::move(*request.mutable_pull()));
  };
  absl::Status status = CatchExceptions(serve);
  rpc_->observer->OnRpcEnded(ShortName(method), status);
  return status;
}

absl::Status LaneConnection::ServePush(const v1::PushHeader& header) {
  PushHandler handler(rpc_->store.get());
  std::optional<PushPhases> phases;
  absl::Cleanup report = [&] {
    rpc_->observer->OnPushEnded({handler.model_name(), handler.received_bytes(), phases});
  };
  const auto ending = std::make_shared<PushEnding>();
  EMA_RETURN_IF_ERROR(rpc_->CheckLoaded(header.model()));
  EMA_RETURN_IF_ERROR(
      handler.OnHeader(header, [ending](const auto& result) { ending->Set(result); }));
  std::optional<PushTiming> timing;
  while (true) {
    const absl::StatusOr<LanePipe::Frame> frame = Receive([&] { return ending->is_set(); });
    if (!frame.ok() && ending->is_set()) {
      // Perhaps with a version: the rank had committed before it began this stream.
      rpc_->pushes.Leave(this);
      break;
    }
    EMA_RETURN_IF_ERROR(frame.status());
    if (frame->is_chunk) {
      EMA_RETURN_IF_ERROR(handler.OnChunk({.offset = frame->offset,
                                           .crc32c = frame->crc32c,
                                           .data_bytes = static_cast<int64_t>(frame->bytes.size()),
                                           .skips_checksum = true},
                                          {&frame->bytes, 1}));
      continue;
    }
    v1::LaneRequest request;
    if (!request.ParseFromString(frame->message) || !request.has_commit()) {
      return BadRequest("unexpected message in a push; expected a chunk or the commit");
    }
    timing = PushTiming{.commit_arrival = marked_time(),
                        .receive = absl::FromChrono(waited()),
                        .fold = absl::FromChrono(worked())};
    handler.EndChunks();
    // While this rank waits for others, they may need its slot.
    rpc_->pushes.Leave(this);
    EMA_RETURN_IF_ERROR(handler.OnCommit(request.commit()));
    break;
  }
  std::optional<absl::StatusOr<PushResult>> result;
  while (!(result = ending->Wait(absl::Milliseconds(50))).has_value()) {
    EMA_RETURN_IF_ERROR(WhyEnded(pipe_->CheckPeer([this] { return MustEnd(); })));
  }
  EMA_RETURN_IF_ERROR(result->status());
  const PushResult& pushed = **result;
  if (timing.has_value() && !pushed.is_duplicate) phases = PhasesOf(*timing, pushed);
  std::move(report).Invoke();
  v1::LaneResponse response;
  *response.mutable_pushed() = handler.Response(pushed, phases);
  EMA_RETURN_IF_ERROR(Send(response));
  // The client's commit may still arrive, and would be read as the next call.
  has_lost_step_ = !timing.has_value();
  return absl::OkStatus();
}

absl::Status LaneConnection::ServePull(v1::PullRequest request) {
  PullHandler handler(rpc_->store.get(), rpc_->checkpoints);
  const absl::Time begin = absl::Now();
  absl::Status status = SendVersion(std::move(request), handler);
  if (GetErrorReason(status) == ErrorReason::kTooManyPins) rpc_->pulls.EndPullsAboveFairShare(this);
  rpc_->observer->OnPullEnded(handler.EndOf(status, absl::Now() - begin));
  return status;
}

absl::Status LaneConnection::SendVersion(v1::PullRequest request, PullHandler& handler) {
  EMA_RETURN_IF_ERROR(rpc_->CheckPull(request));
  EMA_RETURN_IF_ERROR(handler.Open(request));
  request = v1::PullRequest();  // A selection may be long.
  EMA_RETURN_IF_ERROR(handler.OpenStored());
  if (const auto pinned = handler.pinned_version()) rpc_->pulls.SetPinnedVersion(this, *pinned);
  {
    v1::LaneResponse response;  // As large as the list of tensors: gone before there is a chunk.
    *response.mutable_pull() = handler.Header();
    EMA_RETURN_IF_ERROR(Send(response));
  }
  int64_t slot_count = 0;
  while (true) {
    EMA_ASSIGN_OR_RETURN(const std::optional<PullHandler::Chunk> chunk, handler.Next());
    if (!chunk.has_value()) break;
    EMA_ASSIGN_OR_RETURN(const int64_t slots, SendChunk(*chunk));
    slot_count += slots;
  }
  v1::LaneResponse response;
  *response.mutable_trailer() = handler.Trailer(/*digest=*/0);
  response.mutable_trailer()->set_chunk_count(slot_count);
  return Send(response);
}

absl::StatusOr<int64_t> LaneConnection::SendChunk(const PullHandler::Chunk& chunk) {
  int64_t slot_count = 0;
  auto piece = chunk.pieces.begin();
  size_t taken = 0;  // Of the piece.
  for (int64_t sent = 0; sent < chunk.length_bytes; ++slot_count) {
    if (MustEnd()) return WhyEnded(absl::CancelledError("the pull is ended"));
    SetWaiting(true);
    const absl::StatusOr<std::byte*> place = pipe_->ReserveChunk([this] { return MustEnd(); });
    SetWaiting(false);
    if (!place.ok()) return WhyEnded(place.status());
    const int64_t size = std::min(LanePipe::kMaxChunkBytes, chunk.length_bytes - sent);
    for (int64_t filled = 0; filled < size;) {
      const std::span<const std::byte> bytes = piece->bytes.subspan(taken);
      const size_t n = std::min(bytes.size(), static_cast<size_t>(size - filled));
      FetchCopy(bytes.first(n), *place + filled);
      filled += static_cast<int64_t>(n);
      taken += n;
      if (n == bytes.size()) {
        ++piece;
        taken = 0;
      }
    }
    pipe_->SendChunk(chunk.offset + sent, size, /*crc32c=*/0);
    CountBytes(size);
    sent += size;
  }
  return slot_count;
}

absl::StatusOr<LanePipe::Frame> LaneConnection::Receive(const LanePipe::Stop& has_ended) {
  if (MustEnd()) return WhyEnded(absl::CancelledError("the push is ended"));
  SetWaiting(true);
  absl::StatusOr<LanePipe::Frame> frame = pipe_->Receive([&] { return MustEnd() || has_ended(); });
  SetWaiting(false);
  if (!frame.ok()) return WhyEnded(frame.status());
  return frame;
}

absl::Status LaneConnection::Send(const v1::LaneResponse& response) {
  SetWaiting(true);
  const absl::Status sent =
      pipe_->SendMessage(response.SerializeAsString(), [this] { return MustEnd(); });
  SetWaiting(false);
  return WhyEnded(sent);
}

bool LaneConnection::MustEnd() const {
  return is_stopping_.load() || is_stalled_.load(std::memory_order_relaxed) ||
         is_revoked_.load(std::memory_order_relaxed);
}

absl::Status LaneConnection::WhyEnded(const absl::Status& status) const {
  if (status.ok()) return status;
  if (is_revoked_.load(std::memory_order_relaxed)) return RevokedError();
  if (is_stalled_.load(std::memory_order_relaxed)) {
    return MakeError(absl::StatusCode::kAborted, ErrorReason::kStalled,
                     "the lane was idle for too long (--stream-timeout) or too slow "
                     "(--min-pull-bytes-per-second), or another client needed its place");
  }
  return is_stopping_.load() ? DrainingError() : status;
}

}  // namespace ema
