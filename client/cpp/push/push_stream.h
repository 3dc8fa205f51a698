// SPDX-License-Identifier: Apache-2.0
//
// A stream that carries a push, or a part of its chunks.
#ifndef EMA_CLIENT_CPP_PUSH_PUSH_STREAM_H_
#define EMA_CLIENT_CPP_PUSH_PUSH_STREAM_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/v1/ema_service.pb.h"

namespace ema::client_internal {

// A Push call over gRPC or through a same-host lane: SendHeader(), any number of SendChunk(),
// Commit(). An error says why the stream has ended; then only Cancel() may be called. CANCELLED:
// the interrupt fired, Cancel() was called, or the chunk cannot be read, because the weights were
// released or their GPU has failed. DEADLINE_EXCEEDED. Other errors with a reason are the server's;
// one without a reason means that the stream broke. For one thread, except Cancel(). The destructor
// ends the call.
class PushStream {
 public:
  virtual ~PushStream() = default;

  virtual absl::Status SendHeader(const v1::PushHeader& header) = 0;
  // `chunk`: its index in the push's ChunkPlan.
  virtual absl::Status SendChunk(int64_t chunk) = 0;
  // Sends the commit and waits for the reply, which has a version.
  virtual absl::StatusOr<v1::PushResponse> Commit(const v1::PushCommit& commit) = 0;

  // Makes the running function, and each later one, fail soon. From any thread.
  virtual void Cancel() = 0;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_PUSH_STREAM_H_
