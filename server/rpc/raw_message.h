// SPDX-License-Identifier: Apache-2.0
//
// Messages of calls whose bytes gRPC does not parse.
#ifndef EMA_SERVER_RPC_RAW_MESSAGE_H_
#define EMA_SERVER_RPC_RAW_MESSAGE_H_

#include <grpcpp/grpcpp.h>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"

namespace ema {

template <typename Message>
grpc::ByteBuffer Serialize(const Message& message) {
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  grpc::GenericSerialize<grpc::ProtoBufferWriter, Message>(message, &bytes, &own_buffer);
  return bytes;
}

// Parses `bytes` and clears them. INVALID_ARGUMENT, BAD_REQUEST: malformed.
template <typename Message>
absl::StatusOr<Message> Parse(grpc::ByteBuffer& bytes) {
  Message message;
  if (grpc::GenericDeserialize<grpc::ProtoBufferReader, Message>(&bytes, &message).ok()) {
    return message;
  }
  return BadRequest(absl::StrCat("malformed ", Message::descriptor()->name()));
}

}  // namespace ema

#endif  // EMA_SERVER_RPC_RAW_MESSAGE_H_
