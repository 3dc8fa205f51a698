// SPDX-License-Identifier: Apache-2.0
//
// One Push call: from raw messages to the session of its step.
#ifndef EMA_SERVER_RPC_PUSH_CALL_H_
#define EMA_SERVER_RPC_PUSH_CALL_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/rpc/call_queue.h"
#include "server/rpc/push_handler.h"
#include "server/rpc/rpc_context.h"

namespace ema {

// Reads header, chunks and commit; folds each chunk straight from the receive buffer; answers when
// the session ends. Keeps itself alive while gRPC or a session can still call it.
class PushCall final : public StreamCall, public std::enable_shared_from_this<PushCall> {
 public:
  // Waits for the next Push on `queue`, and again whenever one arrives.
  static void Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue);
  ~PushCall();

 private:
  PushCall(RpcContext* rpc, grpc::ServerCompletionQueue* queue)
      : rpc_(rpc), queue_(queue), handler_(rpc->store.get()) {}

  void OnAccepted(bool ok);
  void OnRead(bool ok);
  void OnFinished(bool ok);
  void End(StreamEnd why) override;

  absl::Status Start();
  void Read();
  absl::Status HandleMessage();
  absl::Status HandleHeader(const v1::PushHeader& header);
  absl::Status HandleCommit(const v1::PushCommit& commit) ABSL_LOCKS_EXCLUDED(mu_);
  // Finishes the call; calls after the first do nothing. From any thread: the session may have
  // ended.
  void Finish(const absl::StatusOr<PushResult>& result) ABSL_LOCKS_EXCLUDED(mu_);

  RpcContext* const rpc_;
  const std::shared_ptr<const void> live_ =
      rpc_->live_calls.Add();  // Declared first, so destroyed last.
  grpc::ServerCompletionQueue* const queue_;
  grpc::ServerContext context_;
  grpc::ServerAsyncReader<grpc::ByteBuffer, grpc::ByteBuffer> stream_{&context_};
  MemberTag<PushCall> accepted_{&PushCall::OnAccepted};
  MemberTag<PushCall> read_{&PushCall::OnRead};
  MemberTag<PushCall> finished_{&PushCall::OnFinished};

  // Only on the queue's thread. Vectors are reused: nothing is allocated per chunk.
  Caller caller_;
  PushHandler handler_;
  bool is_committed_ = false;
  grpc::ByteBuffer message_;
  std::vector<grpc::Slice> slices_;
  std::vector<std::span<const std::byte>> pieces_;

  absl::Mutex mu_;
  bool is_finishing_ ABSL_GUARDED_BY(mu_) = false;
  // Set by the commit message.
  std::optional<PushTiming> timing_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_PUSH_CALL_H_
