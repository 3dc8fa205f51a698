// SPDX-License-Identifier: Apache-2.0
//
// The state that all calls of a server share.
#ifndef EMA_SERVER_RPC_RPC_CONTEXT_H_
#define EMA_SERVER_RPC_RPC_CONTEXT_H_

#include <memory>

#include "ema/v1/ema_service.grpc.pb.h"
#include "ema/v1/group.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/base/log_event.h"
#include "server/base/observer.h"
#include "server/core/checkpoints.h"
#include "server/core/model_store.h"
#include "server/rpc/admission.h"
#include "server/rpc/call_count.h"
#include "server/rpc/group_calls.h"
#include "server/rpc/stream_slots.h"
#include "server/rpc/worker.h"

namespace ema {

// Shared by all calls, and outlives them.
struct RpcContext {
  // Asynchronous for every method: gRPC 1.51 answers synchronous methods on threads of its own, and
  // queues their calls without bound while clients reset them. Push and Pull carry raw messages.
  using EmaService = v1::EmaService::WithRawMethod_Push<
      v1::EmaService::WithRawMethod_Pull<v1::EmaService::AsyncService>>;

  EmaService service;
  v1::GroupService::AsyncService group_service;  // Not served without `group`.
  grpc::health::v1::Health::AsyncService health;
  std::shared_ptr<ModelStore> store;
  Admission admission;
  // All call objects: those that wait for a client, run, or send their status. A completion queue
  // is shut down only when none is left.
  CallCount live_calls;
  StreamSlots pushes;
  StreamSlots pulls;
  StreamSlots watches;
  LogSink log;
  Checkpoints* checkpoints = nullptr;  // Outlives this. Never null in a server.
  GroupCalls* group = nullptr;         // Outlives this. Null: the server is not in a group.
  ServerObserver* observer = nullptr;  // Outlives this. Never null.
  // Their threads make the chunks of pulls that need the disk, and of those that need an
  // accelerator: one chunk of each pull in turn. Never null in a server.
  Worker* disk_reader = nullptr;
  Worker* device_reader = nullptr;

  // As GroupCalls::CheckLoaded(); OK if the server is not in a group.
  absl::Status CheckLoaded(std::string_view model) const {
    return group != nullptr ? group->CheckLoaded(model) : absl::OkStatus();
  }
  // As GroupCalls::CheckLoaded() if only a partition is pulled, otherwise as CheckHome(); OK if the
  // server is not in a group.
  absl::Status CheckPull(const v1::PullRequest& request) const {
    if (group == nullptr) return absl::OkStatus();
    return request.partition_only() ? group->CheckLoaded(request.model())
                                    : group->CheckHome(request.model());
  }
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_RPC_CONTEXT_H_
