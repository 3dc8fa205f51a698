// SPDX-License-Identifier: Apache-2.0
//
// Makes copies of the models whose home this server is.
#ifndef EMA_SERVER_GROUP_COPY_MAKER_H_
#define EMA_SERVER_GROUP_COPY_MAKER_H_

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/base/steady_wait.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/core/model_store.h"
#include "server/group/copy_directory.h"
#include "server/group/fan_out.h"
#include "server/group/hosted_models.h"
#include "server/group/hosted_partition.h"
#include "server/group/model_record.h"
#include "server/group/part_copies.h"

namespace ema::group {

class GroupModels;

// At an interval, for each model whose home this server is and whose newest version is in no
// checkpoint and no copy: makes all partitions write copies of the version, then makes each fetch
// the copy of the partition before it, and then records the version in the registry. After an error
// the earlier copy remains. An error is logged unless the model's previous one was of the same
// kind.
//
// Works on a thread of its own. Thread-safe.
class CopyMaker {
 public:
  struct Options {
    absl::Duration interval;  // --copy-every. Positive.
    LogSink log;
  };
  // All outlive this.
  CopyMaker(GroupModels* models, HostedModels* hosted, ModelStore* store,
            CheckpointStore* checkpoints, PartCopies* copies, Options options)
      : models_(*models),
        hosted_(*hosted),
        store_(*store),
        checkpoints_(*checkpoints),
        copies_(*copies),
        options_(std::move(options)) {}
  ~CopyMaker() { Stop(); }

  // Begins the work. Call once.
  void Start();
  // Ends the work and its thread; the copy that is being made stays unfinished. REQUIRES:
  // PartCopies::Stop() was called.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until that time, or for Stop(): then true.
  bool MustStopBefore(SteadyTime time) ABSL_LOCKS_EXCLUDED(mu_);
  void CopyAll();
  // OK also if there is nothing to copy now.
  absl::Status Copy(const std::string& name);
  absl::Status CopyVersion(Model& home, const HostedPartition& partition, const ModelRecord& record,
                           const Snapshot& snapshot);
  // The responses of `calls`, or an error as FanOut::Wait(). CANCELLED: Stop() has been called.
  template <typename Response>
  absl::StatusOr<std::vector<Response>> Await(FanOut<Response>& calls);
  void ReportResult(const std::string& name, const absl::Status& status);

  GroupModels& models_;
  HostedModels& hosted_;
  ModelStore& store_;
  CheckpointStore& checkpoints_;
  PartCopies& copies_;
  const Options options_;

  std::map<std::string, absl::Status> errors_;  // By model, of the last try. Only on the thread.

  absl::Mutex mu_;
  SteadyWait wait_;  // Woken when `is_stopped_` changes.
  bool is_stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_COPY_MAKER_H_
