// SPDX-License-Identifier: Apache-2.0
//
// Interrupts the calls and waits of a thread.
#ifndef EMA_CLIENT_CPP_TRANSPORT_INTERRUPT_H_
#define EMA_CLIENT_CPP_TRANSPORT_INTERRUPT_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace grpc {
class ClientContext;
}  // namespace grpc

namespace ema::client_internal {

// Ends the gRPC calls and the waits of one thread and its helpers, permanently: when Fire() is
// called, or when a polled function returns true. Thread-safe; the function is called by any of the
// waiting threads, so with several of them it must be thread-safe.
class Interrupt {
 public:
  // The longest time between two polls of the function.
  static constexpr absl::Duration kPollInterval = absl::Milliseconds(50);

  // `poll` outlives this object. Null, or an empty function: nothing is polled.
  explicit Interrupt(const std::function<bool()>* poll = nullptr)
      : is_of_user_(poll != nullptr), poll_(poll != nullptr && *poll != nullptr ? poll : nullptr) {}

  // Cancels the running calls and every later one. Not to be called with a lock held that a slice's
  // destroy callback acquires: gRPC may run such callbacks inside.
  void Fire() ABSL_LOCKS_EXCLUDED(mu_);

  // True if a function was passed, even an empty one: the user has made the call, not this library.
  bool is_of_user() const { return is_of_user_; }

  // True if Fire() was called; otherwise polls the function.
  bool fired() ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for `duration`. Returns false at once when fired.
  bool Sleep(absl::Duration duration) ABSL_LOCKS_EXCLUDED(mu_);

  // Registers a call that Fire() cancels, until it is removed.
  void AddCall(std::shared_ptr<grpc::ClientContext> context) ABSL_LOCKS_EXCLUDED(mu_);
  void RemoveCall(const grpc::ClientContext* context) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  const bool is_of_user_;
  const std::function<bool()>* const poll_;
  absl::Mutex mu_;
  SteadyWait wait_;  // Woken when `has_fired_` changes.
  bool has_fired_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::shared_ptr<grpc::ClientContext>> contexts_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_INTERRUPT_H_
