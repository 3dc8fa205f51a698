// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/grpc_push_stream.h"

#include <optional>
#include <utility>

#include "client/cpp/transport/convert_replies.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

constexpr char kPushMethod[] = "/ema.v1.EmaService/Push";

grpc::ByteBuffer Encode(const v1::PushRequest& message) {
  grpc::ByteBuffer buffer;
  bool own_buffer = false;
  grpc::SerializationTraits<v1::PushRequest>::Serialize(message, &buffer, &own_buffer);
  return buffer;
}

}  // namespace

GrpcPushStream::GrpcPushStream(std::shared_ptr<Connection> connection, const PushMessages* messages)
    : messages_(messages), call_(std::move(connection), messages->deadline, messages->interrupt) {}

GrpcPushStream::~GrpcPushStream() {
  if (stream_ != nullptr) (void)End();
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

absl::Status GrpcPushStream::SendHeader(const v1::PushHeader& header) {
  stream_ = call_.connection().generic_stub().PrepareCall(call_.context(), kPushMethod, &queue_);
  stream_->StartCall(this);
  is_pending_ = true;
  v1::PushRequest message;
  *message.mutable_header() = header;
  return Write(Encode(message));
}

absl::Status GrpcPushStream::SendChunk(int64_t chunk) {
  const std::optional<grpc::ByteBuffer> encoded =
      messages_->writer->Write(chunk, scratch_, /*copies=*/!call_.connection().owns_socket());
  return encoded.has_value() ? Write(*encoded) : End();
}

absl::StatusOr<v1::PushResponse> GrpcPushStream::Commit(const v1::PushCommit& commit) {
  v1::PushRequest message;
  *message.mutable_commit() = commit;
  grpc::ByteBuffer reply;
  if (Wait()) {
    stream_->WriteLast(Encode(message), grpc::WriteOptions(), this);
    is_pending_ = true;
    if (Wait()) {
      stream_->Read(&reply, this);
      is_pending_ = true;
    }
  }
  EMA_RETURN_IF_ERROR(WaitStatus());
  v1::PushResponse response;
  if (!reply.Valid() ||
      !grpc::SerializationTraits<v1::PushResponse>::Deserialize(&reply, &response).ok() ||
      !response.has_version()) {
    return MalformedReply("Push without a version");
  }
  return response;
}

absl::Status GrpcPushStream::Write(const grpc::ByteBuffer& message) {
  if (!Wait()) {
    EMA_RETURN_IF_ERROR(WaitStatus());
    return MalformedReply("Push without a version");
  }
  stream_->Write(message, this);
  is_pending_ = true;
  return absl::OkStatus();
}

bool GrpcPushStream::Wait() {
  if (!is_pending_) return !is_broken_;
  is_pending_ = false;
  if (call_.Await(&queue_) != Call::Event::kOk) is_broken_ = true;
  return !is_broken_;
}

absl::Status GrpcPushStream::WaitStatus() {
  Wait();
  grpc::Status status;
  stream_->Finish(&status, this);
  is_pending_ = true;
  Wait();
  stream_.reset();
  return call_.Result(status);
}

absl::Status GrpcPushStream::End() {
  call_.Cancel();
  EMA_RETURN_IF_ERROR(WaitStatus());
  return absl::CancelledError("cancelled");
}

}  // namespace ema::client_internal
