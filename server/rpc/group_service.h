// SPDX-License-Identifier: Apache-2.0
//
// The calls between the servers of a group.
#ifndef EMA_SERVER_RPC_GROUP_SERVICE_H_
#define EMA_SERVER_RPC_GROUP_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include "server/rpc/rpc_context.h"

namespace ema {

struct GroupWorkers {
  // No call on these four may wait for another server, because two servers may call each other at
  // the same time. SavePart() may take minutes.
  Worker* reserving = nullptr;
  Worker* saving_parts = nullptr;
  Worker* computing_parts = nullptr;
  Worker* reading_copies = nullptr;
  // FetchCopy() waits for ReadCopy() of other servers. Both calls may take minutes.
  Worker* copying_parts = nullptr;
  Worker* saving = nullptr;  // For SaveNow().
};

// Waits for the next call of each method on `queue`. REQUIRES: rpc->group is not null.
void ListenToGroup(RpcContext* rpc, grpc::ServerCompletionQueue* queue,
                   const GroupWorkers& workers);

}  // namespace ema

#endif  // EMA_SERVER_RPC_GROUP_SERVICE_H_
