// SPDX-License-Identifier: Apache-2.0
//
// A run on a group that continues when the model has returned to a checkpoint.
#ifndef EMA_CLIENT_CPP_GROUP_REJOINING_RUN_H_
#define EMA_CLIENT_CPP_GROUP_REJOINING_RUN_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/group/group_run.h"
#include "client/cpp/push/opened_run.h"
#include "ema/client.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// A GroupRun belongs to one incarnation of its model. This forwards to the newest one: when a push
// or RefreshPlan() is fenced, because a restarted server has begun another incarnation, it opens
// the run again there. The push is then repeated: see GroupPush. Thread-safe.
class RejoiningRun final : public OpenedRun, public std::enable_shared_from_this<RejoiningRun> {
 public:
  // `options`: those with which `run` was opened.
  RejoiningRun(std::shared_ptr<GroupRun> run, Client::RunOptions options);

  Client::Impl& client() const override { return client_; }
  const std::string& model() const override { return model_; }
  const Manifest& manifest() const override { return manifest_; }
  const RankLayout& layout() const override { return layout_; }
  int64_t rank() const override { return options_.rank; }
  int64_t run_epoch() const override { return newest()->run_epoch(); }
  std::optional<Version> latest() const override { return newest()->latest(); }
  RunPlan plan() const override { return newest()->plan(); }
  bool may_omit_frozen() const override { return newest()->may_omit_frozen(); }
  absl::StatusOr<bool> IsDue(const TrainingTime& now) const override {
    return newest()->IsDue(now);
  }
  absl::Status WaitReady(SteadyTime deadline, Interrupt* interrupt) override;
  absl::Status RefreshPlan(SteadyTime deadline, Interrupt* interrupt) override;
  absl::StatusOr<PushProgress> QueryPush(int64_t step, bool abandon_if_unfinished,
                                         SteadyTime deadline, Interrupt* interrupt, bool retry,
                                         std::string_view skip_reason) override {
    return newest()->QueryPush(step, abandon_if_unfinished, deadline, interrupt, retry,
                               skip_reason);
  }
  absl::StatusOr<std::shared_ptr<RunningPush>> MakePush(PushArguments arguments) override;

 private:
  std::shared_ptr<GroupRun> newest() const ABSL_LOCKS_EXCLUDED(mu_);
  // Opens the run of `fenced` again. Retries until `deadline` while a server does not run.
  absl::StatusOr<std::shared_ptr<GroupRun>> OpenAgain(const GroupRun& fenced, SteadyTime deadline,
                                                      Interrupt* interrupt) const;
  // Returns the run in the newest incarnation, which it opens if that has not been done since
  // `fenced` was opened. Does not wait for the other ranks. ABORTED, FENCED: a newer launch has
  // taken over. INVALID_ARGUMENT, BAD_LAYOUT: the model has been created again, with other tensors.
  // DEADLINE_EXCEEDED: another call was opening the run, for which this one waits. Other errors as
  // GroupRun::OpenNewest().
  absl::StatusOr<std::shared_ptr<GroupRun>> Rejoin(const GroupRun& fenced, SteadyTime deadline,
                                                   Interrupt* interrupt) ABSL_LOCKS_EXCLUDED(mu_);

  Client::Impl& client_;  // `newest_` keeps it alive.
  const std::string model_;
  const Manifest manifest_;
  const RankLayout layout_;
  const Client::RunOptions options_;

  mutable absl::Mutex mu_;
  SteadyWait wait_;  // Woken when `is_rejoining_` becomes false.
  // A call of Rejoin() opens the run. It is the only one: a server aborts the open round when a
  // rank joins the run again.
  bool is_rejoining_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<GroupRun> newest_ ABSL_GUARDED_BY(mu_);
  // Not OK: a newer launch took over. Permanent, because a later incarnation would not know that.
  absl::Status fenced_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GROUP_REJOINING_RUN_H_
