// SPDX-License-Identifier: Apache-2.0
//
// Whether a model may be created whose checkpoints are all corrupt, or which has none.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/checkpoint/test_manager.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

// A server that has loaded what is on the disk, and creates no model by itself.
class StartedServer {
 public:
  explicit StartedServer(FileSystem& files) : models_(TestDevice(), SmallBlocks()) {
    CheckpointManager::Options options;
    options.store.data_dir = "/data";
    options.log = [this](const LogEvent& event) {
      absl::MutexLock lock(&mu_);
      if (event.level == LogLevel::kError) errors_.push_back(ToText(event));
    };
    auto manager =
        CheckpointManager::Open(files, std::move(options), absl::FromUnixSeconds(1'760'000'000));
    EXPECT_THAT(manager, IsOk());
    manager_ = *std::move(manager);
    EXPECT_THAT(manager_->LoadAll(models_), IsOk());
  }

  CheckpointManager& manager() { return *manager_; }
  bool HasModel() { return models_.Get("m").ok(); }
  absl::Status CheckMayCreate() { return manager_->CheckMayCreate("m"); }
  std::vector<std::string> errors() {
    absl::MutexLock lock(&mu_);
    return errors_;
  }

 private:
  absl::Mutex mu_;
  std::vector<std::string> errors_ ABSL_GUARDED_BY(mu_);
  ModelStore models_;
  std::unique_ptr<CheckpointManager> manager_;
};

class AllCorruptTest : public testing::Test {
 protected:
  // Saves versions 1 to `count`, of steps 10, 20 and so on. Returns the checkpoints' names.
  std::vector<std::string> SaveVersions(int64_t count) {
    TestServer server(files_);
    std::vector<std::string> names;
    for (int64_t version = 1; version <= count; ++version) {
      server.PushTo(version);
      const absl::StatusOr<Checkpoints::Saved> saved = server.Save();
      EXPECT_THAT(saved, IsOk());
      names.push_back(saved->name);
    }
    return names;
  }
  static std::string PathOf(const std::string& name) {
    return absl::StrCat(kTestFolder, "/", name);
  }
  void Corrupt(const std::string& name) {
    files_.FileBytes(PathOf(name) + "/tracks/raw/model.safetensors").back() ^= 1;
  }

  FakeFileSystem files_;
};

auto IsRefused() {
  return AllOf(ReasonIs(ErrorReason::kAllCheckpointsCorrupt),
               StatusIs(absl::StatusCode::kFailedPrecondition, StartsWith("model \"m\": ")));
}

TEST_F(AllCorruptTest, EveryStartRefusesTheModelUntilItIsDeleted) {
  Corrupt(SaveVersions(1)[0]);
  for (int start = 0; start < 3; ++start) {
    StartedServer server(files_);
    EXPECT_FALSE(server.HasModel());
    EXPECT_THAT(server.CheckMayCreate(), IsRefused());
    EXPECT_THAT(server.manager().CheckMayCreate("another"), IsOk());
    EXPECT_THAT(server.errors(), Contains(HasSubstr("model not loaded model=m")));
    if (start < 2) continue;
    EXPECT_THAT(server.manager().SetAsideAll("m"), IsOk());
    EXPECT_THAT(server.CheckMayCreate(), IsOk());
  }
  StartedServer server(files_);
  EXPECT_THAT(server.CheckMayCreate(), IsOk());
  EXPECT_THAT(server.errors(), IsEmpty());
}

TEST_F(AllCorruptTest, DeletionSetsTheCorruptCheckpointAsideWithTheModel) {
  const std::string name = SaveVersions(1)[0];
  Corrupt(name);
  StartedServer server(files_);
  EXPECT_THAT(server.manager().SetAsideAll("m"), IsOk());
  EXPECT_THAT(files_.AllPaths(), Contains(AllOf(StartsWith("/data/models/.deleted-"),
                                                EndsWith("-m/checkpoints/.corrupt-" + name))));
  EXPECT_FALSE(*files_.Exists("/data/models/m"));
  EXPECT_THAT(server.manager().CountAll(), IsEmpty());
  EXPECT_THAT(server.manager().Purge("m"), IsOk());
  EXPECT_THAT(files_.AllPaths(), Not(Contains(HasSubstr(name))));
}

TEST_F(AllCorruptTest, MessageNamesTheNewestCheckpointAndBothWaysOut) {
  const std::vector<std::string> names = SaveVersions(2);
  for (const std::string& name : names) Corrupt(name);
  for (int start = 0; start < 2; ++start) {
    StartedServer server(files_);
    EXPECT_THAT(server.CheckMayCreate(),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         AllOf(HasSubstr("count 2, newest .corrupt-" + names[1] + ", step 20"),
                               HasSubstr("copy a good checkpoint to models/m/checkpoints in the "
                                         "data directory and restart the server"),
                               HasSubstr("emactl delete m --confirm m"),
                               HasSubstr("Client.delete_model(\"m\")"))));
  }
}

TEST_F(AllCorruptTest, OlderGoodCheckpointIsLoaded) {
  Corrupt(SaveVersions(2)[1]);
  for (int start = 0; start < 2; ++start) {
    StartedServer server(files_);
    EXPECT_TRUE(server.HasModel());
    EXPECT_THAT(server.CheckMayCreate(), IsOk());
  }
}

TEST_F(AllCorruptTest, GoodCheckpointThatIsPutBackIsLoaded) {
  const std::string name = SaveVersions(1)[0];
  const std::string file = PathOf(name) + "/tracks/raw/model.safetensors";
  Corrupt(name);
  EXPECT_THAT(StartedServer(files_).CheckMayCreate(), IsRefused());
  ASSERT_THAT(files_.Rename(PathOf(".corrupt-" + name), PathOf(name)), IsOk());
  files_.FileBytes(file).back() ^= 1;
  StartedServer server(files_);
  EXPECT_TRUE(server.HasModel());
  EXPECT_THAT(server.CheckMayCreate(), IsOk());
}

TEST_F(AllCorruptTest, MissingOnlyCheckpointIsRefused) {
  const std::string name = SaveVersions(1)[0];
  ASSERT_THAT(files_.RemoveTree(PathOf(name)), IsOk());
  for (int start = 0; start < 2; ++start) {
    StartedServer server(files_);
    EXPECT_THAT(server.CheckMayCreate(),
                AllOf(IsRefused(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                            HasSubstr("count 1, newest " + name))));
  }
}

TEST_F(AllCorruptTest, CorruptLatestFileWithoutACheckpointIsRefused) {
  ASSERT_THAT(files_.RemoveTree(PathOf(SaveVersions(1)[0])), IsOk());
  files_.FileBytes(PathOf("LATEST"))[10] ^= 1;
  EXPECT_THAT(StartedServer(files_).CheckMayCreate(),
              AllOf(IsRefused(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                          HasSubstr("LATEST is corrupt"))));
}

TEST_F(AllCorruptTest, UnfinishedFirstSaveIsNotRefused) {
  {
    TestServer server(files_);
    server.PushTo(1);
    files_.set_hook([](const std::string& operation, const std::string& path) {
      return operation == "rename" && absl::StrContains(path, "step-")
                 ? absl::UnavailableError("Input/output error")
                 : absl::OkStatus();
    });
    EXPECT_FALSE(server.Save().ok());
    files_.set_hook(nullptr);
  }
  EXPECT_THAT(files_.AllPaths(), Contains(HasSubstr("/checkpoints/.tmp-step-")));
  StartedServer server(files_);
  EXPECT_FALSE(server.HasModel());
  EXPECT_THAT(server.CheckMayCreate(), IsOk());
}

TEST_F(AllCorruptTest, PartialCheckpointIsNotCounted) {
  std::string name;
  {
    TestServer server(files_);
    server.PushTo(1);
    const auto saved = server.manager().Save(server.model(), {.tracks = {"raw"}});
    ASSERT_THAT(saved, IsOk());
    name = saved->name;
    EXPECT_THAT(server.manager().Get(server.model(), name), IsOk());
  }
  ASSERT_THAT(files_.Rename(PathOf(name), PathOf(".corrupt-" + name)), IsOk());
  EXPECT_THAT(StartedServer(files_).CheckMayCreate(), IsOk());
}

TEST_F(AllCorruptTest, DeletedModelIsNotRefused) {
  SaveVersions(1);
  EXPECT_THAT(StartedServer(files_).manager().SetAsideAll("m"), IsOk());
  StartedServer server(files_);
  EXPECT_FALSE(server.HasModel());
  EXPECT_THAT(server.CheckMayCreate(), IsOk());
}

TEST_F(AllCorruptTest, ModelInMemoryIsNotRefusedWhenAScrubFindsItsOnlyCheckpointCorrupt) {
  TestServer server(files_);
  server.PushTo(1);
  const absl::StatusOr<Checkpoints::Saved> saved = server.Save();
  ASSERT_THAT(saved, IsOk());
  Corrupt(saved->name);
  EXPECT_EQ(server.manager().Scrub(server.models()).bad_count, 1);
  EXPECT_THAT(server.manager().CheckMayCreate("m"), IsOk());
  server.manager().AwaitIdle();
}

TEST_F(AllCorruptTest, FailedDeletionDoesNotAcceptTheLoss) {
  Corrupt(SaveVersions(1)[0]);
  StartedServer server(files_);
  files_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "rename" ? absl::UnavailableError("Input/output error") : absl::OkStatus();
  });
  EXPECT_THAT(server.manager().SetAsideAll("m"), ReasonIs(ErrorReason::kDiskFailed));
  EXPECT_THAT(server.CheckMayCreate(), IsRefused());
  files_.set_hook(nullptr);
  EXPECT_THAT(server.manager().SetAsideAll("m"), IsOk());
  EXPECT_THAT(server.CheckMayCreate(), IsOk());
}

TEST_F(AllCorruptTest, AnswerNeverWaitsForTheDisk) {
  Corrupt(SaveVersions(1)[0]);
  StartedServer server(files_);
  int64_t operations = 0;
  files_.set_hook([&](const std::string&, const std::string&) {
    ++operations;
    return absl::OkStatus();
  });
  EXPECT_THAT(server.CheckMayCreate(), IsRefused());
  EXPECT_THAT(server.manager().CheckMayCreate("another"), IsOk());
  EXPECT_EQ(operations, 0);
  files_.set_hook(nullptr);
}

}  // namespace
}  // namespace ema
