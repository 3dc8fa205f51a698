// SPDX-License-Identifier: Apache-2.0
//
// One Pull call: a pinned version as raw messages.
#ifndef EMA_SERVER_RPC_PULL_CALL_H_
#define EMA_SERVER_RPC_PULL_CALL_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "server/rpc/call_queue.h"
#include "server/rpc/pull_handler.h"
#include "server/rpc/rpc_context.h"

namespace ema {

// Writes header, chunks and trailer, one message at a time. Chunks refer to the reading's memory,
// mostly the snapshot's own: no copy. A chunk that needs the disk is made, and its write started,
// on the disk reader's thread; one that needs an accelerator, on the device reader's. All else runs
// on the queue's thread. Keeps itself alive while gRPC, or one of those threads, can still call it;
// the version stays pinned until gRPC has released the last chunk.
class PullCall final : public StreamCall, public std::enable_shared_from_this<PullCall> {
 public:
  // Waits for the next Pull on `queue`, and again whenever one arrives.
  static void Listen(RpcContext* rpc, CallQueue* queue);
  ~PullCall();

 private:
  PullCall(RpcContext* rpc, CallQueue* queue)
      : rpc_(rpc), queue_(queue), handler_(rpc->store.get(), rpc->checkpoints) {}

  void OnAccepted(bool ok);
  void OnWritten(bool ok);
  void OnFinished(bool) {}
  void End(StreamEnd why) override;

  absl::Status Start();
  // Runs `work` on the worker's thread, or ends the call if too many wait.
  void RunOn(Worker& worker, std::function<void()> work, int64_t bytes = 0);
  void OpenStored();
  void WriteHeader();
  void WriteNext();
  // The next chunk, or the trailer after the last. Errors as PullHandler::Next().
  absl::StatusOr<grpc::ByteBuffer> NextMessage();
  grpc::ByteBuffer MessageOf(PullHandler::Chunk chunk);
  void Write(const grpc::ByteBuffer& message);
  void Finish(const absl::Status& status);

  RpcContext* const rpc_;
  const std::shared_ptr<const void> live_ =
      rpc_->live_calls.Add();  // Declared first, so destroyed last.
  CallQueue* const queue_;
  grpc::ServerContext context_;
  grpc::ByteBuffer request_;
  grpc::ServerAsyncWriter<grpc::ByteBuffer> stream_{&context_};
  MemberTag<PullCall> accepted_{&PullCall::OnAccepted};
  MemberTag<PullCall> written_{&PullCall::OnWritten};
  MemberTag<PullCall> finished_{&PullCall::OnFinished};

  Caller caller_;  // Constant once admitted.
  absl::Time begin_;
  PullHandler handler_;
  uint32_t digest_ = 0;
  int64_t writing_bytes_ = 0;  // Size of the message that is being written.
  bool has_written_trailer_ = false;
  std::atomic<bool> is_revoked_ = false;  // Relaxed: checked before each message.
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_PULL_CALL_H_
