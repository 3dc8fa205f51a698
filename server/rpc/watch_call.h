// SPDX-License-Identifier: Apache-2.0
//
// One Watch call: the records of a model's commits as they happen.
#ifndef EMA_SERVER_RPC_WATCH_CALL_H_
#define EMA_SERVER_RPC_WATCH_CALL_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/core/model.h"
#include "server/rpc/call_queue.h"
#include "server/rpc/rpc_context.h"

namespace ema {

// Holds no records: it remembers the last version that it sent and asks the model for the next one.
// So a slow watcher costs no memory on the server; versions that the model has forgotten meanwhile
// are counted as skipped. Keeps itself alive while gRPC or the model can still call it.
class WatchCall final : public StreamCall, public std::enable_shared_from_this<WatchCall> {
 public:
  // Waits for the next Watch on `queue`, and again whenever one arrives.
  static void Listen(RpcContext* rpc, grpc::ServerCompletionQueue* queue);
  ~WatchCall();

 private:
  WatchCall(RpcContext* rpc, grpc::ServerCompletionQueue* queue) : rpc_(rpc), queue_(queue) {}

  void OnAccepted(bool ok) ABSL_LOCKS_EXCLUDED(mu_);
  void OnWritten(bool ok) ABSL_LOCKS_EXCLUDED(mu_);
  void OnFinished(bool ok);
  void OnDone(bool ok) ABSL_LOCKS_EXCLUDED(mu_);
  void End(StreamEnd why) override ABSL_LOCKS_EXCLUDED(mu_);

  // Admits the call, finds where it begins, and sends the headers.
  absl::Status Start(const v1::WatchRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  // Sends the next record if there is one and nothing is being sent; ends the call if its model is
  // closed. From any thread.
  void Advance() ABSL_LOCKS_EXCLUDED(mu_);
  // Sends the next record if there is one. Errors as Model::CheckOpen().
  absl::Status SendNextLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  RpcContext* const rpc_;
  const std::shared_ptr<const void> live_ =
      rpc_->live_calls.Add();  // Declared first, so destroyed last.
  grpc::ServerCompletionQueue* const queue_;
  grpc::ServerContext context_;
  v1::WatchRequest request_;
  grpc::ServerAsyncWriter<v1::WatchResponse> stream_{&context_};
  MemberTag<WatchCall> accepted_{&WatchCall::OnAccepted};
  MemberTag<WatchCall> written_{&WatchCall::OnWritten};
  MemberTag<WatchCall> finished_{&WatchCall::OnFinished};
  MemberTag<WatchCall> done_{&WatchCall::OnDone};

  Caller caller_;  // Constant once admitted, as model_.
  std::shared_ptr<Model> model_;
  int64_t watcher_ = 0;  // Only on the queue's thread.

  absl::Mutex mu_;
  // The last version that the reader has. Incarnation 0: that of the first record that is sent.
  int64_t last_version_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t last_incarnation_ ABSL_GUARDED_BY(mu_) = 0;
  bool is_writing_ ABSL_GUARDED_BY(mu_) = false;
  bool is_cancelled_ ABSL_GUARDED_BY(mu_) = false;  // By the client.
  absl::Status end_error_ ABSL_GUARDED_BY(mu_);     // Given by End().
  bool is_finishing_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_WATCH_CALL_H_
