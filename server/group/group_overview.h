// SPDX-License-Identifier: Apache-2.0
//
// Describes the group for people and for metrics.
#ifndef EMA_SERVER_GROUP_GROUP_OVERVIEW_H_
#define EMA_SERVER_GROUP_GROUP_OVERVIEW_H_

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "ema/v1/ema_service.pb.h"
#include "ema/v1/group.pb.h"
#include "server/core/model_store.h"
#include "server/group/hosted_models.h"
#include "server/group/member.h"
#include "server/group/model_record.h"
#include "server/group/peers.h"
#include "server/group/registry_follower.h"

namespace ema::group {

// Describes the group as this server sees it, from the cache of the registry, so also while the
// registry does not answer. Thread-safe.
class GroupOverview {
 public:
  // All outlive this.
  GroupOverview(const HostedModels* hosted, const ModelStore* store,
                const RegistryFollower* follower, Peers* peers)
      : hosted_(*hosted), store_(*store), follower_(*follower), peers_(*peers) {}

  // What this server knows, without the progress of models with another home. Does not block.
  // UNAVAILABLE, GROUP_DEGRADED: this server has not joined its group.
  absl::StatusOr<v1::GetGroupResponse> DescribeHere() const;
  // Also asks the other members. Calls `reply` once, from any thread, after at most about a second.
  // Errors as DescribeHere().
  void Describe(std::function<void(absl::StatusOr<v1::GetGroupResponse>)> reply) const;
  // This server's part of another server's Describe(). ABORTED, FENCED: the request is for another
  // process.
  absl::StatusOr<v1::DescribeMemberResponse> DescribeMember(
      const v1::DescribeMemberRequest& request) const;

 private:
  void AddMembers(const Member& self, v1::GetGroupResponse& response) const;
  void DescribeModel(const Member& self, const std::string& name, const ModelRecord& record,
                     v1::GetGroupResponse::Model& model) const;
  // The state of a model whose record is ACTIVE.
  void DescribeActive(const Member& self, const ModelRecord& record,
                      v1::GetGroupResponse::Model& model) const;

  const HostedModels& hosted_;
  const ModelStore& store_;
  const RegistryFollower& follower_;
  Peers& peers_;
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_GROUP_OVERVIEW_H_
