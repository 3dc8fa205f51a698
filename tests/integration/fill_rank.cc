// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/fill_rank.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"

namespace ema {
namespace {

constexpr int64_t kChunkBytes = 2048;  // So that a rank has several.
constexpr absl::Duration kPushTimeout = absl::Seconds(10);
constexpr absl::Duration kPullTimeout = absl::Seconds(20);

bool Is(const absl::Status& status, ErrorReason reason) { return GetErrorReason(status) == reason; }

// What may come of a push while ranks, connections and whole lives end around it: it is lost, and
// nothing has been applied. Everything else is a bug.
bool MayFail(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kAborted:
      return Is(status, ErrorReason::kStaleStep) || Is(status, ErrorReason::kFenced) ||
             Is(status, ErrorReason::kStepAbandoned) || Is(status, ErrorReason::kSessionExpired) ||
             Is(status, ErrorReason::kStalled);
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return true;
    default:
      return false;
  }
}

}  // namespace

FillLives::Life FillLives::now() const {
  absl::MutexLock lock(&mu_);
  return life_;
}

FillLives::Life FillLives::Begin(int64_t left_out_rank) {
  absl::MutexLock lock(&mu_);
  ++life_.number;
  life_.left_out_rank = left_out_rank;
  return life_;
}

void FillLives::Stop() {
  absl::MutexLock lock(&mu_);
  stopped_ = true;
}

bool FillLives::stopped() const {
  absl::MutexLock lock(&mu_);
  return stopped_;
}

bool FillLives::AwaitAfter(int64_t number, int64_t rank) const {
  absl::MutexLock lock(&mu_);
  const auto begun = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return stopped_ || (life_.number != number && life_.left_out_rank != rank);
  };
  mu_.Await(absl::Condition(&begun));
  return !stopped_;
}

FillRank::FillRank(const std::string& address, FillWay way, int64_t rank, const FillLives* lives,
                   History* history, FillCounts* counts)
    : way_(way),
      rank_(rank),
      lives_(*lives),
      history_(*history),
      counts_(*counts),
      random_(static_cast<unsigned>(rank)) {
  Client::Options options;
  options.chunk_bytes = kChunkBytes;
  options.same_host_lane = way == FillWay::kSharedMemory;
  client_ = *Client::Create(address, options);
  twin_client_ = *Client::Create(address, options);
}

void FillRank::Run() {
  int64_t last_life = 0;
  while (lives_.AwaitAfter(last_life, rank_)) {
    const FillLives::Life life = lives_.now();
    last_life = life.number;
    if (life.left_out_rank != rank_) Live(life);
  }
}

void FillRank::Live(const FillLives::Life& life) {
  const absl::StatusOr<ModelInfo> info = client_->GetModel(kFillModel);
  if (!info.ok()) {
    return history_.OnViolation(absl::StrCat("GetModel: ", info.status().ToString()));
  }
  const Client::RunOptions options = {.launch_id = life.launch_id(),
                                      .rank = rank_,
                                      .world_size = kFillRanks,
                                      .shards = FillShards(info->manifest, rank_),
                                      .rejoins = false};
  const auto open = [&](Client& client) -> std::unique_ptr<ema::Run> {
    absl::StatusOr<std::unique_ptr<ema::Run>> run = client.OpenRun(kFillModel, options);
    if (run.ok()) return *std::move(run);
    if (!Is(run.status(), ErrorReason::kFenced)) {
      history_.OnViolation(absl::StrCat("OpenRun: ", run.status().ToString()));
    }
    return nullptr;
  };
  // The old ones end first: they refer to the bytes.
  twin_ = nullptr;
  run_ = nullptr;
  run_ = open(*client_);
  twin_ = open(*twin_client_);
  if (run_ == nullptr || twin_ == nullptr) return;
  bytes_ = std::make_unique<FillBytes>(run_->manifest(), run_->layout());
  int64_t step = run_->latest().has_value() ? run_->latest()->step : 0;
  while (!lives_.stopped()) {
    step = NextFillStep(step);
    // Given up by another rank, it can be begun anew, once.
    if (!PushStep(step) || lives_.now().number != life.number) break;
  }
  twin_ = nullptr;
  run_ = nullptr;
}

bool FillRank::PushStep(int64_t step) {
  bytes_->Set(FillValue(step));
  history_.OnBegin(step);
  absl::StatusOr<Version> version;
  const int64_t life = lives_.now().number;
  for (int attempt = 0; attempt < 2; ++attempt) {
    ++counts_.pushes;
    if (attempt == 0 && OneOf(25)) {
      version = PushAndAbandon(step);
    } else {
      version = OneOf(16) ? PushTwice(step) : Push(step);
    }
    if (version.ok()) {
      history_.OnAck(step, *version);
      if (OneOf(10)) Repeat(step, *version);
      return true;
    }
    if (!MayFail(version.status())) {
      history_.OnViolation(absl::StrCat("push of step ", step, " by rank ", rank_, ": ",
                                        version.status().ToString()));
    }
    // Of its own twin, or of another life.
    if (Is(version.status(), ErrorReason::kFenced) && lives_.now().number != life) return false;
    if (!Is(version.status(), ErrorReason::kStepAbandoned)) break;
  }
  ++counts_.failed;
  return true;
}

std::unique_ptr<PendingPush> FillRank::Start(ema::Run& run, int64_t step, const FillBytes& bytes) {
  auto push = run.StartPush(step, TrainingTime::AtBatch(step), bytes.shards(), kPushTimeout);
  if (push.ok()) return *std::move(push);
  history_.OnViolation(absl::StrCat("StartPush: ", push.status().ToString()));
  return nullptr;
}

absl::StatusOr<Version> FillRank::Finish(PendingPush* push, int64_t step) {
  if (push == nullptr) return absl::InternalError("not started");
  absl::StatusOr<Version> version = push->Wait();
  if (push->stats().stream_count > 1) ++counts_.resumed;
  if (version.ok() && version->step != step) {
    history_.OnViolation(absl::StrCat("step ", step, " was answered with step ", version->step));
  }
  return version;
}

absl::StatusOr<Version> FillRank::Push(int64_t step) {
  const std::unique_ptr<PendingPush> push = Start(*run_, step, *bytes_);
  return Finish(push.get(), step);
}

absl::StatusOr<Version> FillRank::PushTwice(int64_t step) {
  ++counts_.doubled;
  const std::unique_ptr<PendingPush> push = Start(*run_, step, *bytes_);
  const std::unique_ptr<PendingPush> other = Start(*twin_, step, *bytes_);
  absl::StatusOr<Version> version = Finish(push.get(), step);
  absl::StatusOr<Version> others_version = Finish(other.get(), step);
  if (version.ok() && others_version.ok() && version->number != others_version->number) {
    history_.OnViolation(absl::StrCat("step ", step, " is version ", version->number,
                                      " and version ", others_version->number));
  }
  return version.ok() ? version : others_version;
}

absl::StatusOr<Version> FillRank::PushAndAbandon(int64_t step) {
  ++counts_.abandoned;
  std::unique_ptr<PendingPush> push = Start(*run_, step, *bytes_);
  if (push == nullptr) return absl::InternalError("not started");
  const auto part = static_cast<int64_t>(random_() % (bytes_->bytes().size() + 1));
  const absl::Time wait_end = absl::Now() + absl::Seconds(1);
  while (push->stats().sent_bytes < part && !push->WaitDone(absl::Milliseconds(1)) &&
         absl::Now() < wait_end) {
  }
  if (OneOf(2)) {
    push->Abandon();
  } else {
    push->WaitReleased(absl::ZeroDuration());
  }
  return Finish(push.get(), step);
}

void FillRank::Repeat(int64_t step, const Version& version) {
  // Where a connection breaks, the client learns from QueryPush that the step has been committed,
  // and not as what.
  const bool is_other = way_ != FillWay::kProxy && OneOf(2);
  ++(is_other ? counts_.other_content : counts_.repeated);
  if (is_other) bytes_->Set(FillValue(step) + 1);
  const std::unique_ptr<PendingPush> push = Start(*run_, step, *bytes_);
  const absl::StatusOr<Version> again = Finish(push.get(), step);
  if (again.ok() && (is_other || again->number != version.number)) {
    history_.OnViolation(
        absl::StrCat("step ", step, " again", is_other ? ", with other content" : "",
                     ", was accepted as version ", again->number, " after ", version.number));
  }
  const bool is_stale = Is(again.status(), ErrorReason::kStaleStep);
  if (!again.ok() && (is_other ? !MayFail(again.status()) : is_stale || !MayFail(again.status()))) {
    history_.OnViolation(absl::StrCat("step ", step, " again: ", again.status().ToString()));
  }
}

void PullFilled(const std::string& address, FillWay way, int puller, const FillLives& lives,
                History& history, FillCounts& counts) {
  const std::unique_ptr<Client> client =
      *Client::Create(address, {.same_host_lane = way == FillWay::kSharedMemory});
  std::mt19937 random(static_cast<unsigned>(1000 + puller));
  std::vector<std::byte> bytes;
  int64_t last_version = 0;
  while (!lives.stopped()) {
    History::Pull pull;
    pull.puller = puller;
    pull.is_copy = random() % 4 == 0;
    if (random() % 8 == 0) pull.asked = last_version;
    pull.acked_before = history.acked_version();
    const auto target = [&bytes](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
      bytes.resize(info.total_bytes);
      return std::span(bytes);
    };
    const absl::StatusOr<PullInfo> info = client->Pull(
        kFillModel, pull.is_copy ? "raw" : "ema", {.version = pull.asked}, target, kPullTimeout);
    if (!info.ok()) {
      const absl::Status& status = info.status();
      const bool may_be = status.code() == absl::StatusCode::kUnavailable ||
                          status.code() == absl::StatusCode::kDeadlineExceeded ||
                          Is(status, ErrorReason::kVersionNotKept) ||
                          Is(status, ErrorReason::kTooManyPins);
      if (!may_be) history.OnViolation(absl::StrCat("Pull: ", status.ToString()));
      if (pull.asked == 0) ++counts.failed_pulls;
      continue;
    }
    pull.begun_after = history.begun_step();
    pull.version = info->version.number;
    pull.step = info->version.step;
    pull.sight = Look(*info, bytes, pull.is_copy);
    if (pull.asked == 0) last_version = pull.version;
    history.OnPull(std::move(pull));
  }
}

}  // namespace ema
