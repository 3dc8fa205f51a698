// SPDX-License-Identifier: Apache-2.0
//
// Keeps a forked child (a DataLoader worker) from touching its parent's gRPC objects: their threads
// do not exist in the child, and their locks may be held there forever.
#ifndef EMA_CLIENT_CPP_TRANSPORT_FORK_GUARD_H_
#define EMA_CLIENT_CPP_TRANSPORT_FORK_GUARD_H_

#include <sys/types.h>
#include <unistd.h>

#include <memory>

#include "absl/status/status.h"

namespace ema::client_internal {

// Records the process in which it was created. Takes no locks.
class ForkGuard {
 public:
  ForkGuard() : pid_(getpid()) {}

  bool forked() const { return getpid() != pid_; }
  // FAILED_PRECONDITION: this is a forked child.
  absl::Status Check() const;

 private:
  const pid_t pid_;
};

// FAILED_PRECONDITION: a parent of this process has used gRPC, whose threads are missing here.
// Otherwise records that this process uses gRPC.
absl::Status CheckGrpcUsable();

// Never destroys `object`.
void LeakForever(std::shared_ptr<void> object);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_FORK_GUARD_H_
