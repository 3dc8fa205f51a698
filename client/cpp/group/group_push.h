// SPDX-License-Identifier: Apache-2.0
//
// A push to all servers of a group.
#ifndef EMA_CLIENT_CPP_GROUP_GROUP_PUSH_H_
#define EMA_CLIENT_CPP_GROUP_GROUP_PUSH_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/group/group_run.h"
#include "client/cpp/push/group_part.h"
#include "client/cpp/push/opened_run.h"
#include "client/cpp/push/running_push.h"
#include "client/cpp/push/server_push.h"
#include "client/cpp/transport/interrupt.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

// Consists of parts: an ordinary push to each server for which the rank has shards, or to the home
// if it has none; at most eight parts send at once. Thread-safe. Owned by the PendingPush; the
// destructor joins the threads.
//
// The servers commit the step together, or none does. If one part fails, the other parts are ended,
// and the step is dropped at the home: it aborts the round in which the step was pushed, so that no
// server keeps the step. Its answer says whether the step was committed or abandoned, for all
// servers, and has the round of the next step.
//
// A push that is fenced because a restarted server has begun another incarnation is repeated there,
// unless the weights may have changed. Then it reports to the other ranks that the step is lost.
class GroupPush final : public RunningPush {
 public:
  // Opens a run again that was fenced: RejoiningRun.
  using RejoinRun =
      std::function<absl::StatusOr<std::shared_ptr<GroupRun>>(SteadyTime, Interrupt*)>;

  // `rejoin`: null: a push that is fenced fails. Errors as OpenedRun::MakePush().
  static absl::StatusOr<std::shared_ptr<GroupPush>> Create(std::shared_ptr<GroupRun> run,
                                                           PushArguments arguments,
                                                           RejoinRun rejoin = nullptr);
  ~GroupPush() override;  // REQUIRES: done(), or never started.

  void Start() override;
  const ForkGuard& fork_guard() const override { return run_->fork_guard(); }
  bool WaitReleased(absl::Duration max_wait, absl::Span<const GpuStream> streams) override;
  absl::StatusOr<Version> Wait() override ABSL_LOCKS_EXCLUDED(mu_);
  bool WaitDone(absl::Duration max_wait) override ABSL_LOCKS_EXCLUDED(mu_);
  bool done() const override ABSL_LOCKS_EXCLUDED(mu_);
  [[nodiscard]] bool Abandon() override;
  PendingPush::Stats stats() const override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  GroupPush(std::shared_ptr<GroupRun> run, PushArguments arguments, RejoinRun rejoin);
  absl::Status AddPart(const GroupRun::PushingPart& part);

  void RunThread();
  // Starts the parts and waits until all have succeeded, or one has failed.
  absl::Status Push();
  // The version that all parts have committed. INTERNAL: they differ.
  absl::StatusOr<Version> Committed();
  // Waits until all started parts have ended.
  void AwaitParts() ABSL_LOCKS_EXCLUDED(mu_);
  // The result of the push after an error. REQUIRES: AwaitParts() has returned.
  absl::StatusOr<Version> DropStep(const absl::Status& error);
  // The result of the same push in the newest incarnation. REQUIRES: AwaitParts() has returned.
  absl::StatusOr<Version> PushAgain() ABSL_LOCKS_EXCLUDED(mu_);
  // Reports to the other ranks that this rank will not push the step in `run`. Returns ABORTED,
  // STEP_ABANDONED.
  absl::Status AbandonLostStep(GroupRun& run) const;
  // Null: PushAgain() has not begun it.
  std::shared_ptr<GroupPush> repeated() const ABSL_LOCKS_EXCLUDED(mu_);
  // True: a part has failed, or all have ended. Waits for that.
  bool AwaitDecided(absl::Duration max_wait) const ABSL_LOCKS_EXCLUDED(mu_);
  // The error of a part that has failed first.
  absl::Status FirstError() const ABSL_LOCKS_EXCLUDED(mu_);
  void OnEnd(size_t part) ABSL_LOCKS_EXCLUDED(mu_);
  // Releases the weights now, and abandons all parts. From any thread.
  void ReleaseAndAbandon();
  void MakeStreamsWait(absl::Span<const GpuStream> streams);
  bool AwaitDone(absl::Duration max_wait) const ABSL_LOCKS_EXCLUDED(mu_);
  bool AwaitWhileReachable(absl::Duration max_wait, absl::FunctionRef<bool(absl::Duration)> await);
  // For AwaitWhileReachable(). Once the push is repeated, they are those of the repetition.
  int64_t ProgressCount() const;
  bool IsCutOff() const;
  bool ServersRespond(SteadyTime deadline, Interrupt* interrupt) const;

  std::string Name() const;

  const std::shared_ptr<GroupRun> run_;
  const PushArguments arguments_;
  const RejoinRun rejoin_;
  const bool has_gpu_weights_;
  Interrupt interrupt_;  // Ends the waits of this object's thread.
  SendSlots slots_;
  NewestRound round_;
  std::atomic<bool> streams_wait_ = false;  // See ServerPush::streams_wait_.

  mutable absl::Mutex mu_;
  mutable SteadyWait wait_;  // Woken when a part has ended, and when there is a result.
  size_t started_count_ ABSL_GUARDED_BY(mu_) = 0;
  size_t ended_count_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<size_t> failed_part_ ABSL_GUARDED_BY(mu_);  // The first one.
  // The weights may change: WaitReleased() or Abandon() was called.
  bool may_be_released_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<GroupPush> repeated_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::StatusOr<Version>> result_ ABSL_GUARDED_BY(mu_);

  // Constant after Create(). They use the members above, so they are destroyed first.
  std::vector<std::shared_ptr<ServerPush>> parts_;
  std::thread thread_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GROUP_GROUP_PUSH_H_
