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
#include "server/rpc/convert.h"
#include "server/wire/chunk_codec.h"

namespace ema {
namespace {

constexpr char kPush[] = "/ema.v1.EmaService/Push";

}  // namespace

void PushCall::Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue) {
  std::shared_ptr<PushCall> call(new PushCall(rpc, queue));
  void* const tag = call->accepted_.Arm(call);
  rpc->service.Request(kPush, &call->context_, &call->stream_, queue, tag);
}

PushCall::~PushCall() { rpc_->pushes.Leave(this); }

void PushCall::OnAccepted(bool ok) {
  if (!ok) return;  // Shutting down.
  in_flight_ = rpc_->calls.Enter();
  BeginTiming();
  Listen(rpc_, queue_);
  // Before it takes a place.
  absl::StatusOr<Caller> caller = rpc_->Admit(kPush, context_);
  if (!caller.ok()) return Finish(caller.status());
  caller_ = *std::move(caller);
  SetCaller(kPush, caller_.authorization, /*model=*/std::nullopt);
  if (absl::Status status = rpc_->pushes.Enter(this, rpc_->authenticator); !status.ok())
    return Finish(status);
  Read();
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
    if (finishing_) return;
  }
  if (!ok) {
    // gRPC shows a malformed or oversized message as a clean end, too: without a commit nothing is
    // applied.
    return Finish(MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kNoCommit,
                            "the stream ended, or broke, before its commit message"));
  }
  const absl::Status status = CatchExceptions([this] { return HandleMessage(); });
  // Frees the receive buffers: the next message finds them still in the cache.
  slices_.clear();
  message_.Clear();
  if (!status.ok()) return Finish(status);
  if (!committed_) Read();
}

absl::Status PushCall::HandleMessage() {
  slices_.clear();
  if (!message_.Dump(&slices_).ok() || slices_.empty()) return BadRequest("an empty message");

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

  v1::PushRequest request;
  grpc::ProtoBufferReader reader(&message_);
  if (!request.ParseFromZeroCopyStream(&reader)) return BadRequest("malformed PushRequest");
  switch (request.message_case()) {
    case v1::PushRequest::kHeader:
      EMA_RETURN_IF_ERROR(rpc_->CheckModel(kPush, caller_, request.header().model()));
      EMA_RETURN_IF_ERROR(
          rpc_->pushes.SetModel(this, request.header().model(), rpc_->authenticator));
      return handler_.OnHeader(request.header(), [self = shared_from_this()](const auto& result) {
        self->Finish(result);
      });
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
      committed_ = true;
      handler_.EndChunks();
      // Whoever waits for other ranks must not keep them from getting in.
      rpc_->pushes.Leave(this);
      {
        // Whoever was told that the stream has stalled must not find its step committed.
        absl::MutexLock lock(&mu_);
        if (finishing_) return absl::OkStatus();
        timing_ = {.commit_arrival = marked_time(),
                   .receive = absl::FromChrono(waited()),
                   .fold = absl::FromChrono(worked())};
      }
      return handler_.OnCommit(request.commit());
    case v1::PushRequest::MESSAGE_NOT_SET:
      break;
  }
  return BadRequest("a PushRequest with neither header, chunk nor commit");
}

void PushCall::End(StreamEnd why) {
  if (why == StreamEnd::kRevoked) return Finish(RevokedError());
  Finish(MakeError(absl::StatusCode::kAborted, ErrorReason::kStalled,
                   absl::StrCat("stream idle for ",
                                absl::FormatDuration(absl::FromChrono(WaitingTime(SteadyNow()))),
                                "; the server ends idle streams (--stream-timeout)")));
}

void PushCall::Finish(const absl::StatusOr<PushResult>& result) {
  std::optional<PushPhases> phases;
  void* tag = nullptr;
  {
    absl::MutexLock lock(&mu_);
    if (finishing_) return;
    finishing_ = true;
    // Before anybody else sees that, and lets the call go.
    tag = finished_.Arm(shared_from_this());
    if (timing_.has_value()) {
      if (result.ok() && !result->duplicate) phases = PhasesOf(*timing_, *result);
      rpc_->observer->OnPushEnded({handler_.model_name(), handler_.received_bytes(), phases});
    }
  }
  const auto response = CatchExceptions([&]() -> absl::StatusOr<v1::PushResponse> {
    EMA_RETURN_IF_ERROR(result.status());
    return handler_.Response(*result, phases);
  });
  rpc_->observer->OnRpcEnded("Push", response.status());
  if (!response.ok()) {
    stream_.Finish(ToGrpcStatus(response.status(), context_), tag);
    return;
  }
  stream_.WriteAndFinish(*response, grpc::WriteOptions(), grpc::Status::OK, tag);
}

void PushCall::OnFinished(bool) {
  {
    // Until the commit message, only this thread knows what has come.
    absl::MutexLock lock(&mu_);
    if (!timing_.has_value()) {
      rpc_->observer->OnPushEnded({handler_.model_name(), handler_.received_bytes(), std::nullopt});
    }
  }
  // Breaks the circle call -> handler -> session -> call.
  handler_.Close();
}

}  // namespace ema
