// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/push/current_push.h"
#include "client/cpp/push/opened_run.h"
#include "client/cpp/push/running_push.h"
#include "client/cpp/transport/fork_guard.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {

using client_internal::Interrupt;
using client_internal::OpenedRun;

namespace {

absl::Status BadShards(std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadLayout, message);
}

// `omits_frozen`: frozen ones may be empty.
absl::Status CheckShards(const OpenedRun& run,
                         const std::vector<std::span<const std::byte>>& shards, bool omits_frozen) {
  const RankLayout& layout = run.layout();
  if (shards.size() != layout.shards().size()) {
    return BadShards(absl::StrCat("rank ", run.rank(), " has ", layout.shards().size(),
                                  " shards, but ", shards.size(), " were given"));
  }
  const size_t frozen_begin = shards.size() - layout.frozen_shards().size();
  for (size_t i = 0; i < shards.size(); ++i) {
    if (omits_frozen && i >= frozen_begin && shards[i].empty()) continue;
    const Shard& shard = layout.shards()[i];
    const TensorSpec& tensor = run.manifest().tensor(shard.tensor_index);
    const int64_t expected_bytes = shard.element_count() * DtypeSize(tensor.dtype);
    if (static_cast<int64_t>(shards[i].size()) != expected_bytes) {
      return BadShards(absl::StrCat("shard ", i, " of tensor \"", tensor.name, "\" (",
                                    tensor.TypeString(), ") has ", expected_bytes, " bytes, but ",
                                    shards[i].size(), " were given"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckGpuWeights(const OpenedRun& run, const GpuWeights& weights) {
  const size_t shard_count = run.layout().shards().size();
  if (!weights.devices.empty() && weights.devices.size() != shard_count) {
    return BadShards(absl::StrCat("rank ", run.rank(), " has ", shard_count, " shards, but ",
                                  weights.devices.size(), " devices were given"));
  }
  for (const int device : weights.devices) {
    const auto is_of_device = [device](const GpuStream& stream) { return stream.device == device; };
    if (device >= 0 && std::none_of(weights.streams.begin(), weights.streams.end(), is_of_device)) {
      return BadShards(
          absl::StrCat("shards are on GPU ", device, ", but no stream of it was given"));
    }
  }
  return absl::OkStatus();
}

// REQUIRES: CheckGpuWeights(gpu_weights) is OK.
absl::Status CheckStrides(const OpenedRun& run, const std::vector<Strides>& strides,
                          const GpuWeights& gpu_weights) {
  const absl::Span<const Shard> shards = run.layout().shards();
  if (!strides.empty() && strides.size() != shards.size()) {
    return BadShards(absl::StrCat("rank ", run.rank(), " has ", shards.size(),
                                  " shards, but strides of ", strides.size(), " were given"));
  }
  for (size_t i = 0; i < strides.size(); ++i) {
    if (strides[i].empty()) continue;
    const TensorSpec& tensor = run.manifest().tensor(shards[i].tensor_index);
    if (strides[i].size() != shards[i].extents.size()) {
      return BadShards(absl::StrCat("shard ", i, " of tensor \"", tensor.name, "\" (",
                                    tensor.TypeString(), ") was given with ", strides[i].size(),
                                    " strides"));
    }
    if (!gpu_weights.devices.empty() && gpu_weights.devices[i] >= 0) {
      return BadShards(absl::StrCat("shard ", i, " of tensor \"", tensor.name,
                                    "\" was given with strides, and on GPU ",
                                    gpu_weights.devices[i]));
    }
  }
  return absl::OkStatus();
}

}  // namespace

Run::Run(std::shared_ptr<OpenedRun> run)
    : run_(std::move(run)), current_push_(std::make_shared<client_internal::CurrentPush>()) {}

Run::~Run() {
  if (run_->fork_guard().forked()) {
    client_internal::LeakForever(std::move(run_));
    client_internal::LeakForever(std::move(current_push_));
  } else {
    current_push_->End();
  }
}

const Manifest& Run::manifest() const { return run_->manifest(); }
const RankLayout& Run::layout() const { return run_->layout(); }
int64_t Run::rank() const { return run_->rank(); }

// A forked child must not take the locks behind these: the parent may have held them.
int64_t Run::run_epoch() const { return run_->fork_guard().forked() ? 0 : run_->run_epoch(); }

std::optional<Version> Run::latest() const {
  return run_->fork_guard().forked() ? std::nullopt : run_->latest();
}

RunPlan Run::plan() const { return run_->fork_guard().forked() ? RunPlan() : run_->plan(); }

absl::StatusOr<bool> Run::IsDue(const TrainingTime& now) const {
  EMA_RETURN_IF_ERROR(run_->fork_guard().Check());
  return run_->IsDue(now);
}

absl::Status Run::RefreshPlan(absl::Duration timeout) {
  EMA_RETURN_IF_ERROR(run_->fork_guard().Check());
  Interrupt interrupt(&run_->client().options().is_interrupted);
  return run_->RefreshPlan(run_->client().Deadline(timeout), &interrupt);
}

absl::Status Run::WaitReady(absl::Duration timeout) {
  EMA_RETURN_IF_ERROR(run_->fork_guard().Check());
  Interrupt interrupt(&run_->client().options().is_interrupted);
  return run_->WaitReady(run_->client().Deadline(timeout), &interrupt);
}

absl::StatusOr<std::unique_ptr<PendingPush>> Run::StartPush(
    int64_t step, const TrainingTime& time, std::vector<std::span<const std::byte>> shards,
    absl::Duration timeout, PushOptions options) {
  const SteadyTime deadline = run_->client().Deadline(timeout);
  EMA_RETURN_IF_ERROR(run_->fork_guard().Check());
  const bool omits_frozen = !options.frozen_changed && run_->may_omit_frozen();
  EMA_RETURN_IF_ERROR(CheckShards(*run_, shards, omits_frozen));
  EMA_RETURN_IF_ERROR(CheckGpuWeights(*run_, options.gpu_weights));
  EMA_RETURN_IF_ERROR(CheckStrides(*run_, options.strides, options.gpu_weights));
  EMA_RETURN_IF_ERROR(time.Validate());
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<client_internal::RunningPush> push,
                       run_->MakePush({.step = step,
                                       .time = time,
                                       .shards = std::move(shards),
                                       .deadline = deadline,
                                       .options = std::move(options)}));
  EMA_RETURN_IF_ERROR(current_push_->Start(*run_, push));
  return std::unique_ptr<PendingPush>(new PendingPush(std::move(push)));
}

absl::StatusOr<Version> Run::Push(int64_t step, const TrainingTime& time,
                                  std::vector<std::span<const std::byte>> shards,
                                  absl::Duration timeout) {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<PendingPush> push,
                       StartPush(step, time, std::move(shards), timeout));
  return push->Wait();
}

absl::StatusOr<PushProgress> Run::QueryPush(int64_t step, bool abandon_if_unfinished,
                                            absl::Duration timeout) {
  EMA_RETURN_IF_ERROR(run_->fork_guard().Check());
  Interrupt interrupt(&run_->client().options().is_interrupted);
  return run_->QueryPush(step, abandon_if_unfinished, run_->client().Deadline(timeout), &interrupt,
                         /*retry=*/true, /*skip_reason=*/{});
}

absl::StatusOr<PushProgress> Run::SkipStep(int64_t step, std::string_view why,
                                           absl::Duration timeout) {
  constexpr size_t kMaxBytes = 1024;  // The limit of QueryPushRequest.skip_reason.
  EMA_RETURN_IF_ERROR(run_->fork_guard().Check());
  // Not in the middle of a character.
  size_t length = std::min(why.size(), kMaxBytes);
  while (length < why.size() && length > 0 && (why[length] & 0xC0) == 0x80) --length;
  Interrupt interrupt(&run_->client().options().is_interrupted);
  return run_->QueryPush(step, /*abandon_if_unfinished=*/true, run_->client().Deadline(timeout),
                         &interrupt, /*retry=*/false, why.substr(0, length));
}

PendingPush::PendingPush(std::shared_ptr<client_internal::RunningPush> push)
    : push_(std::move(push)) {}

PendingPush::~PendingPush() {
  if (push_->fork_guard().forked() || !push_->Abandon()) {
    client_internal::LeakForever(std::move(push_));
  }
}

// The memory of a forked child is its own: nothing is read from it.
bool PendingPush::WaitReleased(absl::Duration max_wait, absl::Span<const GpuStream> streams) {
  return push_->fork_guard().forked() || push_->WaitReleased(max_wait, streams);
}

absl::StatusOr<Version> PendingPush::Wait() {
  EMA_RETURN_IF_ERROR(push_->fork_guard().Check());
  return push_->Wait();
}

bool PendingPush::WaitDone(absl::Duration max_wait) {
  return push_->fork_guard().forked() || push_->WaitDone(max_wait);
}

bool PendingPush::done() const { return push_->fork_guard().forked() || push_->done(); }

void PendingPush::Abandon() {
  // False: so will it be in the destructor.
  if (!push_->fork_guard().forked()) (void)push_->Abandon();
}

PendingPush::Stats PendingPush::stats() const {
  return push_->fork_guard().forked() ? Stats() : push_->stats();
}

}  // namespace ema
