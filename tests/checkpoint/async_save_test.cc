// SPDX-License-Identifier: Apache-2.0
//
// Saves that are answered before they are done.
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "tests/checkpoint/test_manager.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using State = CheckpointInfo::State;

// A real folder: the queue's thread and the test's use it at once.
class AsyncSaveTest : public testing::Test {
 protected:
  AsyncSaveTest() : directory_(testing::TempDir() + "/ema_manager_XXXXXX") {
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
    CheckpointManager::Options options;
    options.store.data_dir = directory_;
    auto manager = CheckpointManager::Open(PosixFileSystem(), std::move(options));
    EXPECT_THAT(manager, IsOk());
    manager_ = *std::move(manager);
    EXPECT_THAT(manager_->LoadAll(models_), IsOk());
    model_ = models_.Create(TwoTracks())->model;
    rank_ = std::make_unique<TestRank>(model_, "launch");
    EXPECT_THAT(rank_->Join(), IsOk());
    EXPECT_THAT(rank_->Push(10, BytesOf({1, 2, 3})), IsOk());
  }
  ~AsyncSaveTest() override {
    manager_ = nullptr;
    PosixFileSystem().RemoveTree(directory_).IgnoreError();
  }

  std::string directory_;
  ModelStore models_{TestDevice(), SmallBlocks()};
  std::shared_ptr<Model> model_;
  std::unique_ptr<TestRank> rank_;
  std::unique_ptr<CheckpointManager> manager_;
};

TEST_F(AsyncSaveTest, IsAnsweredAtOnceAndEndsComplete) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved,
                           manager_->Save(*model_, {.async = true, .label = "one"}));
  EXPECT_EQ(saved.state, State::kSaving);
  EXPECT_EQ(saved.record.number, 1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto joined,
                           manager_->Save(*model_, {.async = true, .label = "two"}));
  EXPECT_EQ(joined.name, saved.name);
  EMA_ASSERT_OK_AND_ASSIGN(const auto polled, manager_->Get(*model_, saved.name));
  EXPECT_TRUE(polled.state == State::kSaving || polled.state == State::kComplete);
  manager_->AwaitIdle();
  EMA_ASSERT_OK_AND_ASSIGN(const auto info, manager_->Get(*model_, saved.name));
  EXPECT_EQ(info.state, State::kComplete);
  EXPECT_THAT(info.labels, ElementsAre("one", "two"));
  EXPECT_EQ(model_->durable().step(), 10);
  // It is there: nothing to wait for.
  EMA_ASSERT_OK_AND_ASSIGN(const auto again, manager_->Save(*model_, {.async = true}));
  EXPECT_EQ(again.state, State::kComplete);
  EXPECT_EQ(again.total_bytes, info.total_bytes);
}

TEST_F(AsyncSaveTest, KeepsItsVersionAndSaysWhyItFailed) {
  EXPECT_THAT(manager_->List(*model_), IsOk());
  // A file where the model's folder must be.
  EMA_ASSERT_OK_AND_ASSIGN(auto file, PosixFileSystem().NewWritableFile(directory_ + "/models/m"));
  ASSERT_THAT(file->Close(), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved, manager_->Save(*model_, {.async = true}));
  manager_->AwaitIdle();
  EMA_ASSERT_OK_AND_ASSIGN(const auto failed, manager_->Get(*model_, saved.name));
  EXPECT_EQ(failed.state, State::kFailed);
  EXPECT_NE(failed.problem, "");
  ASSERT_THAT(PosixFileSystem().RemoveFile(directory_ + "/models/m"), IsOk());
  EXPECT_THAT(manager_->Save(*model_, {.async = true}), IsOk());
  manager_->AwaitIdle();
  EXPECT_EQ(manager_->Get(*model_, saved.name)->state, State::kComplete);
}

TEST_F(AsyncSaveTest, CallsForADeletedModelKeepTheRecordsOfItsSuccessor) {
  const std::shared_ptr<Model> deleted = model_;
  models_.Delete("m");
  ASSERT_THAT(manager_->SetAsideAll("m"), IsOk());
  model_ = models_.Create(TwoTracks())->model;
  rank_ = std::make_unique<TestRank>(model_, "launch");
  ASSERT_THAT(rank_->Join(), IsOk());
  ASSERT_THAT(rank_->Push(10, BytesOf({1, 2, 3})), IsOk());
  // A file where the model's folder must be.
  EMA_ASSERT_OK_AND_ASSIGN(auto file, PosixFileSystem().NewWritableFile(directory_ + "/models/m"));
  ASSERT_THAT(file->Close(), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved, manager_->Save(*model_, {.async = true}));
  manager_->AwaitIdle();
  manager_->List(*deleted).IgnoreError();
  EMA_ASSERT_OK_AND_ASSIGN(const auto failed, manager_->Get(*model_, saved.name));
  EXPECT_EQ(failed.state, State::kFailed);
}

TEST_F(AsyncSaveTest, SaysThatALabelIsMissing) {
  ASSERT_THAT(manager_->Save(*model_, {}), IsOk());
  // A folder where the new labels are to be written.
  const std::string folder = directory_ + "/models/m/checkpoints/.tmp-LABELS.json";
  ASSERT_THAT(PosixFileSystem().CreateDirectory(folder), IsOk());
  EXPECT_THAT(rank_->Push(20, BytesOf({1, 2, 3})), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved,
                           manager_->Save(*model_, {.async = true, .label = "one"}));
  manager_->AwaitIdle();
  EMA_ASSERT_OK_AND_ASSIGN(const auto info, manager_->Get(*model_, saved.name));
  EXPECT_EQ(info.state, State::kComplete);
  EXPECT_THAT(info.labels, IsEmpty());
  EXPECT_NE(info.problem, "");
  ASSERT_THAT(PosixFileSystem().RemoveTree(folder), IsOk());
  ASSERT_THAT(manager_->Save(*model_, {.async = true, .label = "one"}), IsOk());
  manager_->AwaitIdle();
  EXPECT_THAT(manager_->Get(*model_, saved.name)->labels, ElementsAre("one"));
  EXPECT_EQ(manager_->Get(*model_, saved.name)->problem, "");
}

TEST(AsyncLabelsTest, EachThatIsNotSetIsNamed) {
  FakeFileSystem files;
  TestServer server(files);
  absl::Notification is_saving;
  absl::Notification may_end;
  files.set_hook([&](const std::string& operation, const std::string&) {
    if (!is_saving.HasBeenNotified()) is_saving.Notify();
    may_end.WaitForNotification();
    return operation == "create" ? absl::UnavailableError("I/O error") : absl::OkStatus();
  });
  server.PushTo(1);
  std::string name;
  for (const char* const label : {"one", "two", "three"}) {
    const auto saved = server.manager().Save(server.model(), {.async = true, .label = label});
    ASSERT_THAT(saved, IsOk());
    name = saved->name;
    is_saving.WaitForNotification();
  }
  may_end.Notify();
  server.manager().AwaitIdle();
  files.set_hook(nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const auto info, server.manager().Get(server.model(), name));
  EXPECT_EQ(info.state, State::kFailed);
  EXPECT_THAT(info.problem, HasSubstr("labels not set: one, three, two: "));
  EXPECT_THAT(server.errors(), ElementsAre(HasSubstr("unset_labels=\"one, three, two\"")));
}

// Of saves that wait, or of one that a caller waits for.
class WaitingSavesTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(, WaitingSavesTest, testing::Bool());

TEST_P(WaitingSavesTest, LeaveAPinForReaders) {
  const bool is_async = GetParam();
  FakeFileSystem files;
  TestServer server(files, {}, TwoTracks(/*max_pinned_versions=*/2));
  absl::Notification is_saving;
  absl::Notification may_end;
  files.set_hook([&](const std::string&, const std::string&) {
    if (!is_saving.HasBeenNotified()) is_saving.Notify();
    may_end.WaitForNotification();
    return absl::OkStatus();
  });
  // With a label the disk is not asked whether it has it.
  const auto save = [&server](int64_t version, const std::string& label) {
    return server.manager()
        .Save(server.model(), {.id = {version, 0}, .async = true, .label = label})
        .status();
  };
  server.PushTo(2);
  std::thread saving([&] {
    EXPECT_THAT(
        server.manager().Save(server.model(), {.id = {1, 0}, .async = is_async, .label = "one"}),
        IsOk());
  });
  is_saving.WaitForNotification();
  EXPECT_THAT(save(2, "two"), ReasonIs(ErrorReason::kTooManyPins));
  EXPECT_THAT(save(1, "same"), IsOk());
  EXPECT_THAT(server.model().history().Pin(2), IsOk());
  may_end.Notify();
  saving.join();
  server.manager().AwaitIdle();
  files.set_hook(nullptr);
  EXPECT_THAT(save(2, "two"), IsOk());
  server.manager().AwaitIdle();
  EXPECT_THAT(server.Complete(), ElementsAre(2, 1));
}

}  // namespace
}  // namespace ema
