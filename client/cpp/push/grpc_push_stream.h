// SPDX-License-Identifier: Apache-2.0
//
// A push over gRPC.
#ifndef EMA_CLIENT_CPP_PUSH_GRPC_PUSH_STREAM_H_
#define EMA_CLIENT_CPP_PUSH_GRPC_PUSH_STREAM_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/cpp/push/chunk_plan.h"
#include "client/cpp/push/push_messages.h"
#include "client/cpp/push/push_stream.h"
#include "client/cpp/transport/connection.h"
#include "ema/v1/ema_service.pb.h"

namespace ema::client_internal {

// One Push call, as a stream of raw messages. Each message waits for the previous one, so a chunk
// is encoded while the one before is being sent.
class GrpcPushStream final : public PushStream {
 public:
  // `messages` outlives this object. The call starts with SendHeader().
  GrpcPushStream(std::shared_ptr<Connection> connection, const PushMessages* messages);
  ~GrpcPushStream() override;

  absl::Status SendHeader(const v1::PushHeader& header) override;
  absl::Status SendChunk(int64_t chunk) override;
  absl::StatusOr<v1::PushResponse> Commit(const v1::PushCommit& commit) override;
  void Cancel() override { call_.Cancel(); }

 private:
  absl::Status Write(const grpc::ByteBuffer& message);
  // Waits for the end of the operation that was started last. False: it failed.
  bool Wait();
  // Waits for the end of the call, and returns how it ended.
  absl::Status WaitStatus();
  // Ends the call. Returns the call's error.
  absl::Status End();

  const PushMessages* const messages_;
  grpc::CompletionQueue queue_;  // Has the event of the pending operation, if any.
  Call call_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;  // Null: not started, or ended.
  bool is_pending_ = false;  // An operation has been started, and Wait() has not seen its end.
  bool is_broken_ = false;
  ChunkWriter::Scratch scratch_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_GRPC_PUSH_STREAM_H_
