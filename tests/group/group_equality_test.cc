// SPDX-License-Identifier: Apache-2.0
//
// The same training on one server and on groups of whole servers that meet in etcd.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/client.h"
#include "ema/internal/status_macros.h"
#include "ema/shard.h"
#include "server/server.h"
#include "server/wire/convert_types.h"
#include "tests/checkpoint/test_checkpoints.h"
#include "tests/testutil/etcd_cluster.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(100);
constexpr int64_t kRanks = 2;
constexpr int64_t kSteps = 6;
constexpr int64_t kSavedStep = 5;

// A version without what differs between two trainings: the numbers of its incarnation and its run,
// and the time of its commit.
struct Content {
  std::string record;
  std::map<std::string, std::string> tensors;  // The bytes, by "track/tensor".
};

ModelConfig TrainedModel() {
  ModelConfig config = EveryKindOfModel("m");
  std::vector<TensorSpec> tensors = EveryKindOfTensor();
  for (int i = 0; i < 8; ++i) {
    tensors.push_back({.name = absl::StrCat("layer", i), .shape = {50, 10 + i}});
  }
  config.manifest = MakeManifest(std::move(tensors));
  return config;
}

absl::StatusOr<Content> Read(Client& client, const ModelConfig& model) {
  Content content;
  for (const TrackConfig& track : model.tracks) {
    std::string bytes;
    const auto target = [&](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
      bytes.resize(info.total_bytes);
      return std::as_writable_bytes(std::span(bytes.data(), bytes.size()));
    };
    EMA_ASSIGN_OR_RETURN(PullInfo info, client.Pull(model.name, track.name, {}, target, kPatience));
    for (const PulledTensor& tensor : info.tensors) {
      content.tensors[absl::StrCat(track.name, "/", tensor.spec.name)] =
          bytes.substr(tensor.offset, tensor.length_bytes);
    }
    info.version.incarnation = 0;
    info.version.run_epoch = 0;
    info.version.commit_time = absl::UnixEpoch();
    const std::string record = ToProto(info.version).DebugString();
    if (content.record.empty()) content.record = record;
    EXPECT_EQ(record, content.record) << track.name;
  }
  return content;
}

// One rank, which pushes every other tensor.
class Trainer {
 public:
  static absl::StatusOr<Trainer> Open(Client& client, const ModelConfig& model, int64_t rank) {
    Trainer trainer;
    trainer.model_ = model;
    trainer.rank_ = rank;
    std::vector<Shard> shards;
    for (int64_t i = rank; i < model.manifest->tensor_count(); i += kRanks) {
      shards.push_back(WholeTensor(*model.manifest, i));
    }
    EMA_ASSIGN_OR_RETURN(
        trainer.run_,
        client.OpenRun(
            model.name,
            {.launch_id = "life", .rank = rank, .world_size = kRanks, .shards = std::move(shards)},
            kPatience));
    return trainer;
  }

  // `weights`: of the whole model; valid until the push has ended.
  absl::StatusOr<std::unique_ptr<PendingPush>> StartPush(
      int64_t step, const std::vector<std::byte>& weights) const {
    std::vector<std::span<const std::byte>> shards;
    size_t offset = 0;
    for (int64_t i = 0; i < model_.manifest->tensor_count(); ++i) {
      const TensorSpec& tensor = model_.manifest->tensor(i);
      const auto bytes = static_cast<size_t>(tensor.element_count() * DtypeSize(tensor.dtype));
      if (i % kRanks == rank_) shards.push_back(std::span(weights).subspan(offset, bytes));
      offset += bytes;
    }
    return run_->StartPush(step, TrainingTime::AtBatch(10 * step), shards, kPatience);
  }

 private:
  ModelConfig model_;
  int64_t rank_ = 0;
  std::unique_ptr<ema::Run> run_;
};

class GroupEqualityTest : public testing::Test {
 protected:
  GroupEqualityTest() : folder_(testing::TempDir() + "/ema_equality_XXXXXX") {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
  }
  ~GroupEqualityTest() override { std::filesystem::remove_all(folder_); }

  // `member_count` 0: one server in no group.
  absl::StatusOr<std::vector<std::unique_ptr<Server>>> StartServers(
      int member_count, const std::string& directory) const {
    std::vector<std::unique_ptr<Server>> servers;
    for (int i = 0; i < std::max(member_count, 1); ++i) {
      ServerOptions options;
      options.listen = {"127.0.0.1:0"};
      options.thread_count = 1;
      options.memory_bytes = int64_t{1} << 28;
      options.data_dir = directory;
      if (member_count > 0) {
        options.group = absl::StrCat("g", member_count);
        options.member = absl::StrCat("ema-", i);
        options.advertise = "127.0.0.1:0";
        options.etcd = {etcd_->endpoints()};
      }
      EMA_ASSIGN_OR_RETURN(auto server, Server::Start(options));
      servers.push_back(std::move(server));
    }
    return servers;
  }
  // The last server knows all members.
  static absl::StatusOr<std::unique_ptr<Client>> ClientOf(
      const std::vector<std::unique_ptr<Server>>& servers) {
    return Client::Create(absl::StrCat("127.0.0.1:", servers.back()->port()));
  }

  // Trains the model, and returns every version.
  static absl::StatusOr<std::vector<Content>> Train(Client& client) {
    const ModelConfig model = TrainedModel();
    EMA_RETURN_IF_ERROR(client
                            .CreateModel(model.name, *model.manifest, model.tracks,
                                         {.max_pinned_versions = model.max_pinned_versions,
                                          .non_finite = NonFinitePolicy::kSkipTensor},
                                         kPatience)
                            .status());
    std::vector<Trainer> trainers;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      EMA_ASSIGN_OR_RETURN(Trainer trainer, Trainer::Open(client, model, rank));
      trainers.push_back(std::move(trainer));
    }
    std::vector<Content> versions;
    for (int64_t step = 1; step <= kSteps; ++step) {
      std::vector<std::byte> weights = RandomWeights(*model.manifest, static_cast<uint32_t>(step));
      if (step == 4) {  // The version skips the last tensor.
        const float nan = std::numeric_limits<float>::quiet_NaN();
        std::memcpy(&weights[weights.size() - sizeof(nan)], &nan, sizeof(nan));
      }
      std::vector<std::unique_ptr<PendingPush>> pushes;
      for (const Trainer& trainer : trainers) {
        EMA_ASSIGN_OR_RETURN(auto push, trainer.StartPush(step, weights));
        pushes.push_back(std::move(push));
      }
      for (const auto& push : pushes) EMA_RETURN_IF_ERROR(push->Wait().status());
      EMA_ASSIGN_OR_RETURN(Content content, Read(client, model));
      versions.push_back(std::move(content));
      if (step == kSavedStep) {
        EMA_RETURN_IF_ERROR(client.CreateCheckpoint(model.name, kPatience).status());
      }
    }
    return versions;
  }

  // The number of files that have the track "raw" of the checkpoints in `directory`.
  static int64_t CountFiles(const std::string& directory) {
    int64_t count = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
      const std::filesystem::path& path = entry.path();
      count += path.extension() == ".safetensors" && path.parent_path().filename() == "raw" ? 1 : 0;
    }
    return count;
  }
  static void ExpectSame(const Content& content, const Content& expected) {
    EXPECT_EQ(content.record, expected.record);
    ASSERT_EQ(content.tensors.size(), expected.tensors.size());
    for (const auto& [name, bytes] : expected.tensors) {
      EXPECT_TRUE(content.tensors.at(name) == bytes) << name;
    }
  }

  std::string folder_;
  const std::unique_ptr<EtcdCluster> etcd_ = *EtcdCluster::Start({});
};

TEST_F(GroupEqualityTest, VersionsAndCheckpointsDoNotDependOnTheNumberOfServers) {
  std::vector<Content> expected;
  for (const int member_count : {0, 1, 2, 3, 7}) {
    SCOPED_TRACE(absl::StrCat(member_count, " members"));
    const std::string directory = absl::StrCat(folder_, "/of-", member_count);
    EMA_ASSERT_OK_AND_ASSIGN(auto servers, StartServers(member_count, directory));
    EMA_ASSERT_OK_AND_ASSIGN(const auto client, ClientOf(servers));
    EMA_ASSERT_OK_AND_ASSIGN(const std::vector<Content> versions, Train(*client));
    ASSERT_EQ(versions.size(), kSteps);
    if (expected.empty()) expected = versions;
    for (int64_t i = 0; i < kSteps; ++i) {
      SCOPED_TRACE(absl::StrCat("version ", i + 1));
      ExpectSame(versions[i], expected[i]);
    }
    // Its checkpoint, as one server loads it.
    const std::string copy = directory + "-copy";
    std::filesystem::create_directory(copy);
    std::filesystem::copy(directory + "/models", copy + "/models",
                          std::filesystem::copy_options::recursive);
    EXPECT_EQ(CountFiles(copy), std::max(member_count, 1));  // Each server has written a part.
    EMA_ASSERT_OK_AND_ASSIGN(const auto reader, StartServers(0, copy));
    EMA_ASSERT_OK_AND_ASSIGN(const auto reading_client, ClientOf(reader));
    EMA_ASSERT_OK_AND_ASSIGN(const Content saved, Read(*reading_client, TrainedModel()));
    ExpectSame(saved, expected[kSavedStep - 1]);
  }
}

}  // namespace
}  // namespace ema
