// SPDX-License-Identifier: Apache-2.0
//
// A call with one request and a stream of raw response messages.
#ifndef EMA_CLIENT_CPP_TRANSPORT_MESSAGE_READER_H_
#define EMA_CLIENT_CPP_TRANSPORT_MESSAGE_READER_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "client/cpp/transport/connection.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// Receives the next message while the caller uses one. For one thread.
class MessageReader {
 public:
  // `method`: "/package.Service/Method". `call` outlives this object.
  MessageReader(Call* call, const std::string& method,
                const google::protobuf::MessageLite& request);
  ~MessageReader();  // Cancels the call if it has not ended.
  MessageReader(const MessageReader&) = delete;
  MessageReader& operator=(const MessageReader&) = delete;

  enum class Event { kMessage, kEnd, kTimeout };
  // Waits until `wait_end` for the next message, which message() then returns until the next call
  // of Next(). After kEnd call Finish().
  Event Next(SteadyTime wait_end = SteadyTime::max());
  grpc::ByteBuffer& message() { return buffers_[current_]; }

  // Returns how the call ended. REQUIRES: Next() returned kEnd.
  absl::Status Finish();

 private:
  bool Wait();

  Call* const call_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  std::array<grpc::ByteBuffer, 2> buffers_;
  int current_ = 0;
  bool is_pending_ = false;  // A read into the other buffer has been started.
  bool is_finished_ = false;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_MESSAGE_READER_H_
