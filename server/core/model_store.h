// SPDX-License-Identifier: Apache-2.0
//
// All models of one server.
#ifndef EMA_SERVER_CORE_MODEL_STORE_H_
#define EMA_SERVER_CORE_MODEL_STORE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/base/steady_wait.h"
#include "server/core/memory_budget.h"
#include "server/core/model.h"
#include "server/device/device.h"

namespace ema {

// The error for new work on a draining server: UNAVAILABLE, DRAINING.
absl::Status DrainingError();

// OK: `given` equals `existing`, the config of `model` or of the whole model of which it is a
// partition, with the tracks of its creation, its current ones or the pending ones: a restarted
// trainer may give any of these. ALREADY_EXISTS, MODEL_DIFFERS.
absl::Status CheckSameModel(const ModelConfig& given, ModelConfig existing, const Model& model);

// Thread-safe. A deleted model exists until its last holder has released it.
class ModelStore {
 public:
  struct Options {
    int64_t memory_bytes = 0;  // For all models together.
    // Size of Model::Options::host_budget, for all models together. 0: it is part of
    // `memory_bytes`.
    int64_t host_memory_bytes = 0;
    int64_t max_models = 64;
    int64_t max_sessions = 64;  // Steps that are pushed at once, over all models.
    // `incarnation` is the first model's; later models get larger ones. The store sets `sessions`
    // and `host_budget`.
    Model::Options model;
  };

  ModelStore(std::shared_ptr<Device> device, const Options& options);

  struct CreateResult {
    std::shared_ptr<Model> model;
    bool created = false;
  };
  // Finds or creates a model, as CreateModel in ema_service.proto. UNAVAILABLE, MODEL_BUSY: a
  // model of that name is being deleted. `budget`: see ModelConfig::Validate().
  absl::StatusOr<CreateResult> Create(ModelConfig config, GlobBudget budget = {})
      ABSL_LOCKS_EXCLUDED(mu_);
  // Creates one partition of a whole model, whose incarnation is given. `config`: the whole
  // model's, with the manifest of the partition. REQUIRES: the whole model's config has been
  // validated. It is not validated here, because a rule may match no tensor of this partition.
  // ALREADY_EXISTS: a model has that name.
  absl::StatusOr<std::shared_ptr<Model>> CreatePartition(ModelConfig config, int64_t incarnation,
                                                         std::shared_ptr<CommitGate> gate)
      ABSL_LOCKS_EXCLUDED(mu_);
  // NOT_FOUND, MODEL_NOT_FOUND.
  absl::StatusOr<std::shared_ptr<Model>> Get(std::string_view name) const ABSL_LOCKS_EXCLUDED(mu_);
  // All models, sorted by name.
  std::vector<std::shared_ptr<Model>> List() const ABSL_LOCKS_EXCLUDED(mu_);
  // Closes and removes the model. Its memory is freed when the last reader releases it. False:
  // there was no such model.
  bool Delete(std::string_view name) ABSL_LOCKS_EXCLUDED(mu_);
  // As Delete(), but readers and writers of the model get `status` as their error. For a model that
  // continues in another Model object.
  bool Drop(std::string_view name, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  // Calls Delete(), and then `forget`, which may block, also if there was no such model. Until that
  // returns, no model of that name can be created. Returns the status of `forget`.
  absl::Status DeleteAndForget(std::string_view name, absl::FunctionRef<absl::Status()> forget)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Expires the sessions of all models. Called every second or so.
  void ExpireSessions(SteadyTime now, SteadyTime::duration timeout) ABSL_LOCKS_EXCLUDED(mu_);
  // Refuses new models, runs and sessions with UNAVAILABLE, DRAINING; waits for the open sessions
  // until `deadline`, then ends them. Readers continue.
  void Drain(SteadyTime deadline) ABSL_LOCKS_EXCLUDED(mu_);
  // Closes all models with UNAVAILABLE, DRAINING. REQUIRES: Drain() has returned.
  void Close() ABSL_LOCKS_EXCLUDED(mu_);

  int64_t max_models() const { return options_.max_models; }
  const ConcurrencyLimit& sessions() const { return *sessions_; }
  const MemoryBudget& budget() const { return *budget_; }
  Device& device() const { return *device_; }

 private:
  // The existing model that matches `config`; null: a new one can be made. Errors as Create().
  absl::StatusOr<std::shared_ptr<Model>> FindSameLocked(const ModelConfig& config) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Creates a model with a valid config, or finds it.
  absl::StatusOr<CreateResult> CreateValid(ModelConfig config, Model::Options options)
      ABSL_LOCKS_EXCLUDED(mu_);

  const std::shared_ptr<Device> device_;
  const Options options_;
  const std::shared_ptr<MemoryBudget> budget_;
  const std::shared_ptr<MemoryBudget> host_budget_;
  const std::shared_ptr<ConcurrencyLimit> sessions_;

  mutable absl::Mutex mu_;
  std::map<std::string, std::shared_ptr<Model>, std::less<>> models_ ABSL_GUARDED_BY(mu_);
  std::multiset<std::string, std::less<>> deleting_ ABSL_GUARDED_BY(mu_);
  int64_t next_incarnation_ ABSL_GUARDED_BY(mu_);
  bool is_draining_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_MODEL_STORE_H_
