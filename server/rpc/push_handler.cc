// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/push_handler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/rpc/convert_core.h"

namespace ema {

PushPhases PhasesOf(const PushTiming& timing, const PushResult& result) {
  const absl::Duration rest = absl::FromChrono(SteadyNow() - timing.commit_arrival);
  return {.receive = timing.receive,
          .fold = timing.fold,
          .wait = std::max(rest - result.publish_duration, absl::ZeroDuration()),
          .commit = result.publish_duration};
}

absl::Status PushHandler::OnHeader(const v1::PushHeader& header, PushCallback on_end) {
  if (push_ != nullptr) return BadRequest("unexpected second header");
  EMA_ASSIGN_OR_RETURN(model_, store_->Get(header.model()));
  PushStart start;
  start.run_epoch = header.run_epoch();
  start.rank = header.rank();
  start.layout_digest = header.layout_digest();
  start.step = header.step();
  start.time = FromProto(header.time());
  start.plan_revision = plan_revision_ = header.plan_revision();
  start.stream_group = header.stream_group();
  start.stream_count = header.stream_count();
  start.imported_updates = header.imported_updates();
  start.omits_frozen = header.omits_frozen();
  if (model_->is_partition()) {
    start.incarnation = header.incarnation();
    start.round = header.round();
  }
  EMA_ASSIGN_OR_RETURN(push_, model_->OpenPush(start, std::move(on_end)));
  return absl::OkStatus();
}

absl::Status PushHandler::OnChunk(const ChunkHeader& header,
                                  std::span<const std::span<const std::byte>> pieces) {
  if (push_ == nullptr) return BadRequest("unexpected chunk before the header");
  return push_->AddChunk(header, absl::MakeConstSpan(pieces.data(), pieces.size()));
}

absl::Status PushHandler::OnCommit(const v1::PushCommit& commit) {
  if (push_ == nullptr) return BadRequest("unexpected commit before the header");
  EMA_ASSIGN_OR_RETURN(const uint32_t digest, ReadChecksum("commit.digest", commit.digest()));
  return push_->Commit({commit.chunk_count(), commit.total_bytes(), digest});
}

v1::PushResponse PushHandler::Response(const PushResult& result,
                                       const std::optional<PushPhases>& phases) const {
  v1::PushResponse response;
  *response.mutable_version() = ToProto(result.record);
  response.set_applied_step(result.record.step);
  response.set_durable_step(model_->durable().step());
  response.set_duplicate(result.is_duplicate);
  response.set_round(model_->round());
  *response.mutable_plan() = ToProto(result.plan, plan_revision_);
  if (phases.has_value()) {
    v1::PushTiming& timing = *response.mutable_timing();
    timing.set_receive_seconds(absl::ToDoubleSeconds(phases->receive));
    timing.set_fold_seconds(absl::ToDoubleSeconds(phases->fold));
    timing.set_wait_seconds(absl::ToDoubleSeconds(phases->wait));
    timing.set_commit_seconds(absl::ToDoubleSeconds(phases->commit));
  }
  return response;
}

std::string_view PushHandler::model_name() const {
  return model_ != nullptr ? std::string_view(model_->config().name) : std::string_view();
}

}  // namespace ema
