// SPDX-License-Identifier: Apache-2.0
//
// The calls between the servers of a group.
#ifndef EMA_SERVER_RPC_GROUP_SERVICE_H_
#define EMA_SERVER_RPC_GROUP_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include "server/rpc/rpc_context.h"

namespace ema {

// Waits for the next call of each method on `queue`. ReservePartition() runs on `reserving`, on
// which no call may wait for another server: two servers may reserve each other's partitions.
// REQUIRES: rpc->group is not null.
void ListenToGroup(RpcContext* rpc, grpc::ServerCompletionQueue* queue, Worker* reserving);

}  // namespace ema

#endif  // EMA_SERVER_RPC_GROUP_SERVICE_H_
