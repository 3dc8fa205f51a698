// SPDX-License-Identifier: Apache-2.0
//
// Replaces servers of the group that do not come back.
#ifndef EMA_SERVER_GROUP_REPLACER_H_
#define EMA_SERVER_GROUP_REPLACER_H_

#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/group/hosted_models.h"
#include "server/group/member.h"
#include "server/group/missing_timer.h"
#include "server/group/model_record.h"
#include "server/group/retried_work.h"

namespace ema::group {

class GroupModels;

// Moves the tensors of processes that have been missing in the registry for longer than a limit to
// the other members, as `emactl group replace` does. Every server of the group does this, whether
// or not it has a partition of the model; the first one to replace the model's record wins, and the
// others find that it has changed. A process that is back before that keeps its partitions.
//
// Thread-safe. Works on a thread of its own: once a second while a process is missing.
// A model that could not be moved is tried again after 10 s.
class Replacer {
 public:
  struct Options {
    absl::Duration replace_after;            // --replace-after. Positive.
    CheckpointStore* checkpoints = nullptr;  // Outlives this. Not null.
    LogSink log;
  };
  // `models` and `hosted` outlive this.
  Replacer(GroupModels* models, HostedModels* hosted, Options options)
      : models_(*models),
        hosted_(*hosted),
        options_(std::move(options)),
        timer_(options_.replace_after) {}

  // To be called after a change of the registry.
  void Wake() { work_.Wake(); }
  // Waits for a running replacement; none begins any more.
  void Stop() { work_.Stop(); }

 private:
  using LostProcesses = std::map<MissingTimer::Process, absl::Duration>;

  // UNAVAILABLE: a process is missing, so this must be called again.
  absl::Status Run();
  // Moves the tensors that `record` has on the lost processes, if there are any.
  void ReplaceIn(const std::string& model, const ModelRecord& record, const LostProcesses& lost);

  GroupModels& models_;
  HostedModels& hosted_;
  const Options options_;

  // Only on the thread.
  MissingTimer timer_;
  // A failed move of a model's tensors.
  struct Failure {
    absl::StatusCode code;  // The one that the last warning names.
    SteadyTime next_try;
  };
  std::map<std::string, Failure> failures_;  // By model.

  // Its thread uses all of the above.
  RetriedWork work_{[this] { return Run(); }, /*longest_delay=*/absl::Seconds(1)};
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_REPLACER_H_
