// SPDX-License-Identifier: Apache-2.0
//
// One partition of a model, on this server.
#ifndef EMA_SERVER_GROUP_HOSTED_PARTITION_H_
#define EMA_SERVER_GROUP_HOSTED_PARTITION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ema/v1/ema_service.pb.h"
#include "server/base/log_event.h"
#include "server/base/steady_wait.h"
#include "server/core/commit_gate.h"
#include "server/core/model.h"
#include "server/group/member.h"
#include "server/group/messages.h"
#include "server/group/model_record.h"
#include "server/group/participant.h"
#include "server/group/peers.h"
#include "server/group/rounds.h"

namespace ema::group {

// Lets one partition of one incarnation of a model commit together with the others: it is the gate
// of the partition's Model, owns the Participant, and on the home the Rounds, and exchanges their
// messages with the other members.
//
// Thread-safe. Every event changes Participant and Rounds at once, under a lock that is never held
// across a call of the model. What follows from the change, such as publishing the prepared step,
// runs on the thread of Peers, in the order of the changes. The Model owns this object, so that it
// lives as long as the model's readers do.
class HostedPartition final : public CommitGate,
                              public std::enable_shared_from_this<HostedPartition> {
 public:
  struct Options {
    std::string model;
    PartitionId id;
    std::vector<Partition> partitions;  // Of the model's record.
    // The version that the incarnation begins with; nullopt: none.
    std::optional<VersionId> base;
    Peers* peers = nullptr;          // Outlives the calls of all functions.
    const Member* member = nullptr;  // Used until Stop().
    absl::Duration session_timeout = absl::Seconds(30);
    absl::Duration max_registry_outage = absl::Minutes(10);
    LogSink log;
  };
  explicit HostedPartition(Options options);

  const PartitionId& id() const { return options_.id; }
  const std::vector<Partition>& partitions() const { return options_.partitions; }

  // Begins the exchange of messages for `model`, whose gate this is. Once.
  void Start(const std::shared_ptr<Model>& model) ABSL_LOCKS_EXCLUDED(mu_);
  // The record of the model is ACTIVE, so all partitions have been reserved, and the model has the
  // base. May be repeated.
  void Activate() ABSL_LOCKS_EXCLUDED(mu_);
  bool is_active() const ABSL_LOCKS_EXCLUDED(mu_);
  // Records why the last attempt to load the base failed. CheckLoaded() of the home reports it
  // until Activate().
  void SetLoadError(const absl::Status& error) ABSL_LOCKS_EXCLUDED(mu_);
  // OK: there is no base, or this partition has loaded it. UNAVAILABLE, GROUP_DEGRADED.
  absl::Status CheckHasBase() const ABSL_LOCKS_EXCLUDED(mu_);
  // OK: there is no base, or all partitions have loaded it. UNAVAILABLE, GROUP_DEGRADED: names a
  // partition that has not. REQUIRES: is_home().
  absl::Status CheckLoaded() const ABSL_LOCKS_EXCLUDED(mu_);
  // What the home knows about the model. REQUIRES: is_home().
  v1::GroupModelProgress DescribeProgress() const ABSL_LOCKS_EXCLUDED(mu_);
  // For how long this partition has waited for its first round. Nullopt: that has begun.
  std::optional<absl::Duration> time_without_round() const ABSL_LOCKS_EXCLUDED(mu_);
  // How long steps that were prepared here have waited for their commits, all together.
  absl::Duration commit_wait() const ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the exchange of messages. When it returns, Options::member is not used any more.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

  // --- On the home, the messages of the partitions ---

  // Called once, from any thread.
  using Reply = std::function<void(const absl::StatusOr<GroupState>&)>;
  // Holds `reply` until the round has ended.
  void OnVote(const Vote& vote, Reply reply) ABSL_LOCKS_EXCLUDED(mu_);
  // ABORTED, FENCED.
  absl::StatusOr<GroupState> OnSync(const Sync& sync) ABSL_LOCKS_EXCLUDED(mu_);
  // The server of the partition `stopping` is about to stop: ends the open round, and permits no
  // pushes until that server has left, or for 20 minutes. When it returns, the last commit has been
  // published here. ABORTED, FENCED. REQUIRES: is_home(). Not on the thread of Peers.
  absl::Status RejectPushesForStop(const PartitionId& stopping) ABSL_LOCKS_EXCLUDED(mu_);
  // The same while the tensors move to other servers, until AcceptPushesAfterMove().
  absl::Status RejectPushesForMove() ABSL_LOCKS_EXCLUDED(mu_);
  void AcceptPushesAfterMove() ABSL_LOCKS_EXCLUDED(mu_);
  // Ends the open round, and permits no pushes in later ones: a partition that has prepared a step
  // would wait for this home for ever. Answers held calls before it returns, and later ones at
  // once. May be repeated.
  void ReleaseHeldCalls() ABSL_LOCKS_EXCLUDED(mu_);

  // On the home: all partitions have the change of the tracks with that number. It comes into force
  // at the next commit, or if `is_urgent` now, which ends the open round.
  void SetTracksRevision(int64_t revision, bool is_urgent) ABSL_LOCKS_EXCLUDED(mu_);

  // Applies a state that the home has sent.
  void OnState(const GroupState& state) ABSL_LOCKS_EXCLUDED(mu_);

  // --- CommitGate ---

  bool is_home() const override { return options_.id.partition == 0; }
  int64_t round() const override ABSL_LOCKS_EXCLUDED(mu_);
  int64_t tracks_revision() const override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckLaunch(const Launch& launch) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnRunOpened(int64_t run_epoch, std::string_view launch_id) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckPush(const PushStart& start) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status AbandonRound(int64_t round, int64_t step, const absl::Status& why) override
      ABSL_LOCKS_EXCLUDED(mu_);
  void OnPrepared(int64_t round, const Version& record) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnDropped(int64_t round, const absl::Status& why) override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Runs a member function on the thread of Peers, unless this object has been destroyed by then.
  void Post(void (HostedPartition::*function)());
  // On the thread of Peers, every kSyncInterval until Stop().
  void Tick() ABSL_LOCKS_EXCLUDED(mu_);
  // On the thread of Peers: sends a Sync to the home, or on the home applies it.
  void SendSync() ABSL_LOCKS_EXCLUDED(mu_);
  // What the partition is receiving.
  Sync Progress() const ABSL_LOCKS_EXCLUDED(mu_);
  void OnSyncEnded(const absl::StatusOr<v1::GroupState>& state) ABSL_LOCKS_EXCLUDED(mu_);
  // Makes the partition ask the home for its state soon.
  void RequestSyncLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Sends Participant::to_send(), unless it has been sent and may still be answered.
  void SendVoteLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void OnVoteEnded(int64_t round, const absl::StatusOr<v1::GroupState>& state)
      ABSL_LOCKS_EXCLUDED(mu_);
  // On the home: the next GroupState will name the versions that are pinned here now.
  void NoteHomePinnedVersions() ABSL_LOCKS_EXCLUDED(mu_);
  // `reply` null: the home's own partition.
  void HandleVoteLocked(const Vote& vote, Reply reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // On the home: applies the new state here, and sends it to the others.
  void EndRoundLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AnswerHeldLocked(const absl::StatusOr<GroupState>& answer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ApplyStateLocked(const GroupState& state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // On the thread of Peers: what Participant::OnState() has returned for the end of `round`.
  void Execute(const Participant::Action& action, int64_t round, const GroupState& state);

  // On the thread of Peers: a change of the tracks has come into force.
  void ApplyTracks() ABSL_LOCKS_EXCLUDED(mu_);

  std::shared_ptr<Model> model() const ABSL_LOCKS_EXCLUDED(mu_);
  std::string Name() const;  // "model \"m\", partition 2"
  absl::Status FencedErrorLocked(const std::string& why) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status BusyError(const std::string& why) const;
  absl::Status StoppingError(int64_t partition) const;
  absl::Status NotHomeErrorLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  std::optional<std::string> AddressLocked(size_t partition) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const Options options_;
  const SteadyTime start_ = SteadyNow();

  // Acquired while the model's lock may be held.
  mutable absl::Mutex mu_;
  std::weak_ptr<Model> model_ ABSL_GUARDED_BY(mu_);  // Set by Start().
  Participant participant_ ABSL_GUARDED_BY(mu_);
  std::optional<Rounds> rounds_ ABSL_GUARDED_BY(mu_);   // On the home.
  GroupState state_ ABSL_GUARDED_BY(mu_);               // The newest one.
  std::map<int64_t, Reply> held_ ABSL_GUARDED_BY(mu_);  // By partition: calls of OnVote().
  bool is_active_ ABSL_GUARDED_BY(mu_) = false;
  std::string loading_ ABSL_GUARDED_BY(mu_);     // Sync::loading.
  bool is_holding_ ABSL_GUARDED_BY(mu_) = true;  // False: votes are answered at once.
  bool is_stopped_ ABSL_GUARDED_BY(mu_) = false;
  bool is_sync_requested_ ABSL_GUARDED_BY(mu_) = false;
  bool is_sync_running_ ABSL_GUARDED_BY(mu_) = false;
  // Of the last push that was accepted. Round 0: there was none.
  int64_t pushed_round_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t pushed_step_ ABSL_GUARDED_BY(mu_) = 0;
  // The round whose Vote has been sent and not answered yet. 0: there is none.
  int64_t sent_vote_round_ ABSL_GUARDED_BY(mu_) = 0;
  SteadyTime prepare_time_ ABSL_GUARDED_BY(mu_);  // Of the prepared step.
  absl::Duration commit_wait_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_HOSTED_PARTITION_H_
