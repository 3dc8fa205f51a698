// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/group/for_each_part.h"

#include <system_error>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {
namespace {

// The results of the threads.
struct Outcome {
  absl::Mutex mu;
  SteadyWait wait;  // Woken when a thread has ended.
  size_t ended_count ABSL_GUARDED_BY(mu) = 0;
  absl::Status first_error ABSL_GUARDED_BY(mu);
};

}  // namespace

absl::Status ForEachPart(size_t count, Interrupt* interrupt,
                         absl::FunctionRef<absl::Status(size_t, Interrupt*)> work) {
  Outcome outcome;
  Interrupt inner;
  std::vector<std::jthread> threads;
  try {
    for (size_t i = 0; i < count; ++i) {
      threads.emplace_back([&, i] {
        const absl::Status status = work(i, &inner);
        {
          // Before the interrupt, which makes the others return errors, too.
          absl::MutexLock lock(&outcome.mu);
          outcome.first_error.Update(status);
        }
        if (!status.ok()) inner.Fire();
        absl::MutexLock lock(&outcome.mu);
        ++outcome.ended_count;
        outcome.wait.WakeAll();
      });
    }
  } catch (const std::system_error& error) {
    inner.Fire();
    absl::MutexLock lock(&outcome.mu);
    outcome.first_error.Update(absl::UnavailableError(
        absl::StrCat("cannot start a thread for a server of the group: ", error.what())));
  }
  absl::MutexLock lock(&outcome.mu);
  const auto have_ended = [&]() ABSL_SHARED_LOCKS_REQUIRED(outcome.mu) {
    return outcome.ended_count == threads.size();
  };
  while (!outcome.wait.AwaitUntil(outcome.mu, After(SteadyNow(), Interrupt::kPollInterval),
                                  have_ended)) {
    // Not under the lock: asking may run the user's code.
    outcome.mu.Unlock();
    if (interrupt->fired()) inner.Fire();
    outcome.mu.Lock();
  }
  return outcome.first_error;
}

}  // namespace ema::client_internal
