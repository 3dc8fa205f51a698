// SPDX-License-Identifier: Apache-2.0
//
// Client::OpenRun(), for a model on one server or on a group of them.
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/gpu/pinned_ring.h"
#include "client/cpp/group/group_run.h"
#include "client/cpp/group/partition_map.h"
#include "client/cpp/push/run_core.h"
#include "client/cpp/transport/convert.h"
#include "client/cpp/transport/retry.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/random_hex.h"

namespace ema {

using client_internal::GroupRun;
using client_internal::Interrupt;
using client_internal::MakeRequest;
using client_internal::PartitionMap;
using client_internal::RunCore;
using client_internal::Stub;

namespace {

// `options` with a launch_id.
absl::StatusOr<Client::RunOptions> CheckRunOptions(Client::RunOptions options) {
  if (options.launch_id.empty()) {
    if (options.world_size > 1) {
      return BadRequest(absl::StrCat("launch_id is empty: with ", options.world_size,
                                     " ranks, all of them must get the same one"));
    }
    options.launch_id = RandomHex(4);
  }
  EMA_RETURN_IF_ERROR(client_internal::PinnedRing::CheckMaxStagingBytes(options.max_staging_bytes));
  return options;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Run>> Client::OpenRun(std::string_view model,
                                                     const RunOptions& options,
                                                     absl::Duration timeout) {
  Interrupt interrupt(&impl_->options().is_interrupted);
  const SteadyTime deadline = impl_->Deadline(timeout);
  EMA_ASSIGN_OR_RETURN(const RunOptions checked, CheckRunOptions(options));
  client_internal::Backoff backoff;
  while (true) {
    EMA_ASSIGN_OR_RETURN(
        const v1::Model reply,
        impl_->Unary(&Stub::PrepareAsyncGetModel, MakeRequest<v1::GetModelRequest>(model), deadline,
                     &interrupt));
    if (reply.partitions().empty()) {
      EMA_ASSIGN_OR_RETURN(ModelInfo info, client_internal::FromProto(reply));
      EMA_ASSIGN_OR_RETURN(const std::shared_ptr<RunCore> core,
                           RunCore::Create(impl_, std::move(info), checked, /*group=*/nullptr,
                                           deadline, &interrupt));
      EMA_RETURN_IF_ERROR(core->Join(deadline, &interrupt).status());
      return std::unique_ptr<Run>(new Run(core));
    }
    EMA_ASSIGN_OR_RETURN(PartitionMap map, PartitionMap::Create(reply));
    const int64_t incarnation = map.incarnation();
    absl::StatusOr<std::shared_ptr<GroupRun>> run =
        GroupRun::Open(impl_, std::move(map), checked, deadline, &interrupt);
    if (run.ok()) return std::unique_ptr<Run>(new Run(*std::move(run)));
    // The model may have returned to a checkpoint meanwhile, perhaps because of `resume`.
    if (GetGroupHint(run.status()).incarnation > incarnation) continue;
    // A server that has just started is not among those that run yet.
    if (!client_internal::IsRetryable(run.status())) return run.status();
    const absl::Duration delay = backoff.Next(run.status());
    if (After(SteadyNow(), delay) >= deadline) return run.status();
    if (!interrupt.Sleep(delay)) return absl::CancelledError("interrupted");
  }
}

}  // namespace ema
