// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/push/push.h"
#include "client/cpp/push/run_core.h"
#include "client/cpp/transport/fork_guard.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {

using client_internal::RunCore;

namespace {

absl::Status BadShards(std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadLayout, message);
}

}  // namespace

class Run::Impl {
 public:
  explicit Impl(std::shared_ptr<RunCore> core) : core_(std::move(core)) {}

  RunCore& core() { return *core_; }
  bool forked() const { return core_->client().fork_guard().forked(); }

  absl::StatusOr<std::shared_ptr<PendingPush::Impl>> StartPush(
      int64_t step, const TrainingTime& time, std::vector<std::span<const std::byte>> shards,
      SteadyTime deadline, PushOptions options) ABSL_LOCKS_EXCLUDED(mu_);
  void EndPush() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // `omits_frozen`: frozen ones may be empty.
  absl::Status CheckShards(const std::vector<std::span<const std::byte>>& shards,
                           bool omits_frozen) const;
  absl::Status CheckGpuWeights(const GpuWeights& weights) const;
  // REQUIRES: CheckGpuWeights(gpu_weights) is OK.
  absl::Status CheckStrides(const std::vector<Strides>& strides,
                            const GpuWeights& gpu_weights) const;

  const std::shared_ptr<RunCore> core_;
  absl::Mutex mu_;
  std::shared_ptr<PendingPush::Impl> push_ ABSL_GUARDED_BY(mu_);  // The last one.
};

absl::Status Run::Impl::CheckShards(const std::vector<std::span<const std::byte>>& shards,
                                    bool omits_frozen) const {
  const RankLayout& layout = core_->layout();
  if (shards.size() != layout.shards().size()) {
    return BadShards(absl::StrCat("rank ", core_->rank(), " has ", layout.shards().size(),
                                  " shards, but ", shards.size(), " were given"));
  }
  const size_t frozen_begin = shards.size() - layout.frozen_shards().size();
  for (size_t i = 0; i < shards.size(); ++i) {
    if (omits_frozen && i >= frozen_begin && shards[i].empty()) continue;
    const Shard& shard = layout.shards()[i];
    const TensorSpec& tensor = core_->manifest().tensor(shard.tensor_index);
    const int64_t expected_bytes = shard.element_count() * DtypeSize(tensor.dtype);
    if (static_cast<int64_t>(shards[i].size()) != expected_bytes) {
      return BadShards(absl::StrCat("shard ", i, " of tensor \"", tensor.name, "\" (",
                                    tensor.TypeString(), ") has ", expected_bytes, " bytes, but ",
                                    shards[i].size(), " were given"));
    }
  }
  return absl::OkStatus();
}

absl::Status Run::Impl::CheckGpuWeights(const GpuWeights& weights) const {
  const size_t shard_count = core_->layout().shards().size();
  if (!weights.devices.empty() && weights.devices.size() != shard_count) {
    return BadShards(absl::StrCat("rank ", core_->rank(), " has ", shard_count, " shards, but ",
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

absl::Status Run::Impl::CheckStrides(const std::vector<Strides>& strides,
                                     const GpuWeights& gpu_weights) const {
  const absl::Span<const Shard> shards = core_->layout().shards();
  if (!strides.empty() && strides.size() != shards.size()) {
    return BadShards(absl::StrCat("rank ", core_->rank(), " has ", shards.size(),
                                  " shards, but strides of ", strides.size(), " were given"));
  }
  for (size_t i = 0; i < strides.size(); ++i) {
    if (strides[i].empty()) continue;
    const TensorSpec& tensor = core_->manifest().tensor(shards[i].tensor_index);
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

absl::StatusOr<std::shared_ptr<PendingPush::Impl>> Run::Impl::StartPush(
    int64_t step, const TrainingTime& time, std::vector<std::span<const std::byte>> shards,
    SteadyTime deadline, PushOptions options) {
  EMA_RETURN_IF_ERROR(core_->client().fork_guard().Check());
  EMA_RETURN_IF_ERROR(CheckShards(shards, !options.frozen_changed && core_->may_omit_frozen()));
  EMA_RETURN_IF_ERROR(CheckGpuWeights(options.gpu_weights));
  EMA_RETURN_IF_ERROR(CheckStrides(options.strides, options.gpu_weights));
  EMA_RETURN_IF_ERROR(time.Validate());
  const bool check = options.check;
  const std::vector<int>& devices = options.gpu_weights.devices;
  std::vector<client_internal::Gpu*> gpus;
  if (std::any_of(devices.begin(), devices.end(), [](int device) { return device >= 0; })) {
    EMA_ASSIGN_OR_RETURN(gpus, core_->ring().Follow(options.gpu_weights));
  }
  auto push = std::make_shared<PendingPush::Impl>(core_, step, time, std::move(shards), deadline,
                                                  std::move(options), std::move(gpus));
  if (check) push->CheckContent();
  std::shared_ptr<PendingPush::Impl> previous;  // Destroyed without the lock.
  absl::MutexLock lock(&mu_);
  if (push_ != nullptr && !push_->done()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kSessionBusy,
        absl::StrCat(
            "rank ", core_->rank(), " of model \"", core_->model(),
            "\" is still pushing: wait for that push, or abandon it, before the next one"));
  }
  try {
    push->Start();
  } catch (const std::system_error& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot start a thread for the push: ", error.what()));
  }
  previous = std::exchange(push_, push);
  return push;
}

void Run::Impl::EndPush() {
  std::shared_ptr<PendingPush::Impl> push;
  {
    absl::MutexLock lock(&mu_);
    push = std::exchange(push_, nullptr);
  }
  if (push != nullptr && !push->Abandon()) client_internal::LeakForever(std::move(push));
}

absl::StatusOr<std::unique_ptr<Run>> Client::OpenRun(std::string_view model,
                                                     const RunOptions& options,
                                                     absl::Duration timeout) {
  client_internal::Interrupt interrupt(&impl_->options().is_interrupted);
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<RunCore> core,
                       RunCore::Open(impl_, model, options, impl_->Deadline(timeout), &interrupt));
  return std::unique_ptr<Run>(new Run(std::make_shared<Run::Impl>(std::move(core))));
}

Run::Run(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Run::~Run() {
  if (impl_->forked()) {
    client_internal::LeakForever(std::move(impl_));
  } else {
    impl_->EndPush();
  }
}

const Manifest& Run::manifest() const { return impl_->core().manifest(); }
const RankLayout& Run::layout() const { return impl_->core().layout(); }
int64_t Run::rank() const { return impl_->core().rank(); }

// A forked child must not take the locks behind these: the parent may have held them.
int64_t Run::run_epoch() const { return impl_->forked() ? 0 : impl_->core().run_epoch(); }

std::optional<Version> Run::latest() const {
  return impl_->forked() ? std::nullopt : impl_->core().latest();
}

RunPlan Run::plan() const { return impl_->forked() ? RunPlan() : impl_->core().plan(); }

absl::StatusOr<bool> Run::IsDue(const TrainingTime& now) const {
  EMA_RETURN_IF_ERROR(impl_->core().client().fork_guard().Check());
  return impl_->core().IsDue(now);
}

absl::Status Run::RefreshPlan(absl::Duration timeout) {
  Client::Impl& client = impl_->core().client();
  EMA_RETURN_IF_ERROR(client.fork_guard().Check());
  client_internal::Interrupt interrupt(&client.options().is_interrupted);
  return impl_->core().RefreshPlan(client.Deadline(timeout), &interrupt);
}

absl::Status Run::WaitReady(absl::Duration timeout) {
  Client::Impl& client = impl_->core().client();
  EMA_RETURN_IF_ERROR(client.fork_guard().Check());
  client_internal::Interrupt interrupt(&client.options().is_interrupted);
  return impl_->core().WaitReady(client.Deadline(timeout), &interrupt);
}

absl::StatusOr<std::unique_ptr<PendingPush>> Run::StartPush(
    int64_t step, const TrainingTime& time, std::vector<std::span<const std::byte>> shards,
    absl::Duration timeout, PushOptions options) {
  EMA_ASSIGN_OR_RETURN(
      std::shared_ptr<PendingPush::Impl> push,
      impl_->StartPush(step, time, std::move(shards), impl_->core().client().Deadline(timeout),
                       std::move(options)));
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
  Client::Impl& client = impl_->core().client();
  EMA_RETURN_IF_ERROR(client.fork_guard().Check());
  client_internal::Interrupt interrupt(&client.options().is_interrupted);
  return impl_->core().QueryPush(step, abandon_if_unfinished, client.Deadline(timeout), &interrupt,
                                 /*retry=*/true);
}

absl::StatusOr<PushProgress> Run::GiveUp(int64_t step, std::string_view why,
                                         absl::Duration timeout) {
  Client::Impl& client = impl_->core().client();
  EMA_RETURN_IF_ERROR(client.fork_guard().Check());
  client_internal::Interrupt interrupt(&client.options().is_interrupted);
  return impl_->core().GiveUp(step, why, client.Deadline(timeout), &interrupt);
}

PendingPush::PendingPush(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

PendingPush::~PendingPush() {
  if (impl_->fork_guard().forked() || !impl_->Abandon()) {
    client_internal::LeakForever(std::move(impl_));
  }
}

// The memory of a forked child is its own: nothing is read from it.
bool PendingPush::WaitReleased(absl::Duration max_wait, absl::Span<const GpuStream> streams) {
  return impl_->fork_guard().forked() || impl_->WaitReleased(max_wait, streams);
}

absl::StatusOr<Version> PendingPush::Wait() {
  EMA_RETURN_IF_ERROR(impl_->fork_guard().Check());
  return impl_->Wait();
}

bool PendingPush::WaitDone(absl::Duration max_wait) {
  return impl_->fork_guard().forked() || impl_->WaitDone(max_wait);
}

bool PendingPush::done() const { return impl_->fork_guard().forked() || impl_->done(); }

void PendingPush::Abandon() {
  // False: so will it be in the destructor.
  if (!impl_->fork_guard().forked()) (void)impl_->Abandon();
}

PendingPush::Stats PendingPush::stats() const {
  return impl_->fork_guard().forked() ? Stats() : impl_->stats();
}

}  // namespace ema
