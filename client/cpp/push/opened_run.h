// SPDX-License-Identifier: Apache-2.0
//
// The interface of the two kinds of runs to which a Run forwards its calls.
#ifndef EMA_CLIENT_CPP_PUSH_OPENED_RUN_H_
#define EMA_CLIENT_CPP_PUSH_OPENED_RUN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/push/running_push.h"
#include "client/cpp/transport/interrupt.h"
#include "ema/client.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// The arguments of Run::StartPush(), which has checked them.
struct PushArguments {
  int64_t step = 0;
  TrainingTime time;
  std::vector<std::span<const std::byte>> shards;
  SteadyTime deadline;
  PushOptions options;
};

// One rank of one run of a model on one server (RunCore) or on a group of servers (GroupRun).
// Thread-safe. Functions that are not described are those of Run.
class OpenedRun {
 public:
  virtual ~OpenedRun() = default;

  virtual Client::Impl& client() const = 0;
  const ForkGuard& fork_guard() const { return client().fork_guard(); }
  virtual const std::string& model() const = 0;
  virtual const Manifest& manifest() const = 0;
  virtual const RankLayout& layout() const = 0;
  virtual int64_t rank() const = 0;
  virtual int64_t run_epoch() const = 0;
  virtual std::optional<Version> latest() const = 0;
  virtual RunPlan plan() const = 0;
  // plan().may_omit_frozen.
  virtual bool may_omit_frozen() const = 0;
  virtual absl::StatusOr<bool> IsDue(const TrainingTime& now) const = 0;

  // Waits until all ranks have joined. Joins again first if the server does not know the run any
  // more. DEADLINE_EXCEEDED: the message names the missing ranks.
  virtual absl::Status WaitReady(SteadyTime deadline, Interrupt* interrupt) = 0;
  // Fetches the plan from the server.
  virtual absl::Status RefreshPlan(SteadyTime deadline, Interrupt* interrupt) = 0;
  // With `retry`, retries like the calls of Client; otherwise tries once. `skip_reason`: see
  // QueryPushRequest.
  virtual absl::StatusOr<PushProgress> QueryPush(int64_t step, bool abandon_if_unfinished,
                                                 SteadyTime deadline, Interrupt* interrupt,
                                                 bool retry, std::string_view skip_reason) = 0;

  // A push that has not been started. INTERNAL, DEVICE, and other errors of a GPU.
  virtual absl::StatusOr<std::shared_ptr<RunningPush>> MakePush(PushArguments arguments) = 0;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_OPENED_RUN_H_
