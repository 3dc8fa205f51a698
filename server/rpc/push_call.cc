// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/push_call.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/v1/chunk_codec.h"
#include "server/rpc/convert.h"

namespace ema {
namespace {

absl::Status BadMessage(const std::string& text) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadRequest, text);
}

// A 32-bit checksum from a field that the wire has as int64.
absl::StatusOr<uint32_t> ReadChecksum(const std::string& field, int64_t value) {
  if (value < 0 || value > std::numeric_limits<uint32_t>::max()) {
    return BadMessage(absl::StrCat(field, ": ", value, " given, expected 0 to 2^32 - 1"));
  }
  return static_cast<uint32_t>(value);
}

}  // namespace

void PushCall::Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue) {
  std::shared_ptr<PushCall> call(new PushCall(rpc, queue));
  void* const tag = call->accepted_.Arm(call);
  rpc->service.RequestPush(&call->context_, &call->reader_, queue, queue, tag);
}

PushCall::~PushCall() { rpc_->pushes.Leave(this); }

void PushCall::OnAccepted(bool ok) {
  if (!ok) return;  // Shutting down.
  in_flight_ = rpc_->calls.Enter();
  Listen(rpc_, queue_);
  if (absl::Status status = rpc_->pushes.Enter(this); !status.ok()) return Finish(status);
  Read();
}

void PushCall::Read() {
  SetWaiting(true);
  reader_.Read(&message_, read_.Arm(shared_from_this()));
}

void PushCall::OnRead(bool ok) {
  SetWaiting(false);
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
  const absl::Status status = HandleMessage();
  // Frees the receive buffers: the next message finds them still in the cache.
  slices_.clear();
  message_.Clear();
  if (!status.ok()) return Finish(status);
  if (!committed_) Read();
}

absl::Status PushCall::HandleMessage() {
  slices_.clear();
  if (!message_.Dump(&slices_).ok() || slices_.empty()) return BadMessage("an empty message");

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
    return HandleChunk(chunk->header, pieces_);
  }

  v1::PushRequest request;
  grpc::ProtoBufferReader reader(&message_);
  if (!request.ParseFromZeroCopyStream(&reader))
    return BadMessage("a message that is no PushRequest");
  switch (request.message_case()) {
    case v1::PushRequest::kHeader:
      return HandleHeader(request.header());
    case v1::PushRequest::kChunk: {
      EMA_ASSIGN_OR_RETURN(const uint32_t crc32c,
                           ReadChecksum("chunk.crc32c", request.chunk().crc32c()));
      const std::string& data = request.chunk().data();
      const std::span<const std::byte> piece(reinterpret_cast<const std::byte*>(data.data()),
                                             data.size());
      return HandleChunk({request.chunk().offset(), crc32c, static_cast<int64_t>(data.size())},
                         {&piece, 1});
    }
    case v1::PushRequest::kCommit:
      return HandleCommit(request.commit());
    case v1::PushRequest::MESSAGE_NOT_SET:
      break;
  }
  return BadMessage("a PushRequest with neither header, chunk nor commit");
}

absl::Status PushCall::HandleHeader(const v1::PushHeader& header) {
  if (push_ != nullptr) return BadMessage("a second header");
  EMA_ASSIGN_OR_RETURN(model_, rpc_->store->Get(header.model()));
  PushStart start;
  start.run_epoch = header.run_epoch();
  start.rank = header.rank();
  start.layout_digest = header.layout_digest();
  start.step = header.step();
  start.time = FromProto(header.time());
  start.plan_revision = plan_revision_ = header.plan_revision();
  if (!v1::PushHeader::Frozen_IsValid(header.frozen())) {
    return BadMessage(absl::StrCat("frozen ", static_cast<int>(header.frozen())));
  }
  start.frozen = static_cast<FrozenTensors>(header.frozen());
  EMA_ASSIGN_OR_RETURN(
      push_, model_->OpenPush(
                 start, [self = shared_from_this()](const auto& result) { self->OnEnd(result); }));
  return absl::OkStatus();
}

absl::Status PushCall::HandleChunk(const ChunkHeader& header,
                                   std::span<const std::span<const std::byte>> pieces) {
  if (push_ == nullptr) return BadMessage("a chunk before the header");
  return push_->AddChunk(header, absl::MakeConstSpan(pieces.data(), pieces.size()));
}

absl::Status PushCall::HandleCommit(const v1::PushCommit& commit) {
  if (push_ == nullptr) return BadMessage("a commit before the header");
  EMA_ASSIGN_OR_RETURN(const uint32_t digest, ReadChecksum("commit.digest", commit.digest()));
  committed_ = true;
  // Whoever waits for other ranks must not keep them from getting in.
  rpc_->pushes.Leave(this);
  return push_->Commit({commit.chunk_count(), commit.total_bytes(), digest});
}

void PushCall::OnEnd(const absl::StatusOr<PushResult>& result) { Finish(result); }

void PushCall::EndStalled() {
  Finish(MakeError(absl::StatusCode::kAborted, ErrorReason::kStalled,
                   "nothing arrived on this stream for too long"));
}

void PushCall::Finish(const absl::StatusOr<PushResult>& result) {
  {
    absl::MutexLock lock(&mu_);
    if (finishing_) return;
    finishing_ = true;
  }
  void* const tag = finished_.Arm(shared_from_this());
  if (!result.ok()) {
    reader_.FinishWithError(ToGrpcStatus(result.status(), context_), tag);
    return;
  }
  v1::PushResponse response;
  *response.mutable_version() = ToProto(result->record);
  response.set_applied_step(result->record.step);
  response.set_durable_step(model_->durable_step());
  response.set_duplicate(result->duplicate);
  *response.mutable_plan() = ToProto(result->plan, plan_revision_);
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  grpc::GenericSerialize<grpc::ProtoBufferWriter, v1::PushResponse>(response, &bytes, &own_buffer);
  reader_.Finish(bytes, grpc::Status::OK, tag);
}

void PushCall::OnFinished(bool) {
  // Breaks the circle call -> push -> session -> call.
  push_.reset();
}

}  // namespace ema
