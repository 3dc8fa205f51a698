// SPDX-License-Identifier: Apache-2.0
//
// Client::OpenRun(), for a model on one server or on a group of them.
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/gpu/pinned_ring.h"
#include "client/cpp/group/group_run.h"
#include "client/cpp/group/rejoining_run.h"
#include "client/cpp/push/run_core.h"
#include "client/cpp/transport/convert_replies.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/random_hex.h"

namespace ema {

using client_internal::GroupRun;
using client_internal::Interrupt;
using client_internal::MakeRequest;
using client_internal::RejoiningRun;
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
  EMA_ASSIGN_OR_RETURN(
      v1::Model reply,
      impl_->UnaryWithRetries(&Stub::PrepareAsyncGetModel, MakeRequest<v1::GetModelRequest>(model),
                              deadline, &interrupt));
  if (reply.partitions().empty()) {
    EMA_ASSIGN_OR_RETURN(ModelInfo info, client_internal::FromProto(reply));
    EMA_ASSIGN_OR_RETURN(
        const std::shared_ptr<RunCore> core,
        RunCore::Create(impl_, std::move(info), checked, /*group=*/nullptr, deadline, &interrupt));
    EMA_RETURN_IF_ERROR(core->Join(deadline, &interrupt).status());
    return std::unique_ptr<Run>(new Run(core));
  }
  EMA_ASSIGN_OR_RETURN(
      std::shared_ptr<GroupRun> run,
      GroupRun::OpenNewest(impl_, std::move(reply), checked, deadline, &interrupt));
  if (!checked.rejoins) return std::unique_ptr<Run>(new Run(std::move(run)));
  return std::unique_ptr<Run>(new Run(std::make_shared<RejoiningRun>(std::move(run), checked)));
}

}  // namespace ema
