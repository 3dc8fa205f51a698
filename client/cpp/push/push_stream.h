// SPDX-License-Identifier: Apache-2.0
//
// One Push call, as a stream of raw messages.
#ifndef EMA_CLIENT_CPP_PUSH_PUSH_STREAM_H_
#define EMA_CLIENT_CPP_PUSH_PUSH_STREAM_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/status/statusor.h"
#include "client/cpp/transport/connection.h"
#include "ema/v1/ema_service.pb.h"

namespace ema::client_internal {

// Writes one message at a time. Each Write() waits for the previous one, so the work between two
// Write() calls overlaps with sending. For one thread; `queue` belongs to this object and is empty
// between calls.
class PushStream {
 public:
  PushStream(Call* call, grpc::CompletionQueue* queue);

  // False: the stream has broken; Finish() says why.
  bool Write(const grpc::ByteBuffer& message);
  bool Write(const v1::PushRequest& message);
  // Writes `commit` as the last message, unless the stream has broken, and waits for the reply. The
  // last call must be this one or Cancel(), once.
  absl::StatusOr<v1::PushResponse> Finish(const v1::PushRequest& commit);
  // Ends the call without a commit. Returns the call's error.
  absl::Status Cancel();

 private:
  // Waits for the end of the operation that was started last. False: it failed.
  bool Wait();
  absl::Status WaitStatus();

  Call* const call_;
  grpc::CompletionQueue* const queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  bool is_pending_ = false;  // An operation has been started, and Wait() has not seen its end.
  bool is_broken_ = false;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_PUSH_STREAM_H_
