// SPDX-License-Identifier: Apache-2.0
//
// How what one thread waits for is ended early.
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

// Ends the gRPC calls and the waits of one thread and its helpers, for good: because somebody calls
// Fire(), or because a function says so. Thread-safe, but the function is asked by any of the
// threads that wait: where there are several, it must allow that.
class Interrupt {
 public:
  // How long a wait may last before the function is asked again.
  static constexpr absl::Duration kPollInterval = absl::Milliseconds(50);

  // `poll` outlives this object; null, or an empty function: it is not asked.
  explicit Interrupt(const std::function<bool()>* poll = nullptr)
      : is_of_user_(poll != nullptr), poll_(poll != nullptr && *poll != nullptr ? poll : nullptr) {}

  // Cancels the calls that run and every later one. Not to be called with a lock held that a
  // slice's destroy callback takes: gRPC may run those inside.
  void Fire() ABSL_LOCKS_EXCLUDED(mu_);

  // There is a function to be asked, perhaps an empty one: the thread is in a call of its user's,
  // and not one of ours.
  bool is_of_user() const { return is_of_user_; }

  // Asks the function.
  bool fired() ABSL_LOCKS_EXCLUDED(mu_);
  // Waits. False, at once: fired.
  bool Sleep(absl::Duration duration) ABSL_LOCKS_EXCLUDED(mu_);

  // A call that Fire() cancels, until it is removed.
  void AddCall(std::shared_ptr<grpc::ClientContext> context) ABSL_LOCKS_EXCLUDED(mu_);
  void RemoveCall(const grpc::ClientContext* context) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  const bool is_of_user_;
  const std::function<bool()>* const poll_;
  absl::Mutex mu_;
  SteadyWait wait_;  // Woken when it changes.
  bool fired_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::shared_ptr<grpc::ClientContext>> contexts_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_INTERRUPT_H_
