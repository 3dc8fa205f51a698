// SPDX-License-Identifier: Apache-2.0
//
// What a run and its pushes share: the model, the layout, the epoch, and where the tracks stand.
#ifndef EMA_CLIENT_CPP_RUN_CORE_H_
#define EMA_CLIENT_CPP_RUN_CORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/chunk_plan.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/interrupt.h"
#include "ema/client.h"

namespace ema::client_internal {

// One rank of one run. Thread-safe; shared by the Run and its pushes.
class RunCore {
 public:
  // Joins. Errors of GetModel and OpenRun.
  static absl::StatusOr<std::shared_ptr<RunCore>> Open(std::shared_ptr<Client::Impl> client,
                                                       std::string_view model,
                                                       Client::RunOptions options,
                                                       absl::Time deadline, Interrupt* interrupt);

  Client::Impl& client() const { return *client_; }
  const std::string& model() const { return info_.name; }
  const Manifest& manifest() const { return info_.manifest; }
  const RankLayout& layout() const { return layout_; }
  const ChunkPlan& chunks() const { return chunks_; }
  int64_t rank() const { return options_.rank; }
  bool rejoins() const { return options_.rejoins; }
  int64_t run_epoch() const ABSL_LOCKS_EXCLUDED(mu_);
  std::optional<Version> latest() const ABSL_LOCKS_EXCLUDED(mu_);

  // Returns when all ranks have joined. Joins again first if Rejoin() was called. DEADLINE_EXCEEDED
  // names missing ranks.
  absl::Status WaitReady(absl::Time deadline, Interrupt* interrupt) ABSL_LOCKS_EXCLUDED(mu_);
  // Makes the next WaitReady() ask the server: it does not know the run (any more).
  void Rejoin() ABSL_LOCKS_EXCLUDED(mu_);

  // With `retry`, as Client's other calls; else one try.
  absl::StatusOr<PushProgress> QueryPush(int64_t step, bool abandon_if_unfinished,
                                         absl::Time deadline, Interrupt* interrupt, bool retry);

  // Notes a version that this run has made.
  void OnCommit(const Version& version) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<bool> IsDue(const TrainingTime& now) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  RunCore(std::shared_ptr<Client::Impl> client, ModelInfo info, Client::RunOptions options,
          RankLayout layout);

  // Calls OpenRun once, with retries. The ranks that are missing; none: ready.
  absl::StatusOr<std::vector<int64_t>> Join(absl::Time deadline, Interrupt* interrupt)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Where the tracks stand at `latest`.
  absl::StatusOr<std::vector<std::optional<Schedule::State>>> LoadTrackStates(
      const Version& latest, absl::Time deadline, Interrupt* interrupt) const;
  // Takes over what `version` says of the tracks that it updated.
  void ApplyRecord(const Version& version,
                   std::vector<std::optional<Schedule::State>>& states) const;

  const std::shared_ptr<Client::Impl> client_;
  const ModelInfo info_;
  const Client::RunOptions options_;
  const RankLayout layout_;
  const ChunkPlan chunks_;

  mutable absl::Mutex mu_;
  int64_t run_epoch_ ABSL_GUARDED_BY(mu_) = 0;
  bool ready_ ABSL_GUARDED_BY(mu_) = false;
  // Not OK: a newer run took over. For good: a restarted server would not know, and let this one
  // take over again.
  absl::Status fenced_ ABSL_GUARDED_BY(mu_);
  std::optional<Version> latest_ ABSL_GUARDED_BY(mu_);
  // As info_.tracks. Absent: not known, so the track counts as due.
  std::vector<std::optional<Schedule::State>> states_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_RUN_CORE_H_
