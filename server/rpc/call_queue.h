// SPDX-License-Identifier: Apache-2.0
//
// A completion queue and the loop of its thread.
#ifndef EMA_SERVER_RPC_CALL_QUEUE_H_
#define EMA_SERVER_RPC_CALL_QUEUE_H_

#include <grpcpp/alarm.h>
#include <grpcpp/completion_queue.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "server/base/heartbeat.h"

namespace ema {

// The tag of an operation that a completion queue returns. Each queue has one thread, so all
// completions of a call run on one thread.
class CompletionTag {
 public:
  virtual void Complete(bool ok) = 0;

 protected:
  ~CompletionTag() = default;
};

// A tag that calls a member function, and keeps its call alive during the operation.
template <typename Call>
class MemberTag final : public CompletionTag {
 public:
  explicit MemberTag(void (Call::*handler)(bool)) : handler_(handler) {}
  // Returns the tag to pass to gRPC. REQUIRES: not armed.
  void* Arm(std::shared_ptr<Call> call) {
    call_ = std::move(call);
    armed_.store(true, std::memory_order_release);
    return static_cast<CompletionTag*>(this);
  }
  // For a tag that gRPC will never return.
  void Disarm() { call_.reset(); }
  void Complete(bool ok) override {
    armed_.load(std::memory_order_acquire);
    const std::shared_ptr<Call> call = std::move(call_);
    ((*call).*handler_)(ok);
  }

 private:
  void (Call::*const handler_)(bool);
  std::shared_ptr<Call> call_;
  // One thread may arm the tag and another complete it. gRPC orders the two; this orders them where
  // ThreadSanitizer sees it.
  std::atomic<bool> armed_ = false;
};

// Runs the completions of ended operations and, between them, one piece of deferred work at a time.
// gRPC reads from its connections only when no operation has ended. A write ends at once, so
// readers that are served without a pause would keep trainers waiting until the readers' windows
// are full.
class CallQueue {
 public:
  explicit CallQueue(std::unique_ptr<grpc::ServerCompletionQueue> queue)
      : queue_(std::move(queue)) {}

  grpc::ServerCompletionQueue* get() const { return queue_.get(); }

  // Runs `work` in Run(), after a few completions of operations that have ended meanwhile. To be
  // called only in Run().
  void Defer(std::function<void()> work) { deferred_.push_back(std::move(work)); }

  // Returns after Stop(), when the queue is empty. On the queue's own thread.
  void Run();

  // Lets Ping() check that the queue's thread is not stuck: `heartbeat`, which outlives this, is
  // busy until the thread has answered. To be called before Run().
  void SetHeartbeat(Heartbeat* heartbeat) { heartbeat_ = heartbeat; }
  // Does nothing while the last ping has not been answered. Not after Stop(); for one thread.
  void Ping();

  // Shuts the queue down, in Run(), when no work is deferred any more: until then deferred work may
  // start operations. From any thread, once, when all calls have ended.
  void Stop();

 private:
  class StopTag final : public CompletionTag {
   public:
    explicit StopTag(CallQueue* queue) : queue_(queue) {}
    void Complete(bool) override {
      queue_->Defer([queue = queue_] { queue->queue_->Shutdown(); });
    }

   private:
    CallQueue* const queue_;
  };

  class PingTag final : public CompletionTag {
   public:
    explicit PingTag(CallQueue* queue) : queue_(queue) {}
    void Complete(bool) override { queue_->heartbeat_->End(); }

   private:
    CallQueue* const queue_;
  };

  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  Heartbeat* heartbeat_ = nullptr;
  std::deque<std::function<void()>> deferred_;
  StopTag stop_tag_{this};
  grpc::Alarm alarm_;
  PingTag ping_tag_{this};
  grpc::Alarm ping_alarm_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_CALL_QUEUE_H_
