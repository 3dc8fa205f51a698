// SPDX-License-Identifier: Apache-2.0
//
// Client::Pull(), for a model on one server or on a group of them.
#include <memory>
#include <utility>

#include "client/cpp/client_impl.h"
#include "client/cpp/group/group_pull.h"
#include "client/cpp/group/partition_map.h"
#include "client/cpp/pull/puller.h"
#include "client/cpp/transport/convert_replies.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {

using client_internal::GroupPull;
using client_internal::Interrupt;
using client_internal::MakeRequest;
using client_internal::PartitionMap;
using client_internal::Puller;
using client_internal::Stub;

namespace {

// Pulls from the servers of a group, whose partitions are read before, unless they are known.
absl::StatusOr<PullInfo> PullFromGroup(Client::Impl& client, const v1::PullRequest& request,
                                       const Client::PullTarget& target,
                                       const std::function<void(int64_t)>& on_progress,
                                       SteadyTime deadline, Interrupt* interrupt) {
  const std::string& model = request.model();
  int64_t last_incarnation = 0;  // Of the partitions of the last attempt; 0: there was none.
  while (true) {
    std::shared_ptr<const PartitionMap> map = client.FindPartitions(model);
    const bool was_known = map != nullptr;
    if (!was_known) {
      EMA_ASSIGN_OR_RETURN(
          const v1::Model reply,
          client.UnaryWithRetries(&Stub::PrepareAsyncGetModel,
                                  MakeRequest<v1::GetModelRequest>(model), deadline, interrupt));
      EMA_ASSIGN_OR_RETURN(PartitionMap partitions, PartitionMap::Create(reply));
      map = std::make_shared<const PartitionMap>(std::move(partitions));
      client.SetPartitions(model, map);
    }
    const bool is_newer = map->incarnation() > std::exchange(last_incarnation, map->incarnation());
    GroupPull pull(&client, map.get(), request, &target, &on_progress);
    absl::StatusOr<PullInfo> info = pull.Run(deadline, interrupt);
    if (info.ok()) return info;
    // They may have changed.
    client.SetPartitions(model, nullptr);
    const ErrorReason reason = GetErrorReason(info.status());
    const bool is_stale = reason == ErrorReason::kNotHome || reason == ErrorReason::kFenced ||
                          reason == ErrorReason::kModelNotFound;
    if (!is_stale || (!was_known && (reason != ErrorReason::kFenced || !is_newer))) return info;
  }
}

}  // namespace

absl::StatusOr<PullInfo> Client::Pull(std::string_view model, std::string_view track,
                                      const PullOptions& options, const PullTarget& target,
                                      absl::Duration timeout,
                                      const std::function<void(int64_t)>& on_progress) {
  auto request = MakeRequest<v1::PullRequest>(model, {options.version, options.incarnation});
  request.set_track(std::string(track));
  request.set_label(options.label);
  if (options.step) request.set_step(*options.step);
  if (!options.selection.is_default()) {
    ToProto(options.selection, request.mutable_selection());
  }
  const auto set_id = [](const VersionId& id, v1::VersionId* proto) {
    proto->set_version(id.version);
    proto->set_incarnation(id.incarnation);
  };
  if (options.if_newer_than) set_id(*options.if_newer_than, request.mutable_if_newer_than());
  if (options.base) set_id(*options.base, request.mutable_base());
  Interrupt interrupt(&impl_->options().is_interrupted);
  const SteadyTime deadline = impl_->Deadline(timeout);
  if (impl_->FindPartitions(request.model()) == nullptr) {
    Puller puller(request, &target, &on_progress);
    absl::Status status;
    do {
      status = puller.Run(*impl_, deadline, &interrupt);
    } while (GetErrorReason(status) == ErrorReason::kVersionNotKept && puller.StartOver());
    if (status.ok()) return std::move(puller).TakeInfo();
    if (GetErrorReason(status) != ErrorReason::kNotHome) return status;
  }
  return PullFromGroup(*impl_, request, target, on_progress, deadline, &interrupt);
}

}  // namespace ema
