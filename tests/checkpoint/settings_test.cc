// SPDX-License-Identifier: Apache-2.0
//
// What a checkpoint has beside its version, and what becomes of changes of that.
#include <gmock/gmock.h>

#include <algorithm>
#include <string_view>

#include "absl/strings/match.h"
#include "server/format/verify.h"
#include "tests/checkpoint/test_manager.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::string_view kConfig = "{\"layers\": 2}";

class SettingsTest : public testing::Test {
 protected:
  static void Change(Model& model) {
    ASSERT_THAT(model.UpdateTracks({.pause = {"ema"}}), IsOk());
    ASSERT_THAT(model.attached_files().AddPart("config.json", std::ssize(kConfig), 0, kConfig),
                IsOk());
  }
  static bool IsChanged(const Model& model) {
    const auto tracks = model.tracks().after_next_commit();
    const bool is_paused = std::any_of(
        tracks.begin(), tracks.end(), [](const TrackRef& track) { return track->config().paused; });
    // One as the other.
    EXPECT_EQ(model.attached_files().Find("config.json").ok(), is_paused);
    return is_paused;
  }
  // What a server finds that is started now: that version, and its settings.
  static void ExpectAfterRestart(FakeFileSystem& files, int64_t version, bool is_changed) {
    TestServer server(files);
    EXPECT_EQ(server.version(), version);
    EXPECT_EQ(server.RawValue(), static_cast<float>(version));
    EXPECT_EQ(IsChanged(server.model()), is_changed);
    EXPECT_THAT(server.errors(), IsEmpty());
  }
  // Of what changes the files.
  void CountWrites(int& count) {
    files_.set_hook([&count](const std::string& operation, const std::string&) {
      count += operation == "create" || operation == "rename" || operation == "exchange";
      return absl::OkStatus();
    });
  }

  FakeFileSystem files_;
};

TEST_F(SettingsTest, ThatHaveChangedSinceTheNewestWasSavedAreSavedWithItAgain) {
  {
    TestServer server(files_);
    server.PushTo(2);
    ASSERT_THAT(server.Save(0, "best"), IsOk());
    Change(server.model());
    ASSERT_THAT(server.Save(), IsOk());
    EXPECT_THAT(server.Complete(), ElementsAre(2));
    int writes = 0;
    CountWrites(writes);
    ASSERT_THAT(server.Save(), IsOk());
    // The same again is no change.
    Change(server.model());
    ASSERT_THAT(server.Save(), IsOk());
    EXPECT_EQ(writes, 0);
    files_.set_hook(nullptr);
    EMA_ASSERT_OK_AND_ASSIGN(const auto listing, server.manager().List(server.model()));
    ASSERT_EQ(listing.checkpoints.size(), 1u);
    EXPECT_THAT(listing.checkpoints[0].labels, ElementsAre("best"));
  }
  ExpectAfterRestart(files_, 2, /*is_changed=*/true);
  int writes = 0;
  TestServer server(files_);
  CountWrites(writes);
  ASSERT_THAT(server.Save(), IsOk());
  EXPECT_EQ(writes, 0);
  files_.set_hook(nullptr);
}

TEST_F(SettingsTest, AreSavedByTheDrain) {
  {
    TestServer server(files_);
    server.PushTo(1);
    ASSERT_THAT(server.Save(), IsOk());
    Change(server.model());
    server.models().Drain(SteadyNow());
    EXPECT_THAT(server.manager().Drain(server.models()), IsOk());
  }
  ExpectAfterRestart(files_, 1, /*is_changed=*/true);
}

TEST_F(SettingsTest, AreSavedByWhoDoesNotWaitForIt) {
  {
    TestServer server(files_);
    server.PushTo(1);
    ASSERT_THAT(server.Save(), IsOk());
    Change(server.model());
    EMA_ASSERT_OK_AND_ASSIGN(const Checkpoints::Saved begun,
                             server.manager().Save(server.model(), {.async = true}));
    EXPECT_EQ(begun.state, CheckpointInfo::State::kSaving);
    server.manager().AwaitIdle();
  }
  ExpectAfterRestart(files_, 1, /*is_changed=*/true);
}

TEST_F(SettingsTest, AFileThatIsDetachedIsGone) {
  {
    TestServer server(files_);
    server.PushTo(1);
    Change(server.model());
    ASSERT_THAT(server.Save(), IsOk());
    ASSERT_THAT(server.model().UpdateTracks({.resume = {"ema"}}), IsOk());
    server.model().attached_files().Remove("config.json");
    ASSERT_THAT(server.Save(), IsOk());
  }
  ExpectAfterRestart(files_, 1, /*is_changed=*/false);
}

// It would be lost, and the checkpoint may have labels.
TEST_F(SettingsTest, AVersionWithATrackThatWasRemovedStaysAsItIs) {
  for (const bool has_successor : {false, true}) {
    FakeFileSystem files;
    {
      TestServer server(files);
      server.PushTo(1);
      ASSERT_THAT(server.Save(0, "best"), IsOk());
      TrackChanges changes{.remove = {"ema"}, .pause = {"raw"}};
      if (has_successor) changes.put = {{"ema", MakeSchedule("20ba")}};
      ASSERT_THAT(server.model().UpdateTracks({.remove = {"ema"}}), IsOk());
      ASSERT_THAT(server.model().UpdateTracks(changes), IsOk());
      ASSERT_THAT(server.Save(), IsOk());
    }
    TestServer server(files);
    EXPECT_THAT(ReadAll(server.model(), "ema"), IsOk());
    EXPECT_EQ(server.model().tracks().after_next_commit().size(), 2u);
  }
}

TEST_F(SettingsTest, ALabelNeedsNoneOfThem) {
  TestServer server(files_);
  server.PushTo(1);
  ASSERT_THAT(server.Save(), IsOk());
  Change(server.model());
  int exchanges = 0;
  files_.set_hook([&](const std::string& operation, const std::string&) {
    exchanges += operation == "exchange";
    return absl::OkStatus();
  });
  EXPECT_THAT(server.manager().SetLabel(server.model(), "best", {1, 0}), IsOk());
  EXPECT_EQ(exchanges, 0);
  EXPECT_THAT(server.Save(), IsOk());
  EXPECT_EQ(exchanges, 1);
  files_.set_hook(nullptr);
}

// It got its name, and the answer was an error: what it has is not known any more.
TEST_F(SettingsTest, OfAVersionThatWasSavedButForItsNameAreSavedAgain) {
  {
    TestServer server(files_);
    server.PushTo(1);
    ASSERT_THAT(server.Save(), IsOk());
    server.PushTo(2);
    files_.set_hook([](const std::string& operation, const std::string& path) {
      return operation == "rename" && absl::StrContains(path, "LATEST")
                 ? absl::UnavailableError("Input/output error")
                 : absl::OkStatus();
    });
    ASSERT_FALSE(server.Save().ok());
    files_.set_hook(nullptr);
    Change(server.model());
    ASSERT_THAT(server.Save(), IsOk());
    ASSERT_THAT(server.Save(), IsOk());
  }
  ExpectAfterRestart(files_, 2, /*is_changed=*/true);
}

TEST_F(SettingsTest, AtAnyMomentTheVersionIsThereWithTheOldOrTheNew) {
  bool was_changed = false;
  for (int64_t stop = 0;; ++stop) {
    FakeFileSystem files;
    TestServer server(files);
    server.PushTo(1);
    ASSERT_THAT(server.Save(), IsOk());
    Change(server.model());
    auto count = std::make_shared<int64_t>(0);
    files.set_hook([stop, count](const std::string&, const std::string&) {
      return (*count)++ < stop ? absl::OkStatus() : absl::UnavailableError("Input/output error");
    });
    const bool is_saved = server.Save().ok();
    for (const PowerLoss loss :
         {PowerLoss::kNone, PowerLoss::kNothing, PowerLoss::kNamesOnly, PowerLoss::kAnything}) {
      for (uint32_t seed = 0; seed < (loss == PowerLoss::kAnything ? 6 : 1); ++seed) {
        const auto after = files.AfterCrash(loss, seed);
        TestServer next(*after);
        EXPECT_EQ(next.version(), 1) << stop;
        EXPECT_EQ(next.RawValue(), 1) << stop;
        const bool is_changed = IsChanged(next.model());
        EXPECT_TRUE(is_changed || !is_saved) << stop;
        was_changed |= is_changed && !is_saved;
        // And the machine is as good as new.
        next.PushTo(2);
        EXPECT_THAT(next.Save(), IsOk());
      }
    }
    files.set_hook(nullptr);
    if (is_saved && *count <= stop) break;
  }
  EXPECT_TRUE(was_changed) << "the exchange was there before the answer";
}

TEST_F(SettingsTest, ThatTheFileSystemCannotPutInPlaceAreRefused) {
  {
    TestServer server(files_);
    server.PushTo(1);
    ASSERT_THAT(server.Save(), IsOk());
    Change(server.model());
    files_.set_hook([](const std::string& operation, const std::string&) {
      return operation == "exchange" ? absl::UnimplementedError("no such call") : absl::OkStatus();
    });
    EXPECT_THAT(server.Save(), StatusIs(absl::StatusCode::kUnimplemented,
                                        HasSubstr("file system cannot exchange two folders")));
    EXPECT_THAT(server.Complete(), ElementsAre(1));
  }
  files_.set_hook(nullptr);
  ExpectAfterRestart(files_, 1, /*is_changed=*/false);
}

TEST_F(SettingsTest, AreNotPutInThePlaceOfACheckpointThatIsBeingRead) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto store, CheckpointStore::Open(files_, {.data_dir = "/data"}));
  ModelStore models(TestDevice(), SmallBlocks());
  const std::shared_ptr<Model> model = models.Create(TwoTracks())->model;
  TestRank rank(model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(10, BytesOf({1, 1, 1})), IsOk());
  const SnapshotRef snapshot = *model->history().Pin(0);
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved,
                           store->FolderOf("m").Save(*model, snapshot, {.keep = true}));
  Change(*model);
  {
    const auto held = store->FolderOf("m").Hold(saved.name);
    ASSERT_THAT(held, IsOk());
    EXPECT_THAT(store->FolderOf("m").Save(*model, snapshot, {.with_new_settings = true}),
                AllOf(ReasonIs(ErrorReason::kCheckpointInUse),
                      StatusIs(absl::StatusCode::kUnavailable, HasSubstr("it is being read"))));
    EXPECT_THAT(VerifyCheckpoint(files_, (*held)->Path((*held)->ids()[0])), IsOk());
  }
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto again, store->FolderOf("m").Save(*model, snapshot, {.with_new_settings = true}));
  EXPECT_TRUE(again.was_written);
  EXPECT_THAT(files_.Exists(JoinPath(JoinPath(kTestFolder, saved.name), "KEEP")),
              IsOkAndHolds(true));
}

}  // namespace
}  // namespace ema
