// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/pull_call.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/rpc/grpc_status.h"
#include "server/rpc/raw_message.h"
#include "server/wire/chunk_codec.h"

namespace ema {
namespace {

constexpr char kPull[] = "/ema.v1.EmaService/Pull";

// Keeps a slice's memory valid until gRPC has sent it.
struct SliceOwner {
  std::shared_ptr<Reading> reading;
  std::shared_ptr<const std::byte> memory;
};

}  // namespace

void PullCall::Listen(RpcContext* rpc, CallQueue* queue) {
  std::shared_ptr<PullCall> call(new PullCall(rpc, queue));
  void* const tag = call->accepted_.Arm(call);
  rpc->service.RequestPull(&call->context_, &call->request_, &call->stream_, queue->get(),
                           queue->get(), tag);
}

PullCall::~PullCall() { rpc_->pulls.Leave(this); }

void PullCall::OnAccepted(bool ok) {
  if (!ok) return;  // The server is shutting down.
  begin_ = absl::Now();
  Listen(rpc_, queue_);
  if (absl::Status status = CatchExceptions([this] { return Start(); }); !status.ok()) {
    return Finish(status);
  }
  if (!handler_.needs_disk()) return WriteHeader();
  RunOn(
      *rpc_->disk_reader, [self = shared_from_this()] { self->OpenStored(); },
      handler_.selection_bytes());
}

absl::Status PullCall::Start() {
  EMA_ASSIGN_OR_RETURN(const v1::PullRequest request, Parse<v1::PullRequest>(request_));
  EMA_ASSIGN_OR_RETURN(caller_, rpc_->admission.Admit(kPull, context_, request.model()));
  const LogCallerScope scope(&caller_.log);
  EMA_RETURN_IF_ERROR(
      rpc_->pulls.Enter(this, caller_.authorization, caller_.log.peer, request.model()));
  EMA_RETURN_IF_ERROR(rpc_->CheckPull(request));
  return handler_.Open(request);
}

void PullCall::RunOn(Worker& worker, std::function<void()> work, int64_t bytes) {
  if (absl::Status status = worker.Run(std::move(work), bytes); !status.ok()) Finish(status);
}

void PullCall::OpenStored() {
  const absl::Status status = CatchExceptions([this] { return handler_.OpenStored(); });
  if (!status.ok()) return Finish(status);
  WriteHeader();
}

void PullCall::WriteHeader() {
  if (const auto pinned = handler_.pinned_version()) rpc_->pulls.SetPinnedVersion(this, *pinned);
  const auto header = CatchExceptions([this]() -> absl::StatusOr<grpc::ByteBuffer> {
    v1::PullResponse response;
    *response.mutable_header() = handler_.Header();
    return Serialize(response);
  });
  if (!header.ok()) return Finish(header.status());
  Write(*header);
}

void PullCall::OnWritten(bool ok) {
  SetWaiting(false);
  CountBytes(std::exchange(writing_bytes_, 0));
  if (!ok) return Finish(absl::CancelledError("client cancelled the call"));
  if (has_written_trailer_) return Finish(absl::OkStatus());
  if (is_revoked_.load(std::memory_order_relaxed)) return Finish(RevokedError());
  auto write_next = [self = shared_from_this()] { self->WriteNext(); };
  if (handler_.needs_disk()) return RunOn(*rpc_->disk_reader, std::move(write_next));
  if (handler_.needs_device()) return RunOn(*rpc_->device_reader, std::move(write_next));
  // Readers can wait, trainers cannot.
  queue_->Defer(std::move(write_next));
}

void PullCall::WriteNext() {
  const auto message = CatchExceptions([this] { return NextMessage(); });
  if (!message.ok()) return Finish(message.status());
  Write(*message);
}

absl::StatusOr<grpc::ByteBuffer> PullCall::NextMessage() {
  EMA_ASSIGN_OR_RETURN(std::optional<PullHandler::Chunk> chunk, handler_.Next());
  if (chunk.has_value()) return MessageOf(*std::move(chunk));
  v1::PullResponse response;
  *response.mutable_trailer() = handler_.Trailer(digest_);
  has_written_trailer_ = true;
  return Serialize(response);
}

grpc::ByteBuffer PullCall::MessageOf(PullHandler::Chunk chunk) {
  std::vector<grpc::Slice> slices;
  slices.reserve(chunk.pieces.size() + 1);
  const uint32_t crc32c = handler_.reading()->Checksum(chunk.offset, chunk.pieces);
  const ChunkPrefix prefix = EncodeChunkPrefix({chunk.offset, crc32c, chunk.length_bytes});
  slices.emplace_back(prefix.bytes.data(), prefix.size);
  for (HostPiece& piece : chunk.pieces) {
    slices.emplace_back(
        const_cast<std::byte*>(piece.bytes.data()), piece.bytes.size(),
        [](void* owner) { delete static_cast<SliceOwner*>(owner); },
        new SliceOwner{handler_.reading(), std::move(piece.owner)});
  }
  digest_ = Crc32cCombine(digest_, crc32c, chunk.length_bytes);
  return grpc::ByteBuffer(slices.data(), slices.size());
}

void PullCall::Write(const grpc::ByteBuffer& message) {
  SetWaiting(true);
  writing_bytes_ = static_cast<int64_t>(message.Length());
  stream_.Write(message, written_.Arm(shared_from_this()));
}

void PullCall::End(StreamEnd why) {
  if (why == StreamEnd::kRevoked) return is_revoked_.store(true, std::memory_order_relaxed);
  // A reader that accepts nothing would not receive a status either: the stream is cut.
  context_.TryCancel();
}

void PullCall::Finish(const absl::Status& status) {
  if (GetErrorReason(status) == ErrorReason::kTooManyPins) rpc_->pulls.EndPullsAboveFairShare(this);
  rpc_->observer->OnRpcEnded("Pull", status);
  rpc_->observer->OnPullEnded(handler_.EndOf(status, absl::Now() - begin_));
  handler_.Close();
  stream_.Finish(ToGrpcStatus(status, context_), finished_.Arm(shared_from_this()));
}

}  // namespace ema
