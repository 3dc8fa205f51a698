// SPDX-License-Identifier: Apache-2.0
#include "server/core/rank_push.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/model.h"

namespace ema {
namespace {

// The step is lost for all ranks: none is to wait for this one.
bool EndsStep(const absl::Status& status) {
  const ErrorReason reason = GetErrorReason(status);
  return reason == ErrorReason::kNonFinite || reason == ErrorReason::kDevice;
}

}  // namespace

RankPush::RankPush(std::shared_ptr<Model> model, std::shared_ptr<PushSession> session, int64_t rank,
                   int64_t stream, std::shared_ptr<DeviceStream> device_stream)
    : model_(std::move(model)),
      session_(std::move(session)),
      device_stream_(std::move(device_stream)),
      rank_(rank),
      stream_(stream) {}

RankPush::RankPush(Committed committed, PushCallback on_end)
    : committed_(std::move(committed)), on_end_(std::move(on_end)) {}

RankPush::~RankPush() {
  if (session_ != nullptr) session_->CloseStream(rank_, stream_);
}

absl::Status RankPush::AddChunk(const ChunkHeader& header,
                                absl::Span<const std::span<const std::byte>> pieces) {
  ++chunk_count_;
  total_bytes_ += header.data_bytes;
  if (session_ == nullptr)
    return absl::OkStatus();  // Nothing to fold: the commit compares digests.
  absl::Status status = session_->AddChunk(rank_, stream_, header, pieces, device_stream_);
  if (EndsStep(status)) model_->FailSession(session_, status);
  return status;
}

void RankPush::EndChunks() {
  if (device_stream_ == nullptr) return;
  session_->AwaitStream(rank_, stream_);
  device_stream_.reset();
}

absl::Status RankPush::Commit(const PushTotals& totals) {
  if (totals.chunk_count != chunk_count_ || totals.total_bytes != total_bytes_) {
    return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kCountMismatch,
                     absl::StrCat("commit: chunk_count ", totals.chunk_count, ", total_bytes ",
                                  totals.total_bytes, " given, but ", chunk_count_, " chunks with ",
                                  total_bytes_, " bytes arrived on this stream"));
  }
  if (session_ == nullptr) {
    if (totals.digest != committed_.digest) {
      return MakeError(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                       absl::StrCat("step ", committed_.result.record.step,
                                    " is committed already, with other content"));
    }
    on_end_(committed_.result);
    return absl::OkStatus();
  }
  const absl::StatusOr<bool> last = session_->CommitRank(rank_, stream_, totals.digest);
  if (EndsStep(last.status())) {
    model_->FailSession(session_, last.status());
  }
  EMA_RETURN_IF_ERROR(last.status());
  EndChunks();
  if (*last) model_->CompleteStep(session_);
  return absl::OkStatus();
}

}  // namespace ema
