// SPDX-License-Identifier: Apache-2.0
//
// Handles the messages of a Push, over gRPC or a same-host lane.
#ifndef EMA_SERVER_RPC_PUSH_HANDLER_H_
#define EMA_SERVER_RPC_PUSH_HANDLER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ema/v1/ema_service.pb.h"
#include "server/base/observer.h"
#include "server/base/steady_wait.h"
#include "server/core/model.h"
#include "server/core/model_store.h"
#include "server/wire/chunk_codec.h"

namespace ema {

// The times of a push until its commit message has arrived.
struct PushTiming {
  SteadyTime commit_arrival;
  absl::Duration receive;
  absl::Duration fold;
};
// The phases of a push that has just ended with `result`.
PushPhases PhasesOf(const PushTiming& timing, const PushResult& result);

// One stream of one rank's push. An error from any function ends the stream. For one thread at a
// time.
class PushHandler {
 public:
  // `store` outlives it.
  explicit PushHandler(ModelStore* store) : store_(store) {}

  // `on_end` as for Model::OpenPush().
  absl::Status OnHeader(const v1::PushHeader& header, PushCallback on_end);
  absl::Status OnChunk(const ChunkHeader& header,
                       std::span<const std::span<const std::byte>> pieces);
  // As RankPush::EndChunks(). To be called before OnCommit(), while the push still has its slot.
  void EndChunks() {
    if (push_ != nullptr) push_->EndChunks();
  }
  absl::Status OnCommit(const v1::PushCommit& commit);

  // The response. REQUIRES: the push has ended with this `result`. From any thread.
  v1::PushResponse Response(const PushResult& result,
                            const std::optional<PushPhases>& phases) const;
  // Bytes of the received chunks, rejected ones included. REQUIRES: Close() has not been called.
  int64_t received_bytes() const { return push_ != nullptr ? push_->total_bytes() : 0; }
  // Empty: there is no such model. From any thread after OnHeader().
  std::string_view model_name() const;
  // Releases the session.
  void Close() { push_.reset(); }

 private:
  ModelStore* const store_;
  std::shared_ptr<Model> model_;
  int64_t plan_revision_ = 0;  // From the header.
  std::unique_ptr<RankPush> push_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_PUSH_HANDLER_H_
