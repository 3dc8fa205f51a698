// SPDX-License-Identifier: Apache-2.0
//
// The checkpoints of all models of a server.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/checkpoint/checkpoint_folder.h"
#include "server/checkpoint/checkpoint_load.h"
#include "server/checkpoint/data_directory.h"
#include "server/core/checkpoint_counts.h"
#include "server/core/model_store.h"
#include "server/format/file_system.h"

namespace ema {

// A data directory with one CheckpointFolder for each model's name that has been asked for.
//
// Thread-safe.
class CheckpointStore {
 public:
  using Options = CheckpointStoreOptions;

  // INVALID_ARGUMENT: bad options. Otherwise like DataDirectory::Open().
  static absl::StatusOr<std::unique_ptr<CheckpointStore>> Open(FileSystem& file_system,
                                                               const Options& options,
                                                               absl::Time now = absl::Now());

  DataDirectory& data() { return *data_; }

  // Lives as long as the store. Never blocks.
  CheckpointFolder& FolderOf(std::string_view model_name) ABSL_LOCKS_EXCLUDED(mu_);

  // LoadModel() for every model in the directory; the models loaded before an error stay in
  // `models`. The next epoch of each is above all earlier ones. To be called once, before `models`
  // is served.
  absl::StatusOr<LoadReport> LoadAll(ModelStore& models) ABSL_LOCKS_EXCLUDED(mu_);

  // Whether a model of that name may be created: a new average must not silently replace a lost
  // one. Never blocks. FAILED_PRECONDITION, ALL_CHECKPOINTS_CORRUPT: LoadAll() found checkpoints of
  // the model and no good one, and DeleteModel() has not succeeded since.
  absl::Status CheckMayCreate(std::string_view model_name) const ABSL_LOCKS_EXCLUDED(mu_);
  // CheckpointFolder::SetAsideAll(); if it succeeds, the name may be used again.
  absl::Status DeleteModel(std::string_view model_name) ABSL_LOCKS_EXCLUDED(mu_);

  // How many checkpoints of each kind each model has; without models that have none. Never blocks.
  std::map<std::string, CheckpointCounts> CountAll() const ABSL_LOCKS_EXCLUDED(mu_);
  // A hint: a save is running.
  bool is_saving() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  explicit CheckpointStore(const Options& options) : options_(options) {}

  const Options options_;
  std::unique_ptr<DataDirectory> data_;  // Constant after Open().

  mutable absl::Mutex mu_;  // Never held across a call that may block.
  std::map<std::string, std::unique_ptr<CheckpointFolder>, std::less<>> folders_
      ABSL_GUARDED_BY(mu_);
  std::map<std::string, absl::Status, std::less<>> creation_errors_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_STORE_H_
