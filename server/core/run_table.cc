// SPDX-License-Identifier: Apache-2.0
#include "server/core/run_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// Remembered, so that a fenced trainer's ranks that open the run only now cannot fence its
// successor.
constexpr size_t kFencedLaunches = 64;
// Epochs are microseconds since 1970, so none is near it.
constexpr int64_t kMaxRunEpoch = int64_t{1} << 53;

}  // namespace

absl::Status FencedError(const std::string& message) {
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced, message);
}

absl::Status RunTable::CheckLaunch(const Launch& launch) const {
  if (launch.run_epoch != 0) {
    // Another partition has checked the launch. Messages of an earlier run may come late.
    if (IsOpen(launch) || launch.run_epoch > epoch_) return absl::OkStatus();
    return FencedError(absl::StrCat("run_epoch: ", launch.run_epoch, " given, but epoch ", epoch_,
                                    " has been opened"));
  }
  const int64_t last = launch.last_run_epoch;
  // A model that was given the greatest has epochs beyond it.
  const int64_t most = std::max(kMaxRunEpoch, epoch_);
  if (last < 0 || last > most) {
    return BadRequest(absl::StrCat("last_run_epoch: ", last, " given, expected 0 to ", most));
  }
  if (IsOpen(launch)) return absl::OkStatus();
  const bool is_older = last < fence_epoch_ || (run_ != nullptr && last == fence_epoch_);
  if (std::find(fenced_launches_.begin(), fenced_launches_.end(), launch.id) ==
          fenced_launches_.end() &&
      (last == 0 || !is_older)) {
    return absl::OkStatus();
  }
  return FencedError(
      absl::StrCat("launch_id \"", launch.id, "\" has been fenced by a newer run, or a rollback"));
}

bool RunTable::IsOpen(const Launch& launch) const {
  return run_ != nullptr && run_->launch_id() == launch.id &&
         (launch.run_epoch == 0 || launch.run_epoch == epoch_);
}

absl::Status RunTable::Join(const Launch& launch, int64_t rank, int64_t world_size,
                            RankLayout layout) {
  EMA_RETURN_IF_ERROR(run_->Join(rank, world_size, std::move(layout)));
  fence_epoch_ = std::max(fence_epoch_, launch.last_run_epoch);
  return absl::OkStatus();
}

absl::Status RunTable::Open(const Launch& launch, int64_t rank, int64_t world_size,
                            RankLayout layout, const Manifest* manifest,
                            std::shared_ptr<MemoryBudget> host_budget) {
  const int64_t next =
      launch.run_epoch != 0 ? launch.run_epoch : std::max(epoch_, launch.last_run_epoch) + 1;
  EMA_ASSIGN_OR_RETURN(
      std::shared_ptr<TrainerRun> run,
      TrainerRun::Create(manifest, launch.id, next, world_size, std::move(host_budget)));
  EMA_RETURN_IF_ERROR(run->Join(rank, world_size, std::move(layout)));
  FenceOpenRun();
  run_ = std::move(run);
  epoch_ = run_->epoch();
  fence_epoch_ = launch.last_run_epoch > 0 ? launch.last_run_epoch : epoch_;
  requires_frozen_ = false;
  return absl::OkStatus();
}

void RunTable::FenceOpenRun() {
  if (run_ == nullptr) return;
  fenced_launches_.push_back(run_->launch_id());
  if (fenced_launches_.size() > kFencedLaunches) fenced_launches_.erase(fenced_launches_.begin());
  run_ = nullptr;
}

absl::Status RunTable::CheckRank(int64_t run_epoch, int64_t rank, const Snapshot* newest) const {
  if (run_ == nullptr || run_epoch != epoch_) {
    std::string message = absl::StrCat("the run of model \"", model_name_, "\" that pushes is not ",
                                       "open: a newer one was opened, or the server was restarted");
    if (run_ == nullptr && newest != nullptr && newest->record.restored_from.has_value()) {
      absl::StrAppend(&message, " (the model was rolled back to version ",
                      newest->record.restored_from->version, ", step ", newest->record.step, ")");
    }
    return FencedError(message);
  }
  if (rank < 0 || rank >= run_->world_size()) {
    return BadRequest(
        absl::StrCat("rank: ", rank, " given, expected 0 to ", run_->world_size() - 1));
  }
  return absl::OkStatus();
}

absl::Status RunTable::CheckMayPush(const PushStart& start, const Snapshot* newest) const {
  EMA_RETURN_IF_ERROR(CheckNotRollingBack());
  EMA_RETURN_IF_ERROR(CheckRank(start.run_epoch, start.rank, newest));
  EMA_RETURN_IF_ERROR(run_->failure());
  if (!run_->is_ready()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kRunIncomplete,
                     absl::StrCat("ranks ", absl::StrJoin(run_->MissingRanks(kNamedRanks), ", "),
                                  " of ", run_->world_size(), " have not opened the run"),
                     absl::Milliseconds(50));
  }
  if (start.layout_digest != run_->layout(start.rank)->digest()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kLayoutMismatch,
        absl::StrCat("layout_digest: ", start.layout_digest, " given, rank ", start.rank,
                     " opened the run with ", run_->layout(start.rank)->digest()));
  }
  return absl::OkStatus();
}

absl::Status RunTable::CheckNotRollingBack() const {
  if (!is_rolling_back_) return absl::OkStatus();
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                   absl::StrCat("model \"", model_name_, "\" is being rolled back"),
                   absl::Milliseconds(100));
}

void RunTable::BeginRollback() {
  is_rolling_back_ = true;
  FenceOpenRun();
}

void RunTable::Restore(const Version& record, int64_t fenced_epoch) {
  epoch_ = std::max({epoch_, record.incarnation + 1, record.run_epoch, fenced_epoch});
  fence_epoch_ = fenced_epoch > 0 ? std::max(record.run_epoch, fenced_epoch + 1) : record.run_epoch;
}

}  // namespace ema
