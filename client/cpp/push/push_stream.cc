// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/push_stream.h"

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

PushStream::PushStream(Call* call, grpc::CompletionQueue* queue)
    : call_(call),
      queue_(queue),
      stream_(call->connection().generic_stub().PrepareCall(call->context(), kPushMethod, queue)) {
  stream_->StartCall(this);
  is_pending_ = true;
}

bool PushStream::Wait() {
  if (!is_pending_) return !is_broken_;
  is_pending_ = false;
  if (call_->Await(queue_) != Call::Event::kOk) is_broken_ = true;
  return !is_broken_;
}

bool PushStream::Write(const grpc::ByteBuffer& message) {
  if (!Wait()) return false;
  stream_->Write(message, this);
  is_pending_ = true;
  return true;
}

bool PushStream::Write(const v1::PushRequest& message) { return Write(Encode(message)); }

absl::Status PushStream::WaitStatus() {
  Wait();
  grpc::Status status;
  stream_->Finish(&status, this);
  is_pending_ = true;
  Wait();
  return call_->Result(status);
}

absl::StatusOr<v1::PushResponse> PushStream::Finish(const v1::PushRequest& commit) {
  grpc::ByteBuffer reply;
  if (Wait()) {
    stream_->WriteLast(Encode(commit), grpc::WriteOptions(), this);
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

absl::Status PushStream::Cancel() {
  call_->Cancel();
  EMA_RETURN_IF_ERROR(WaitStatus());
  return absl::CancelledError("cancelled");
}

}  // namespace ema::client_internal
