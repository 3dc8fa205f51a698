// SPDX-License-Identifier: Apache-2.0
//
// What becomes of the messages of a Push, whatever has carried them.
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

// Where the time of a push has gone when its commit message has come.
struct PushTiming {
  SteadyTime commit_arrival;
  absl::Duration receive;
  absl::Duration fold;
};
// The whole of it. REQUIRES: the push has ended now, with this `result`.
PushPhases PhasesOf(const PushTiming& timing, const PushResult& result);

// One push of one rank. An error from any function ends the push. For one thread at a time.
class PushHandler {
 public:
  // `store` outlives it.
  explicit PushHandler(ModelStore* store) : store_(store) {}

  // `on_end` as Model::OpenPush() calls it.
  absl::Status OnHeader(const v1::PushHeader& header, PushCallback on_end);
  absl::Status OnChunk(const ChunkHeader& header,
                       std::span<const std::span<const std::byte>> pieces);
  // To be called before OnCommit(), while the push still has its place: as RankPush::EndChunks().
  void EndChunks() {
    if (push_ != nullptr) push_->EndChunks();
  }
  absl::Status OnCommit(const v1::PushCommit& commit);

  // The reply. REQUIRES: the push has ended with this `result`. From any thread.
  v1::PushResponse Response(const PushResult& result,
                            const std::optional<PushPhases>& phases) const;
  // Of chunks, whatever has come of them. REQUIRES: Close() has not been called.
  int64_t received_bytes() const { return push_ != nullptr ? push_->total_bytes() : 0; }
  // Empty: there is no such model. From any thread once the header has been taken.
  std::string_view model_name() const;
  // Lets the session go.
  void Close() { push_.reset(); }

 private:
  ModelStore* const store_;
  std::shared_ptr<Model> model_;
  int64_t plan_revision_ = 0;    // As the header has it.
  bool reports_timing_ = false;  // The same.
  std::unique_ptr<RankPush> push_;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_PUSH_HANDLER_H_
