// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/push_call.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/rpc/convert_core.h"
#include "server/rpc/grpc_status.h"
#include "server/rpc/raw_message.h"
#include "server/wire/chunk_codec.h"

namespace ema {
namespace {

constexpr char kPush[] = "/ema.v1.EmaService/Push";

}  // namespace

void PushCall::Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue) {
  std::shared_ptr<PushCall> call(new PushCall(rpc, queue));
  void* const tag = call->accepted_.Arm(call);
  rpc->service.RequestPush(&call->context_, &call->stream_, queue, queue, tag);
}

PushCall::~PushCall() { rpc_->pushes.Leave(this); }

void PushCall::OnAccepted(bool ok) {
  if (!ok) return;  // The server is shutting down.
  BeginTiming();
  Listen(rpc_, queue_);
  if (absl::Status status = CatchExceptions([this] { return Start(); }); !status.ok()) {
    return Finish(status);
  }
  Read();
}

absl::Status PushCall::Start() {
  // gRPC reports a push before its first message, which names the model.
  EMA_ASSIGN_OR_RETURN(caller_, rpc_->admission.Admit(kPush, context_, /*model=*/std::nullopt));
  return rpc_->pushes.Enter(this, caller_.authorization, caller_.log.peer,
                            /*model=*/std::nullopt);
}

void PushCall::Read() {
  SetWaiting(true);
  stream_.Read(&message_, read_.Arm(shared_from_this()));
}

void PushCall::OnRead(bool ok) {
  SetWaiting(false);
  const LogCallerScope scope(&caller_.log);
  {
    absl::MutexLock lock(&mu_);
    if (is_finishing_) return;
  }
  if (!ok) {
    // gRPC reports a malformed or oversized message as a clean end, too: without a commit nothing
    // is applied.
    return Finish(MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kNoCommit,
                            "the stream ended before its commit message"));
  }
  const absl::Status status = CatchExceptions([this] { return HandleMessage(); });
  // Frees the receive buffers: the next message finds them still in the cache.
  slices_.clear();
  message_.Clear();
  if (!status.ok()) return Finish(status);
  if (!is_committed_) Read();
}

absl::Status PushCall::HandleMessage() {
  slices_.clear();
  if (!message_.Dump(&slices_).ok() || slices_.empty()) {
    return BadRequest("empty message; expected a PushRequest");
  }

  pieces_.clear();
  std::array<std::byte, kMaxChunkPrefixBytes> head;
  size_t head_bytes = 0;
  for (const grpc::Slice& slice : slices_) {
    pieces_.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
    const size_t n = std::min(slice.size(), head.size() - head_bytes);
    std::memcpy(head.data() + head_bytes, slice.begin(), n);
    head_bytes += n;
  }
  if (const auto chunk =
          ParseChunkPrefix({head.data(), head_bytes}, static_cast<int64_t>(message_.Length()))) {
    size_t skip = chunk->data_start;
    for (std::span<const std::byte>& piece : pieces_) {
      const size_t n = std::min(skip, piece.size());
      piece = piece.subspan(n);
      skip -= n;
    }
    return handler_.OnChunk(chunk->header, pieces_);
  }

  EMA_ASSIGN_OR_RETURN(const v1::PushRequest request, Parse<v1::PushRequest>(message_));
  switch (request.message_case()) {
    case v1::PushRequest::kHeader:
      return HandleHeader(request.header());
    case v1::PushRequest::kChunk: {
      EMA_ASSIGN_OR_RETURN(const uint32_t crc32c,
                           ReadChecksum("chunk.crc32c", request.chunk().crc32c()));
      const std::string& data = request.chunk().data();
      const std::span<const std::byte> piece(reinterpret_cast<const std::byte*>(data.data()),
                                             data.size());
      return handler_.OnChunk({request.chunk().offset(), crc32c, static_cast<int64_t>(data.size())},
                              {&piece, 1});
    }
    case v1::PushRequest::kCommit:
      return HandleCommit(request.commit());
    case v1::PushRequest::MESSAGE_NOT_SET:
      break;
  }
  return BadRequest("PushRequest without a header, a chunk or a commit");
}

absl::Status PushCall::HandleHeader(const v1::PushHeader& header) {
  rpc_->pushes.SetModel(this, header.model());
  EMA_RETURN_IF_ERROR(
      rpc_->admission.Admit(kPush, caller_.authorization, caller_.log.peer, header.model())
          .status());
  EMA_RETURN_IF_ERROR(rpc_->CheckLoaded(header.model()));
  return handler_.OnHeader(
      header, [self = shared_from_this()](const auto& result) { self->Finish(result); });
}

absl::Status PushCall::HandleCommit(const v1::PushCommit& commit) {
  is_committed_ = true;
  handler_.EndChunks();
  // While this rank waits for others, they may need its slot.
  rpc_->pushes.Leave(this);
  {
    // If the stream was ended as stalled, the client got an error: its step must not be committed.
    absl::MutexLock lock(&mu_);
    if (is_finishing_) return absl::OkStatus();
    timing_ = {.commit_arrival = marked_time(),
               .receive = absl::FromChrono(waited()),
               .fold = absl::FromChrono(worked())};
  }
  return handler_.OnCommit(commit);
}

void PushCall::End(StreamEnd why) {
  if (why == StreamEnd::kRevoked) return Finish(RevokedError());
  if (why == StreamEnd::kOverFairShare) return Finish(FairShareError("push"));
  Finish(MakeError(absl::StatusCode::kAborted, ErrorReason::kStalled,
                   absl::StrCat("stream idle for ",
                                absl::FormatDuration(absl::FromChrono(WaitingTime(SteadyNow()))),
                                "; the server ends idle streams after --stream-timeout, or earlier "
                                "if it needs their slots")));
}

void PushCall::Finish(const absl::StatusOr<PushResult>& result) {
  std::optional<PushPhases> phases;
  void* tag = nullptr;
  {
    absl::MutexLock lock(&mu_);
    if (is_finishing_) return;
    is_finishing_ = true;
    // Before another thread sees is_finishing_ and drops its reference.
    tag = finished_.Arm(shared_from_this());
    if (timing_.has_value()) {
      if (result.ok() && !result->is_duplicate) phases = PhasesOf(*timing_, *result);
      rpc_->observer->OnPushEnded({handler_.model_name(), handler_.received_bytes(), phases});
    }
  }
  const auto response = CatchExceptions([&]() -> absl::StatusOr<v1::PushResponse> {
    EMA_RETURN_IF_ERROR(result.status());
    return handler_.Response(*result, phases);
  });
  rpc_->observer->OnRpcEnded("Push", response.status());
  if (response.ok()) return stream_.Finish(Serialize(*response), grpc::Status::OK, tag);
  stream_.FinishWithError(ToGrpcStatus(response.status(), context_), tag);
}

void PushCall::OnFinished(bool) {
  {
    // Until the commit message, only this thread knows what has been received.
    absl::MutexLock lock(&mu_);
    if (!timing_.has_value()) {
      rpc_->observer->OnPushEnded({handler_.model_name(), handler_.received_bytes(), std::nullopt});
    }
  }
  // Breaks the circle call -> handler -> session -> call.
  handler_.Close();
}

}  // namespace ema
