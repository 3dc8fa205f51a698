// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/pull_call.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/v1/chunk_codec.h"
#include "server/base/crc32c.h"
#include "server/rpc/convert.h"

namespace ema {
namespace {

// 4 MiB beats 1 MiB by 2 to 5 % on loopback; 8 MiB loses 10 %.
constexpr int64_t kChunkBytes = int64_t{1} << 20;

grpc::ByteBuffer Serialize(const v1::PullResponse& response) {
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  grpc::GenericSerialize<grpc::ProtoBufferWriter, v1::PullResponse>(response, &bytes, &own_buffer);
  return bytes;
}

// What keeps a slice's memory valid until gRPC has sent it.
struct SliceOwner {
  SnapshotRef snapshot;
  std::shared_ptr<const std::byte> memory;
};

}  // namespace

void PullCall::Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue) {
  std::shared_ptr<PullCall> call(new PullCall(rpc, queue));
  void* const tag = call->accepted_.Arm(call);
  rpc->service.RequestPull(&call->context_, &call->request_, &call->writer_, queue, queue, tag);
}

PullCall::~PullCall() { rpc_->pulls.Leave(this); }

void PullCall::OnAccepted(bool ok) {
  if (!ok) return;  // Shutting down.
  in_flight_ = rpc_->calls.Enter();
  Listen(rpc_, queue_);
  if (absl::Status status = Start(); !status.ok()) return Finish(status);
  WriteHeader();
}

absl::Status PullCall::Start() {
  EMA_RETURN_IF_ERROR(rpc_->pulls.Enter(this));
  v1::PullRequest request;
  grpc::ProtoBufferReader reader(&request_);
  if (!request.ParseFromZeroCopyStream(&reader)) {
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadRequest,
                     "a message that is no PullRequest");
  }
  if (request.version() < 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadRequest,
                     absl::StrCat("version: ", request.version(), " given, expected 0 or more"));
  }
  EMA_ASSIGN_OR_RETURN(model_, rpc_->store->Get(request.model()));
  if (SnapshotRef synthesized = model_->FindSynthesized(request.track())) {
    return StartSynthesized(std::move(synthesized), request.version(), request.incarnation());
  }
  absl::Status known = model_->CheckTrack(request.track());
  absl::StatusOr<SnapshotRef> snapshot =
      model_->PinVersion(request.version(), request.incarnation());
  // A track that was removed is still in the versions that have it.
  if (!known.ok() && (!snapshot.ok() || (*snapshot)->Find(request.track()) == nullptr)) {
    return known;
  }
  EMA_RETURN_IF_ERROR(snapshot.status());
  snapshot_ = *std::move(snapshot);
  track_ = snapshot_->Find(request.track());
  if (track_ == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoVersion,
                     absl::StrCat("track \"", request.track(), "\" has no value in version ",
                                  snapshot_->record.version, " yet"));
  }
  total_bytes_ = track_->track->layout().total_bytes();
  return absl::OkStatus();
}

absl::Status PullCall::StartSynthesized(SnapshotRef snapshot, int64_t version,
                                        int64_t incarnation) {
  const VersionRecord& record = snapshot->record;
  if ((version != 0 && version != record.version) ||
      (version != 0 && incarnation != 0 && incarnation != record.incarnation)) {
    return MakeError(
        absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
        absl::StrCat("version: ", version, " given, but \"", snapshot->tracks[0].track->name(),
                     "\" has been built as version ", record.version, " for step ", record.step));
  }
  snapshot_ = std::move(snapshot);
  track_ = &snapshot_->tracks[0];
  total_bytes_ = track_->track->layout().total_bytes();
  return absl::OkStatus();
}

void PullCall::WriteHeader() {
  const StorageLayout& layout = track_->track->layout();
  v1::PullResponse response;
  v1::PullHeader& header = *response.mutable_header();
  *header.mutable_version() = ToProto(snapshot_->record);
  for (int64_t i = 0; i < model_->manifest().tensor_count(); ++i) {
    if (!layout.entry(i).is_stored) continue;
    v1::PullHeader::Tensor* const tensor = header.add_tensors();
    ToProto(model_->manifest().tensor(i), tensor->mutable_spec());
    tensor->mutable_spec()->set_dtype(static_cast<v1::Dtype>(layout.entry(i).dtype));
    tensor->set_offset(layout.entry(i).offset);
    tensor->set_length_bytes(layout.entry(i).length_bytes);
  }
  header.set_total_bytes(total_bytes_);
  Write(Serialize(response));
}

void PullCall::OnWritten(bool ok) {
  SetWaiting(false);
  if (!ok) return Finish(absl::CancelledError("the reader has left"));
  if (trailer_written_) return Finish(absl::OkStatus());
  if (sent_bytes_ == total_bytes_) return WriteTrailer();
  if (absl::Status status = WriteChunk(); !status.ok()) Finish(status);
}

absl::Status PullCall::WriteChunk() {
  const int64_t chunk_bytes = std::min(kChunkBytes, total_bytes_ - sent_bytes_);
  EMA_ASSIGN_OR_RETURN(
      std::vector<HostPiece> pieces,
      ReadBlocks(model_->device(), *track_->track, track_->blocks, sent_bytes_, chunk_bytes));
  std::vector<grpc::Slice> slices;
  slices.reserve(pieces.size() + 1);
  slices.emplace_back();  // The prefix, once the checksum is known.
  uint32_t crc32c = 0;
  for (HostPiece& piece : pieces) {
    crc32c = Crc32c(crc32c, piece.bytes);
    slices.emplace_back(
        const_cast<std::byte*>(piece.bytes.data()), piece.bytes.size(),
        [](void* owner) { delete static_cast<SliceOwner*>(owner); },
        new SliceOwner{snapshot_, std::move(piece.owner)});
  }
  const ChunkPrefix prefix = EncodeChunkPrefix({sent_bytes_, crc32c, chunk_bytes});
  slices.front() = grpc::Slice(prefix.bytes.data(), prefix.size);
  digest_ = Crc32cCombine(digest_, crc32c, chunk_bytes);
  sent_bytes_ += chunk_bytes;
  ++chunk_count_;
  Write(grpc::ByteBuffer(slices.data(), slices.size()));
  return absl::OkStatus();
}

void PullCall::WriteTrailer() {
  v1::PullResponse response;
  response.mutable_trailer()->set_chunk_count(chunk_count_);
  response.mutable_trailer()->set_total_bytes(total_bytes_);
  response.mutable_trailer()->set_digest(digest_);
  trailer_written_ = true;
  Write(Serialize(response));
}

void PullCall::Write(const grpc::ByteBuffer& message) {
  SetWaiting(true);
  writer_.Write(message, written_.Arm(shared_from_this()));
}

// A reader that takes nothing could not be told why, either: the stream is cut.
void PullCall::EndStalled() { context_.TryCancel(); }

void PullCall::Finish(const absl::Status& status) {
  snapshot_.reset();
  writer_.Finish(ToGrpcStatus(status, context_), finished_.Arm(shared_from_this()));
}

}  // namespace ema
