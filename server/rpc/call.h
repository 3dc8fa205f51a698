// SPDX-License-Identifier: Apache-2.0
//
// What all calls on our completion queues share.
#ifndef EMA_SERVER_RPC_CALL_H_
#define EMA_SERVER_RPC_CALL_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/async_stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ema/v1/ema_service.grpc.pb.h"
#include "server/base/log_event.h"
#include "server/base/log_throttle.h"
#include "server/base/observer.h"
#include "server/base/steady_wait.h"
#include "server/core/checkpoints.h"
#include "server/core/memory_budget.h"
#include "server/core/model_store.h"
#include "server/rpc/authorization.h"
#include "server/rpc/call_queue.h"
#include "server/rpc/call_source.h"
#include "server/rpc/grpc_status.h"
#include "server/rpc/rate_limit.h"
#include "server/rpc/stream_admission.h"
#include "server/rpc/worker.h"

namespace ema {

// A tag that calls a member function, and keeps its call alive while the operation is under way.
template <typename Call>
class MemberTag final : public CompletionTag {
 public:
  explicit MemberTag(void (Call::*handler)(bool)) : handler_(handler) {}
  // To be passed to gRPC as the tag. REQUIRES: not armed.
  void* Arm(std::shared_ptr<Call> call) {
    call_ = std::move(call);
    armed_.store(true, std::memory_order_release);
    return static_cast<CompletionTag*>(this);
  }
  // For a tag that gRPC will never give back.
  void Disarm() { call_.reset(); }
  void Complete(bool ok) override {
    armed_.load(std::memory_order_acquire);
    const std::shared_ptr<Call> call = std::move(call_);
    ((*call).*handler_)(ok);
  }

 private:
  void (Call::*const handler_)(bool);
  std::shared_ptr<Call> call_;
  // Another thread may complete what one has armed. gRPC puts the two in order; this does so where
  // ThreadSanitizer sees it.
  std::atomic<bool> armed_ = false;
};

// Counts the calls that are under way. Thread-safe.
class CallsInFlight {
 public:
  // One call, for as long as the result is held.
  std::shared_ptr<void> Enter() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    ++count_;
    return std::shared_ptr<void>(nullptr, [this](void*) {
      absl::MutexLock leave(&mu_);
      --count_;
      wait_.WakeAll();
    });
  }
  // Waits until there is none, at most until `deadline`.
  void AwaitNone(SteadyTime deadline) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return count_ == 0; };
    wait_.AwaitUntil(mu_, deadline, none);
  }

 private:
  absl::Mutex mu_;
  int64_t count_ ABSL_GUARDED_BY(mu_) = 0;
  SteadyWait wait_;  // Woken when it changes.
};

// What calls need of their server; outlives them.
struct RpcContext {
  // Who calls, if a call of `method` may begin. RESOURCE_EXHAUSTED, TOO_MANY_CALLS; UNAVAILABLE,
  // DRAINING; and as Authorize().
  absl::StatusOr<Caller> Admit(std::string_view method, const grpc::ServerContext& context);
  // The same for a call that came some other way, with that token. It counts for no rate.
  absl::StatusOr<Caller> Admit(std::string_view method, std::string_view authorization,
                               std::string peer);
  // As CheckCovers(), for what a call is about, if it is about a model.
  absl::Status CheckModel(std::string_view method, const Caller& caller,
                          std::optional<std::string_view> model);

  CallSource service{EmaMethods()};
  CallSource health{{kHealthCheck}};
  std::shared_ptr<ModelStore> store;
  StreamAdmission pushes;
  StreamAdmission pulls;
  StreamAdmission watches;
  StreamAdmission requests;  // That arrive.
  StreamAdmission probes;    // The same of calls that anybody may make.
  RateLimit rate;            // But of calls that anybody may make.
  MemoryBudget waiting;      // Of long requests whose turn has not come, or that wait for the disk.
  LogSink log;
  LogThrottle refusals;
  std::atomic<bool> refuses_work = false;  // Relaxed: a call may just have got in.
  CallsInFlight calls;
  Checkpoints* checkpoints = nullptr;      // Outlives this. Never null in a server.
  Authenticator* authenticator = nullptr;  // Outlives this. Null: all callers may do all.
  ServerObserver* observer = nullptr;      // Outlives this. Never null.
  // They read what pulls need of the disk, and wait for what they need of an accelerator: a chunk
  // each, in turn. Never null in a server.
  Worker* disk_reader = nullptr;
  Worker* device_reader = nullptr;

 private:
  // To the log, but not as many lines as there may be calls.
  void LogRefused(std::string_view method, std::string_view peer, const absl::Status& status);
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_CALL_H_
