// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/message_reader.h"

namespace ema::client_internal {
namespace {

grpc::ByteBuffer Encode(const google::protobuf::MessageLite& message) {
  const std::string bytes = message.SerializeAsString();
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

MessageReader::MessageReader(Call* call, const std::string& method,
                             const google::protobuf::MessageLite& request)
    : call_(call),
      stream_(call->connection().generic_stub().PrepareCall(call->context(), method, &queue_)) {
  stream_->StartCall(this);
  if (!Wait()) return;
  stream_->WriteLast(Encode(request), grpc::WriteOptions(), this);
  if (!Wait()) return;
  stream_->Read(&buffers_[1 - current_], this);
  is_pending_ = true;
}

MessageReader::~MessageReader() {
  if (!is_finished_) {
    call_->Cancel();
    if (is_pending_) Wait();
    (void)Finish();
  }
  queue_.Shutdown();
  Wait();
}

bool MessageReader::Wait() { return call_->Await(&queue_) == Call::Event::kOk; }

MessageReader::Event MessageReader::Next(SteadyTime wait_end) {
  if (!is_pending_) return Event::kEnd;
  const Call::Event event = call_->Await(&queue_, wait_end);
  if (event == Call::Event::kTimeout) return Event::kTimeout;
  is_pending_ = false;
  if (event == Call::Event::kFailed) return Event::kEnd;
  current_ = 1 - current_;
  buffers_[1 - current_].Clear();
  stream_->Read(&buffers_[1 - current_], this);
  is_pending_ = true;
  return Event::kMessage;
}

absl::Status MessageReader::Finish() {
  grpc::Status status;
  stream_->Finish(&status, this);
  Wait();
  is_finished_ = true;
  return call_->Result(status);
}

}  // namespace ema::client_internal
