// SPDX-License-Identifier: Apache-2.0
//
// The state that a run on one server and its pushes share: model, layout, epoch and plan.
#ifndef EMA_CLIENT_CPP_PUSH_RUN_CORE_H_
#define EMA_CLIENT_CPP_PUSH_RUN_CORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/gpu/pinned_ring.h"
#include "client/cpp/push/chunk_plan.h"
#include "client/cpp/push/group_part.h"
#include "client/cpp/push/opened_run.h"
#include "client/cpp/transport/connection_count.h"
#include "client/cpp/transport/interrupt.h"
#include "ema/client.h"
#include "server/base/steady_wait.h"

namespace ema::client_internal {

class ServerPush;

// One rank of one run, on one server. Thread-safe; shared by the Run and its pushes.
//
// It may be the part of a run that one server of a group has: then model, manifest and layout are
// those of the server's partition.
class RunCore final : public OpenedRun, public std::enable_shared_from_this<RunCore> {
 public:
  struct Group {
    std::shared_ptr<NewestRound> round;
    std::shared_ptr<RunCore> home;  // The home's part; null: this is it.
  };

  // Prepares to join a run; the caller calls Join() next. `info`: the reply to GetModel, or a
  // partition of it. `group`: null if the model is on one server. INVALID_ARGUMENT: bad options.
  static absl::StatusOr<std::shared_ptr<RunCore>> Create(std::shared_ptr<Client::Impl> client,
                                                         ModelInfo info, Client::RunOptions options,
                                                         const Group* group, SteadyTime deadline,
                                                         Interrupt* interrupt);
  // Calls OpenRun, and retries until it succeeds. Returns the missing ranks; none: the run is
  // ready. A part joins the run that the home's part has joined.
  absl::StatusOr<std::vector<int64_t>> Join(SteadyTime deadline, Interrupt* interrupt)
      ABSL_LOCKS_EXCLUDED(mu_);

  Client::Impl& client() const override { return *client_; }
  const std::string& model() const override { return info_.name; }
  const Manifest& manifest() const override { return info_.manifest; }
  const RankLayout& layout() const override { return layout_; }
  const ChunkPlan& chunks() const { return chunks_; }
  // Buffers for weights on GPUs; empty until a push has such weights.
  PinnedRing& ring() { return ring_; }
  // Allocates them, in a window if the server may read from it. Errors as PinnedRing::Allocate().
  absl::Status AllocateRing(Gpu& gpu);
  int64_t rank() const override { return options_.rank; }
  bool rejoins() const { return options_.rejoins; }
  int64_t imported_updates() const { return options_.imported_updates; }
  int64_t run_epoch() const override ABSL_LOCKS_EXCLUDED(mu_);
  std::optional<Version> latest() const override ABSL_LOCKS_EXCLUDED(mu_);
  RunPlan plan() const override ABSL_LOCKS_EXCLUDED(mu_);
  int64_t plan_revision() const ABSL_LOCKS_EXCLUDED(mu_);
  bool may_omit_frozen() const override ABSL_LOCKS_EXCLUDED(mu_);

  // True: all ranks have joined the run of that epoch.
  bool IsReady(int64_t run_epoch) const ABSL_LOCKS_EXCLUDED(mu_);
  // WaitReady() of a part waits for the home's part first.
  absl::Status WaitReady(SteadyTime deadline, Interrupt* interrupt) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status RefreshPlan(SteadyTime deadline, Interrupt* interrupt) override
      ABSL_LOCKS_EXCLUDED(mu_) {
    return Join(deadline, interrupt).status();
  }
  // Makes the next WaitReady() join again, because the server does not know the run (any more). The
  // home's part joins again, too.
  void MarkNotReady() ABSL_LOCKS_EXCLUDED(mu_);

  absl::StatusOr<PushProgress> QueryPush(int64_t step, bool abandon_if_unfinished,
                                         SteadyTime deadline, Interrupt* interrupt, bool retry,
                                         std::string_view skip_reason = {}) override;
  // The round in which the server has `step` open; 0: it has not. Tries once.
  absl::StatusOr<int64_t> FindRound(int64_t step, SteadyTime deadline, Interrupt* interrupt);
  // Drops a step that was pushed in `round` (0: the model is on one server, or the round is
  // unknown). Without `retry`, retries only while the server answers MODEL_BUSY, because the step
  // is committed and being published.
  absl::StatusOr<PushProgress> DropStep(int64_t step, int64_t round, SteadyTime deadline,
                                        Interrupt* interrupt, bool retry = false,
                                        std::string_view skip_reason = {});

  absl::StatusOr<std::shared_ptr<RunningPush>> MakePush(PushArguments arguments) override;
  // The same. `part`: null if the model is on one server.
  absl::StatusOr<std::shared_ptr<ServerPush>> MakePush(PushArguments arguments,
                                                       const GroupPart* part);
  // Records the round of a reply or an error, if it has one.
  void NoteRound(int64_t round) {
    if (group_.round != nullptr) group_.round->Note(round);
  }

  // OK: same-host lanes are offered, and take chunks of this size. Otherwise why there are none; if
  // the chunks are too large, because there were none when the run was opened.
  absl::Status FindLane(SteadyTime deadline, Interrupt* interrupt);
  // A same-host lane for one push.
  struct PushLane {
    std::unique_ptr<LanePipe> pipe;
    bool has_window = false;  // The server has mapped the window of ring().
  };
  struct PushLanes {
    std::vector<PushLane> lanes;  // Each has the window, or none has. Empty: use gRPC.
    absl::Status problem;         // Not OK: why there are no lanes, or no lanes with the window.
  };
  // Takes up to `count` lanes. REQUIRES: FindLane() is OK. `is_staged`: the chunks are in ring(),
  // so lanes with its window are preferred.
  PushLanes TakeLanes(int64_t count, bool is_staged, SteadyTime deadline, Interrupt* interrupt)
      ABSL_LOCKS_EXCLUDED(mu_);
  // To be called after a successful push. After a failed one drop the lane instead.
  void ReturnLane(PushLane lane) ABSL_LOCKS_EXCLUDED(mu_);

  // The number of connections or lanes that the next push should use. After the push, NoteSpeed()
  // records its speed, or NoteFewerConnections() that not all of them could be opened.
  int64_t connection_count() const ABSL_LOCKS_EXCLUDED(mu_);
  void NoteSpeed(double bytes_per_second) ABSL_LOCKS_EXCLUDED(mu_);
  void NoteFewerConnections() ABSL_LOCKS_EXCLUDED(mu_);

  // Records a version that this run has made in `run_epoch`, and the plan after it.
  void OnCommit(int64_t run_epoch, const Version& version, RunPlan plan) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<bool> IsDue(const TrainingTime& now) const override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  RunCore(std::shared_ptr<Client::Impl> client, ModelInfo info, Client::RunOptions options,
          Group group, RankLayout layout, int64_t chunk_bytes, absl::Status lane_status);

  v1::QueryPushRequest MakeQuery(int64_t step, bool abandon_if_unfinished) const;
  absl::StatusOr<PushProgress> FromResponse(const v1::QueryPushResponse& response);
  bool HasBeenReady() const ABSL_LOCKS_EXCLUDED(mu_);
  // Errors as Client::Impl::OpenWindowLane().
  absl::StatusOr<std::unique_ptr<LanePipe>> TakeWindowLane(SteadyTime deadline,
                                                           Interrupt* interrupt)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Adopts the content of a reply, unless a newer one has been adopted: one with a later version,
  // or with the same version and a later plan revision.
  void TakeLocked(std::optional<Version> latest, RunPlan plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::shared_ptr<Client::Impl> client_;
  const ModelInfo info_;
  const Client::RunOptions options_;
  const Group group_;  // Null pointers: the model is on one server.
  const RankLayout layout_;
  const ChunkPlan chunks_;
  PinnedRing ring_;
  // OK: when the run was opened, there was a same-host lane. Otherwise why there was none.
  const absl::Status lane_status_;

  mutable absl::Mutex mu_;
  int64_t run_epoch_ ABSL_GUARDED_BY(mu_) = 0;
  bool is_ready_ ABSL_GUARDED_BY(mu_) = false;
  // Never reset: the run may have changed the model since, so RunOptions::resume is not sent again.
  bool has_been_ready_ ABSL_GUARDED_BY(mu_) = false;
  // Not OK: a newer run took over. Permanent, because a restarted server would not know that, and
  // would let this run take over again.
  absl::Status fenced_ ABSL_GUARDED_BY(mu_);
  std::optional<Version> latest_ ABSL_GUARDED_BY(mu_);
  RunPlan plan_ ABSL_GUARDED_BY(mu_);
  ConnectionCount connection_count_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<LanePipe>> window_lanes_ ABSL_GUARDED_BY(mu_);  // The idle ones.
  // The server had no memory for the window, for the reason in `window_refusal_`; it is asked again
  // at this time.
  SteadyTime next_window_try_ ABSL_GUARDED_BY(mu_) = SteadyTime::min();
  absl::Status window_refusal_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_PUSH_RUN_CORE_H_
