// SPDX-License-Identifier: Apache-2.0
//
// Converts between the messages of GroupService and the structs of messages.h. Reading never fails:
// members are trusted, and both state machines check the values that they depend on.
#ifndef EMA_SERVER_GROUP_CONVERT_MESSAGES_H_
#define EMA_SERVER_GROUP_CONVERT_MESSAGES_H_

#include <string>

#include "ema/v1/group.pb.h"
#include "ema/version.h"
#include "server/group/messages.h"

namespace ema::group {

v1::PartitionId ToProto(const std::string& model, const PartitionId& id);
PartitionId FromProto(const v1::PartitionId& proto);
// The step that a partition has prepared. `record`: the version that it will become.
PreparedStep ToPreparedStep(const Version& record);
v1::VoteRequest ToProto(const std::string& model, const Vote& vote);
Vote FromProto(const v1::VoteRequest& proto);
v1::SyncRequest ToProto(const std::string& model, const Sync& sync);
Sync FromProto(const v1::SyncRequest& proto);
v1::GroupState ToProto(const GroupState& state);
GroupState FromProto(const v1::GroupState& proto);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_CONVERT_MESSAGES_H_
