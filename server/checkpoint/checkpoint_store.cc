// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_store.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "ema/internal/status_macros.h"

namespace ema {

absl::StatusOr<std::unique_ptr<CheckpointStore>> CheckpointStore::Open(FileSystem& file_system,
                                                                       const Options& options,
                                                                       absl::Time now) {
  if (options.data_dir.empty() || options.keep_count < 1 || options.max_file_bytes < 1) {
    return absl::InvalidArgumentError(
        "a data directory, and a keep_count and max_file_bytes of 1 or more, are needed");
  }
  std::unique_ptr<CheckpointStore> store(new CheckpointStore(options));
  EMA_ASSIGN_OR_RETURN(store->data_, DataDirectory::Open(file_system, options.data_dir, options.log,
                                                         now, options.member));
  return store;
}

CheckpointFolder& CheckpointStore::FolderOf(std::string_view model_name) {
  absl::MutexLock lock(&mu_);
  std::unique_ptr<CheckpointFolder>& folder = folders_[std::string(model_name)];
  if (folder == nullptr) folder = std::make_unique<CheckpointFolder>(*data_, options_, model_name);
  return *folder;
}

absl::StatusOr<LoadReport> CheckpointStore::LoadAll(ModelStore& models) {
  LoadReport report;
  EMA_ASSIGN_OR_RETURN(const std::vector<std::string> names, data_->ModelNames());
  for (const std::string& name : names) {
    EMA_RETURN_IF_ERROR(LoadModel(*data_, FolderOf(name), models, report));
  }
  absl::MutexLock lock(&mu_);
  creation_errors_.insert(report.all_corrupt.begin(), report.all_corrupt.end());
  return report;
}

absl::Status CheckpointStore::CheckMayCreate(std::string_view model_name) const {
  absl::MutexLock lock(&mu_);
  const auto it = creation_errors_.find(model_name);
  return it != creation_errors_.end() ? it->second : absl::OkStatus();
}

absl::Status CheckpointStore::DeleteModel(std::string_view model_name) {
  EMA_RETURN_IF_ERROR(FolderOf(model_name).SetAsideAll());
  absl::MutexLock lock(&mu_);
  if (const auto it = creation_errors_.find(model_name); it != creation_errors_.end()) {
    creation_errors_.erase(it);
  }
  return absl::OkStatus();
}

std::map<std::string, CheckpointCounts> CheckpointStore::CountAll() const {
  std::map<std::string, CheckpointCounts> all;
  absl::MutexLock lock(&mu_);
  for (const auto& [model, folder] : folders_) {
    if (const std::optional<CheckpointCounts> counts = folder->Count()) all[model] = *counts;
  }
  return all;
}

bool CheckpointStore::is_saving() const {
  absl::MutexLock lock(&mu_);
  return std::any_of(folders_.begin(), folders_.end(),
                     [](const auto& entry) { return entry.second->is_saving(); });
}

}  // namespace ema
