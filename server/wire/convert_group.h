// SPDX-License-Identifier: Apache-2.0
//
// Reads the description of a group, for servers and clients.
#ifndef EMA_SERVER_WIRE_CONVERT_GROUP_H_
#define EMA_SERVER_WIRE_CONVERT_GROUP_H_

#include "ema/group_info.h"
#include "ema/v1/ema_service.pb.h"

namespace ema {

// The problems of the models follow those of the group.
GroupInfo FromProto(const v1::GetGroupResponse& response);

}  // namespace ema

#endif  // EMA_SERVER_WIRE_CONVERT_GROUP_H_
