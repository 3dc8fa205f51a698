// SPDX-License-Identifier: Apache-2.0
#include "server/core/model_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"

namespace ema {

absl::Status DrainingError() {
  return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDraining,
                   "the server is shutting down");
}

absl::Status CheckSameModel(const ModelConfig& given, ModelConfig existing, const Model& model) {
  if (!existing.created_tracks.empty()) existing.tracks = existing.created_tracks;
  if (given.DifferenceFrom(existing).empty()) return absl::OkStatus();
  const Model::Description there = model.Describe();
  std::string difference;
  for (const std::vector<TrackRef>* const tracks : {&there.pending_tracks, &there.tracks}) {
    existing.tracks.clear();
    for (const TrackRef& track : *tracks) existing.tracks.push_back(track->config());
    difference = given.DifferenceFrom(existing);
    if (difference.empty()) return absl::OkStatus();
  }
  return MakeError(
      absl::StatusCode::kAlreadyExists, ErrorReason::kModelDiffers,
      absl::StrCat("model \"", given.name,
                   "\" exists and differs (here: this call, there: the server): ", difference));
}

ModelStore::ModelStore(std::shared_ptr<Device> device, const Options& options)
    : device_(std::move(device)),
      options_(options),
      budget_(std::make_shared<MemoryBudget>(options.memory_bytes)),
      host_budget_(options.host_memory_bytes > 0
                       ? std::make_shared<MemoryBudget>(options.host_memory_bytes, "the host's")
                       : budget_),
      sessions_(std::make_shared<ConcurrencyLimit>(options.max_sessions)),
      next_incarnation_(options.model.incarnation) {}

absl::StatusOr<std::shared_ptr<Model>> ModelStore::FindSameLocked(const ModelConfig& config) const {
  if (is_draining_) return DrainingError();
  if (deleting_.contains(config.name)) {
    return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                     absl::StrCat("model \"", config.name, "\" is being deleted"),
                     absl::Milliseconds(50));
  }
  if (auto it = models_.find(config.name); it != models_.end()) {
    EMA_RETURN_IF_ERROR(CheckSameModel(config, it->second->config(), *it->second));
    return it->second;
  }
  if (static_cast<int64_t>(models_.size()) >= options_.max_models) {
    return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyModels,
                     absl::StrCat("the server has ", models_.size(),
                                  " models, the maximum (--max-models); delete one first"),
                     absl::Seconds(10));  // A model may have been deleted by then.
  }
  return nullptr;
}

absl::StatusOr<ModelStore::CreateResult> ModelStore::Create(ModelConfig config, GlobBudget budget) {
  EMA_RETURN_IF_ERROR(config.Validate(budget));
  return CreateValid(std::move(config), options_.model);
}

absl::StatusOr<std::shared_ptr<Model>> ModelStore::CreatePartition(
    ModelConfig config, int64_t incarnation, std::shared_ptr<CommitGate> gate) {
  const std::string name = config.name;
  Model::Options model_options = options_.model;
  model_options.incarnation = incarnation;
  model_options.gate = std::move(gate);
  EMA_ASSIGN_OR_RETURN(CreateResult result,
                       CreateValid(std::move(config), std::move(model_options)));
  if (result.created) return std::move(result.model);
  return MakeError(absl::StatusCode::kAlreadyExists, ErrorReason::kModelDiffers,
                   absl::StrCat("model \"", name, "\" exists on this server"));
}

absl::StatusOr<ModelStore::CreateResult> ModelStore::CreateValid(ModelConfig config,
                                                                 Model::Options model_options) {
  {
    absl::MutexLock lock(&mu_);
    EMA_ASSIGN_OR_RETURN(std::shared_ptr<Model> same, FindSameLocked(config));
    if (same != nullptr) return CreateResult{std::move(same), false};
  }
  // Without the lock: this takes long where there are many tensors, tracks and rules.
  EMA_ASSIGN_OR_RETURN(const std::vector<std::shared_ptr<Track>> tracks,
                       MakeTracks(config.tracks, *config.manifest, *host_budget_));
  absl::MutexLock lock(&mu_);
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<Model> same, FindSameLocked(config));
  if (same != nullptr) return CreateResult{std::move(same), false};
  const std::string name = config.name;
  if (model_options.gate == nullptr) model_options.incarnation = next_incarnation_;
  model_options.host_budget = host_budget_;
  model_options.sessions = sessions_;
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<Model> model,
                       Model::Create(std::move(config), tracks, device_, budget_, model_options));
  next_incarnation_ = std::max(next_incarnation_, model_options.incarnation + 1);
  models_.emplace(name, model);
  options_.model.observer->OnModelCreated(name);
  return CreateResult{std::move(model), true};
}

absl::StatusOr<std::shared_ptr<Model>> ModelStore::Get(std::string_view name) const {
  absl::MutexLock lock(&mu_);
  if (auto it = models_.find(name); it != models_.end()) return it->second;
  EMA_RETURN_IF_ERROR(ValidateName("model", name));
  return MakeError(absl::StatusCode::kNotFound, ErrorReason::kModelNotFound,
                   absl::StrCat("model \"", std::string(name), "\" does not exist"));
}

std::vector<std::shared_ptr<Model>> ModelStore::List() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<Model>> models;
  models.reserve(models_.size());
  for (const auto& [name, model] : models_) models.push_back(model);
  return models;
}

bool ModelStore::Delete(std::string_view name) {
  return Drop(name, MakeError(absl::StatusCode::kNotFound, ErrorReason::kModelNotFound,
                              absl::StrCat("model \"", std::string(name), "\" has been deleted")));
}

bool ModelStore::Drop(std::string_view name, const absl::Status& status) {
  std::shared_ptr<Model> model;
  Model::Description
      last;  // Destroyed without the lock: it may hold the last reference to a track.
  {
    absl::MutexLock lock(&mu_);
    auto it = models_.find(name);
    if (it == models_.end()) return false;
    model = std::move(it->second);
    models_.erase(it);
    options_.model.observer->OnModelDeleted(name);
    // One of the same name repeats none of its run epochs either.
    model->StopAcceptingWork(status);
    last = model->Describe();
    next_incarnation_ = std::max(next_incarnation_, last.run_epoch + 1);
  }
  model->Close(status);
  return true;
}

absl::Status ModelStore::DeleteAndForget(std::string_view name,
                                         absl::FunctionRef<absl::Status()> forget) {
  {
    absl::MutexLock lock(&mu_);
    deleting_.emplace(name);
  }
  Delete(name);
  absl::Status status = CatchExceptions(forget);
  absl::MutexLock lock(&mu_);
  deleting_.erase(deleting_.find(name));
  return status;
}

void ModelStore::ExpireSessions(SteadyTime now, SteadyTime::duration timeout) {
  for (const std::shared_ptr<Model>& model : List()) {
    model->ExpireSession(now, timeout);
    model->attached_files().ExpireUnfinished(now, timeout);
  }
}

void ModelStore::Drain(SteadyTime deadline) {
  {
    absl::MutexLock lock(&mu_);
    is_draining_ = true;
  }
  const std::vector<std::shared_ptr<Model>> models = List();
  for (const std::shared_ptr<Model>& model : models) model->StopAcceptingWork(DrainingError());
  for (const std::shared_ptr<Model>& model : models) model->Drain(DrainingError(), deadline);
}

void ModelStore::Close() {
  for (const std::shared_ptr<Model>& model : List()) model->Close(DrainingError());
}

}  // namespace ema
