// SPDX-License-Identifier: Apache-2.0
//
// A server's checkpoints and one small model, which can be started again on the same files.
#ifndef EMA_TESTS_CHECKPOINT_TEST_MANAGER_H_
#define EMA_TESTS_CHECKPOINT_TEST_MANAGER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "tests/core/test_model.h"

namespace ema {

inline constexpr char kTestFolder[] = "/data/models/m/checkpoints";

inline ModelConfig TwoTracks(int64_t max_pinned_versions = 1) {
  ModelConfig config;
  config.name = "m";
  config.manifest = MakeManifest({{"w", Dtype::kFloat32, {3}}});
  config.tracks = {{"ema", MakeSchedule("10ba")}, {"raw", MakeSchedule("copy")}};
  config.max_pinned_versions = max_pinned_versions;
  return config;
}

// One life of a server. Version n of its model comes of step 10 * n, and its raw weights are n. The
// manager's threads use the files only between a call that makes them do so and AwaitIdle().
class TestServer {
 public:
  explicit TestServer(FileSystem& files, CheckpointManager::Options options = {},
                      const ModelConfig& config = TwoTracks(),
                      absl::Time now = absl::FromUnixSeconds(1'760'000'000)) {
    options.store.data_dir = "/data";
    options.retry_delay = absl::Hours(1);
    options.log = [this](const LogEvent& event) {
      absl::MutexLock lock(&mu_);
      (event.level == LogLevel::kError ? errors_ : others_).push_back(ToText(event));
    };
    Start(files, std::move(options), config, now);
  }
  // The manager's threads before the models.
  ~TestServer() { manager_ = nullptr; }

  CheckpointManager& manager() { return *manager_; }
  ModelStore& models() { return *models_; }
  Model& model() { return *model_; }
  const std::shared_ptr<Model>& shared_model() { return model_; }
  int64_t version() const {
    return model_->history().latest().has_value() ? model_->history().latest()->number : 0;
  }
  // What was logged.
  std::vector<std::string> errors() {
    absl::MutexLock lock(&mu_);
    return errors_;
  }
  std::vector<std::string> others() {
    absl::MutexLock lock(&mu_);
    return others_;
  }

  // Opens a run, if none of this server's is open, and commits versions up to `version`, of steps
  // 10 more each.
  void PushTo(int64_t version) {
    int64_t step = model_->history().latest().has_value() ? model_->history().latest()->step : 0;
    while (this->version() < version) {
      step += 10;
      PushStep(step, static_cast<float>(this->version() + 1));
    }
  }
  void PushStep(int64_t step, float value) {
    if (rank_ == nullptr || rank_->run_epoch() != model_->Describe().run_epoch) {
      rank_ = std::make_unique<TestRank>(model_, absl::StrCat("launch ", ++launches_));
      ASSERT_THAT(rank_->Join(), IsOk());
    }
    ASSERT_THAT(rank_->Push(step, BytesOf({value, value, value})), IsOk());
  }
  std::string launch_id() const { return absl::StrCat("launch ", launches_); }

  // What the newest version's raw weights are.
  float RawValue() { return FloatsOf(*ReadAll(*model_, "raw"))[0]; }

  absl::StatusOr<Checkpoints::Saved> Save(int64_t version = 0, const std::string& label = "") {
    return manager_->Save(*model_, {.id = {version, 0}, .label = label});
  }
  // Versions of the checkpoints that are complete, newest first.
  std::vector<int64_t> Complete() {
    std::vector<int64_t> versions;
    const auto listing = manager_->List(*model_);
    EXPECT_THAT(listing, IsOk());
    for (const CheckpointInfo& info : listing->checkpoints) {
      if (info.state == CheckpointInfo::State::kComplete && !info.is_partial) {
        versions.push_back(info.id.version);
      }
    }
    return versions;
  }

 private:
  void Start(FileSystem& files, CheckpointManager::Options options, const ModelConfig& config,
             absl::Time now) {
    auto manager = CheckpointManager::Open(files, std::move(options), now);
    ASSERT_THAT(manager, IsOk());
    manager_ = *std::move(manager);
    ModelStore::Options store_options = SmallBlocks();
    store_options.model.incarnation = manager_->incarnation();
    store_options.model.on_commit = [this](const std::shared_ptr<Model>& model,
                                           const Snapshot& snapshot) {
      manager_->OnCommit(model, snapshot);
    };
    models_ = std::make_unique<ModelStore>(TestDevice(), store_options);
    ASSERT_THAT(manager_->LoadAll(*models_), IsOk());
    const auto created = models_->Create(config);
    ASSERT_THAT(created, IsOk());
    model_ = created->model;
  }

  absl::Mutex mu_;
  std::vector<std::string> errors_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> others_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<ModelStore> models_;
  std::shared_ptr<Model> model_;
  std::unique_ptr<TestRank> rank_;
  int launches_ = 0;
  std::unique_ptr<CheckpointManager> manager_;
};

}  // namespace ema

#endif  // EMA_TESTS_CHECKPOINT_TEST_MANAGER_H_
