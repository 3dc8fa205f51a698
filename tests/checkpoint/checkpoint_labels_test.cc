// SPDX-License-Identifier: Apache-2.0
//
// What a checkpoint manager keeps and why: retention, labels, and scores that move a label.
#include <cmath>
#include <limits>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "server/format/label_file.h"
#include "tests/checkpoint/test_manager.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

CheckpointLabel Score(int64_t version, double metric, bool lower_is_better = false) {
  return {.name = "best", .id = {version, 0}, .metric = metric, .lower_is_better = lower_is_better};
}

class CheckpointLabelsTest : public testing::Test {
 protected:
  FakeFileSystem files_;
};

// --- Retention ---

TEST_F(CheckpointLabelsTest, RetentionKeepsTheNewestTheLabelledAndTheMultiples) {
  CheckpointManager::Options options;
  options.store.keep_count = 2;
  options.store.keep_step_multiple = 40;
  TestServer server(files_, options);
  for (int64_t version = 1; version <= 9; ++version) {
    server.PushTo(version);
    ASSERT_THAT(server.Save(0, version == 3 ? "good" : ""), IsOk());
  }
  EXPECT_THAT(server.Complete(), ElementsAre(9, 8, 4, 3));
  ASSERT_THAT(server.manager().RemoveLabel(server.model(), "good"), IsOk());
  server.PushTo(10);
  ASSERT_THAT(server.Save(), IsOk());
  EXPECT_THAT(server.Complete(), ElementsAre(10, 9, 8, 4));
}

TEST_F(CheckpointLabelsTest, ALabelIsThereBeforeRetentionLooks) {
  CheckpointManager::Options options;
  options.store.keep_count = 1;
  TestServer server(files_, options, TwoTracks(/*max_pinned_versions=*/4));
  server.PushTo(3);
  ASSERT_THAT(server.Save(3), IsOk());
  // Older than the newest one that is kept: only the label keeps it.
  ASSERT_THAT(server.Save(1, "old"), IsOk());
  ASSERT_THAT(server.Save(2), IsOk());
  ASSERT_THAT(server.Save(3), IsOk());
  server.PushTo(4);
  ASSERT_THAT(server.Save(), IsOk());
  EXPECT_THAT(server.Complete(), ElementsAre(4, 1));
}

// --- Labels ---

TEST_F(CheckpointLabelsTest, ALabelSavesItsVersionMovesAndOutlivesTheServer) {
  {
    TestServer server(files_);
    server.PushTo(1);
    EMA_ASSERT_OK_AND_ASSIGN(const auto label,
                             server.manager().SetLabel(server.model(), "stable", {}));
    EXPECT_EQ(label.id.version, 1);
    EXPECT_EQ(label.step, 10);
    EXPECT_EQ(server.model().durable().step(), 10);
    server.PushTo(5);
    EXPECT_THAT(server.manager().FindLabel(server.model(), "stable"), IsOkAndHolds(label.id));
    ASSERT_THAT(server.manager().SetLabel(server.model(), "other", {1, 0}), IsOk());
    ASSERT_THAT(server.manager().SetLabel(server.model(), "stable", {5, 0}), IsOk());
    EXPECT_THAT(server.manager().SetLabel(server.model(), "stable", {2, 0}),
                AllOf(ReasonIs(ErrorReason::kVersionNotKept),
                      StatusIs(absl::StatusCode::kOutOfRange, HasSubstr("step 10 (version 1)"))));
    EXPECT_THAT(server.manager().SetLabel(server.model(), "stable", {9, 0}),
                ReasonIs(ErrorReason::kVersionNotYet));
    EXPECT_THAT(server.manager().SetLabel(server.model(), "../x", {}),
                ReasonIs(ErrorReason::kBadName));
  }
  TestServer server(files_);
  EMA_ASSERT_OK_AND_ASSIGN(const auto listing, server.manager().List(server.model()));
  ASSERT_THAT(listing.labels, SizeIs(2));
  EXPECT_EQ(listing.labels[0].name, "other");
  EXPECT_EQ(listing.labels[0].id.version, 1);
  EXPECT_EQ(listing.labels[1].name, "stable");
  EXPECT_EQ(listing.labels[1].id.version, 5);
  ASSERT_THAT(listing.checkpoints, SizeIs(2));
  EXPECT_THAT(listing.checkpoints[0].labels, ElementsAre("stable"));
  EXPECT_THAT(listing.checkpoints[1].labels, ElementsAre("other"));
  EXPECT_THAT(server.manager().FindLabel(server.model(), "none"),
              AllOf(ReasonIs(ErrorReason::kLabelNotFound),
                    StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"other\", \"stable\""))));
  EXPECT_THAT(server.manager().RemoveLabel(server.model(), "other"), IsOk());
  EXPECT_THAT(server.manager().RemoveLabel(server.model(), "other"),
              ReasonIs(ErrorReason::kLabelNotFound));
}

TEST_F(CheckpointLabelsTest, DigitsAreNoNewLabelButAnOldOneStays) {
  {
    TestServer server(files_);
    server.PushTo(1);
    CheckpointLabel score = Score(1, 0.5);
    score.name = "007";
    for (const auto& status :
         {server.manager().SetLabel(server.model(), "2", {}).status(),
          server.manager().ReportMetric(server.model(), score).status(),
          server.manager().Save(server.model(), {.label = "99999999999999999999"}).status()}) {
      EXPECT_THAT(status, AllOf(ReasonIs(ErrorReason::kBadName),
                                StatusIs(absl::StatusCode::kInvalidArgument,
                                         HasSubstr("must not be digits only"))));
    }
    ASSERT_THAT(server.manager().SetLabel(server.model(), "epoch-2", {}), IsOk());
    LabelMap labels = {{"2", *server.manager().SetLabel(server.model(), "2nd", {})}};
    labels.at("2").name = "2";
    const std::string text = EncodeLabels(labels);
    files_.FileBytes(absl::StrCat(kTestFolder, "/LABELS.json")) = text;
  }
  TestServer server(files_);
  EXPECT_EQ(server.manager().FindLabel(server.model(), "2")->version, 1);
  server.PushTo(2);
  EXPECT_EQ(server.manager().SetLabel(server.model(), "2", {})->id.version, 2);
  EXPECT_THAT(server.manager().RemoveLabel(server.model(), "2"), IsOk());
}

TEST_F(CheckpointLabelsTest, ALabelOfOneModelDoesNotWaitForTheSaveOfAnother) {
  TestServer server(files_);
  ModelConfig config = TwoTracks();
  config.name = "other";
  EMA_ASSERT_OK_AND_ASSIGN(const auto other, server.models().Create(config));
  TestRank rank(other.model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(10, BytesOf({1, 2, 3})), IsOk());
  ASSERT_THAT(server.manager().Save(*other.model, {}), IsOk());
  server.PushTo(1);
  absl::Notification is_saving;
  absl::Notification is_labelled;
  bool has_waited = false;
  files_.set_hook([&](const std::string& operation, const std::string& path) {
    if (operation == "append" && absl::StrContains(path, "/m/") && !is_saving.HasBeenNotified()) {
      is_saving.Notify();
      has_waited = !is_labelled.WaitForNotificationWithTimeout(absl::Seconds(20));
    }
    return absl::OkStatus();
  });
  {
    std::jthread labelling(
        [&] { EXPECT_THAT(server.manager().SetLabel(server.model(), "best", {}), IsOk()); });
    is_saving.WaitForNotification();
    EXPECT_THAT(server.manager().SetLabel(*other.model, "best", {}), IsOk());
    is_labelled.Notify();
  }
  EXPECT_FALSE(has_waited);
}

TEST_F(CheckpointLabelsTest, AModelHasAtMost1024Labels) {
  const std::string path = absl::StrCat(kTestFolder, "/LABELS.json");
  {
    TestServer server(files_);
    server.PushTo(1);
    ASSERT_THAT(server.Save(0, "l0"), IsOk());
    LabelMap labels;
    for (int i = 0; i < 1023; ++i) {
      const std::string name = absl::StrCat("l", i);
      labels[name] = {.name = name, .id = server.model().history().latest()->id(), .step = 10};
    }
    files_.FileBytes(path) = EncodeLabels(labels);
  }
  TestServer server(files_);
  const auto set = [&](const std::string& name) {
    return server.manager().SetLabel(server.model(), name, {}).status();
  };
  EXPECT_THAT(set("last"), IsOk());
  EXPECT_THAT(set("more"),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("1024 labels")));
  EXPECT_THAT(set("l7"), IsOk());
  EXPECT_THAT(server.manager().RemoveLabel(server.model(), "l7"), IsOk());
  EXPECT_THAT(set("more"), IsOk());
}

TEST_F(CheckpointLabelsTest, WithACorruptLabelFileNothingIsRemoved) {
  CheckpointManager::Options options;
  options.store.keep_count = 1;
  {
    TestServer server(files_, options);
    server.PushTo(1);
    ASSERT_THAT(server.Save(0, "best"), IsOk());
  }
  files_.FileBytes(absl::StrCat(kTestFolder, "/LABELS.json"))[40] ^= 1;
  {
    TestServer server(files_, options);
    ASSERT_THAT(server.errors(), SizeIs(1));
    EXPECT_THAT(server.errors()[0],
                AllOf(HasSubstr("LABELS.json"), HasSubstr("removed to make room")));
    server.PushTo(3);
    ASSERT_THAT(server.Save(), IsOk());
    // A new file does not say what was in the old one.
    ASSERT_THAT(server.manager().SetLabel(server.model(), "new", {}), IsOk());
    server.PushTo(4);
    ASSERT_THAT(server.Save(), IsOk());
    EXPECT_THAT(server.Complete(), ElementsAre(4, 3, 1));
  }
  {
    TestServer server(files_, options);
    EXPECT_THAT(server.errors(), SizeIs(1));
    server.PushTo(5);
    ASSERT_THAT(server.Save(), IsOk());
    EXPECT_THAT(server.Complete(), ElementsAre(5, 4, 3, 1));
  }
  // A person has looked.
  ASSERT_THAT(files_.RemoveFile(absl::StrCat(kTestFolder, "/.corrupt-LABELS.json")), IsOk());
  TestServer server(files_, options);
  EXPECT_THAT(server.errors(), IsEmpty());
  server.PushTo(6);
  ASSERT_THAT(server.Save(), IsOk());
  EXPECT_THAT(server.Complete(), ElementsAre(6, 3));
}

TEST_F(CheckpointLabelsTest, ACorruptLabelFileIsListedAndCountedUntilItIsDeleted) {
  CheckpointManager::Options options;
  options.store.keep_count = 1;
  {
    TestServer server(files_, options);
    server.PushTo(1);
    ASSERT_THAT(server.Save(0, "best"), IsOk());
  }
  const std::string path = absl::StrCat(kTestFolder, "/LABELS.json");
  const std::string aside = ".corrupt-LABELS.json";
  files_.FileBytes(path)[40] ^= 1;
  // The one that finds it, and the next.
  for (int start = 0; start < 2; ++start) {
    TestServer server(files_, options);
    EXPECT_EQ(server.manager().CountAll().at("m").corrupt, 1);
    EMA_ASSERT_OK_AND_ASSIGN(const CheckpointInfo info,
                             server.manager().Get(server.model(), aside));
    EXPECT_EQ(info.state, CheckpointInfo::State::kCorrupt);
    EXPECT_THAT(info.problem, HasSubstr("`emactl checkpoint delete`"));
    EXPECT_EQ(server.manager().List(server.model())->checkpoints.back().name, aside);
    if (start == 0) continue;
    server.PushTo(2);
    ASSERT_THAT(server.Save(0, "new"), IsOk());
    EXPECT_THAT(server.Complete(), ElementsAre(2, 1));
    EXPECT_THAT(server.manager().Delete(server.model(), aside), IsOk());
    EXPECT_EQ(server.manager().CountAll().at("m").corrupt, 0);
    EXPECT_THAT(files_.Exists(absl::StrCat(kTestFolder, "/", aside)), IsOkAndHolds(false));
    server.PushTo(3);
    ASSERT_THAT(server.Save(), IsOk());
    EXPECT_THAT(server.Complete(), ElementsAre(3, 2));
  }
}

TEST_F(CheckpointLabelsTest, TheLogNamesWhatIsMissingAtTheStart) {
  std::string best;
  std::string newest;
  {
    TestServer server(files_);
    server.PushTo(1);
    best = server.Save(0, "best")->name;
    server.PushTo(2);
    ASSERT_THAT(server.Save(0, "good"), IsOk());
    server.PushTo(3);
    newest = server.Save()->name;
    EXPECT_THAT(server.others(), testing::Not(testing::Contains(HasSubstr("without a"))));
  }
  for (const std::string& name : {best, newest}) {
    ASSERT_THAT(files_.RemoveTree(absl::StrCat(kTestFolder, "/", name)), IsOk());
  }
  TestServer server(files_);
  EXPECT_EQ(server.version(), 2);
  ASSERT_THAT(server.errors(), SizeIs(1));
  EXPECT_THAT(server.errors()[0],
              AllOf(HasSubstr("checkpoint missing"), HasSubstr("checkpoint=" + newest),
                    HasSubstr("loaded=step-000000000020")));
  EXPECT_THAT(server.others(),
              testing::Contains(AllOf(HasSubstr("label without a checkpoint"),
                                      HasSubstr("label=best"), HasSubstr("checkpoint=" + best)))
                  .Times(1));
  EXPECT_THAT(server.others(), testing::Not(testing::Contains(HasSubstr("label=good"))));
}

TEST_F(CheckpointLabelsTest, ALabelOfWhatHasGoneBadStaysAndSaysSo) {
  std::string name;
  {
    TestServer server(files_);
    server.PushTo(1);
    name = server.Save(0, "best")->name;
    server.PushTo(4);
    ASSERT_THAT(server.Save(), IsOk());
  }
  files_.FileBytes(absl::StrCat(kTestFolder, "/", name, "/manifest.json"))[30] ^= 1;
  TestServer server(files_);
  EXPECT_EQ(server.manager().Scrub(server.models()).bad_count, 1);
  EXPECT_THAT(server.manager().FindLabel(server.model(), "best"),
              AllOf(ReasonIs(ErrorReason::kCheckpointCorrupt),
                    StatusIs(absl::StatusCode::kDataLoss, HasSubstr("label \"best\": version 1"))));
  EXPECT_THAT(server.manager().List(server.model())->labels, SizeIs(1));
  EXPECT_THAT(server.manager().Restore(server.model(), {}, "best"),
              ReasonIs(ErrorReason::kCheckpointCorrupt));
}

// --- Scores ---

TEST_F(CheckpointLabelsTest, TheFirstAndEachBetterScoreMovesTheLabel) {
  TestServer server(files_);
  server.PushTo(1);
  const auto report = [&](const CheckpointLabel& score) {
    return server.manager().ReportMetric(server.model(), score);
  };
  EMA_ASSERT_OK_AND_ASSIGN(const auto first, report(Score(1, 0.5)));
  EXPECT_TRUE(first.moved);
  EXPECT_EQ(first.label.step, 10);
  EXPECT_EQ(server.model().durable().step(), 10);
  server.PushTo(2);
  // Of equal ones the first stays.
  EMA_ASSERT_OK_AND_ASSIGN(const auto equal, report(Score(2, 0.5)));
  EXPECT_FALSE(equal.moved);
  EXPECT_EQ(equal.label.id.version, 1);
  for (const double metric : {0.1, 0.9}) {
    EXPECT_THAT(report(Score(99, metric)), ReasonIs(ErrorReason::kVersionNotYet)) << metric;
  }
  EMA_ASSERT_OK_AND_ASSIGN(const auto better, report(Score(2, 0.6)));
  EXPECT_TRUE(better.moved);
  EXPECT_EQ(better.label.id.version, 2);
  EXPECT_EQ(better.label.metric, 0.6);
  server.PushTo(6);
  EXPECT_THAT(report(Score(3, 0.9)), ReasonIs(ErrorReason::kVersionNotKept));
  // What is not better needs not be kept.
  EMA_ASSERT_OK_AND_ASSIGN(const auto worse, report(Score(3, 0.1)));
  EXPECT_FALSE(worse.moved);
  // On the disk only.
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, report(Score(1, 0.7)));
  EXPECT_EQ(stored.label.id.version, 1);
  EXPECT_THAT(report(Score(6, 0.1, /*lower_is_better=*/true)),
              AllOf(ReasonIs(ErrorReason::kBadRequest),
                    StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("lower"))));
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(report(Score(6, bad)), ReasonIs(ErrorReason::kBadRequest));
  }
}

TEST_F(CheckpointLabelsTest, ScoresGoOnAfterARestartAndByTheirDirection) {
  {
    TestServer server(files_);
    server.PushTo(1);
    EXPECT_TRUE(server.manager().ReportMetric(server.model(), Score(1, 3.5, true))->moved);
  }
  TestServer server(files_);
  server.PushTo(2);
  EXPECT_FALSE(server.manager().ReportMetric(server.model(), Score(2, 3.5, true))->moved);
  EXPECT_FALSE(server.manager().ReportMetric(server.model(), Score(2, 4, true))->moved);
  EXPECT_TRUE(server.manager().ReportMetric(server.model(), Score(2, -1, true))->moved);
}

// Evaluators may report scores, and set no labels.
TEST_F(CheckpointLabelsTest, ScoresDoNotMoveWhatWasSetWithoutOne) {
  TestServer server(files_);
  server.PushTo(2);
  ASSERT_THAT(server.manager().SetLabel(server.model(), "best", {1, 0}), IsOk());
  EXPECT_THAT(server.manager().ReportMetric(server.model(), Score(2, 9)),
              AllOf(ReasonIs(ErrorReason::kBadRequest),
                    StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("without a score"))));
  EXPECT_EQ(server.manager().FindLabel(server.model(), "best")->version, 1);
  ASSERT_THAT(server.manager().RemoveLabel(server.model(), "best"), IsOk());
  EXPECT_TRUE(server.manager().ReportMetric(server.model(), Score(2, 9))->moved);
}

TEST_F(CheckpointLabelsTest, ScoresHaveSixteenLabels) {
  TestServer server(files_);
  server.PushTo(1);
  const auto report = [&](const std::string& label) {
    CheckpointLabel score = Score(1, 0.5);
    score.name = label;
    return server.manager().ReportMetric(server.model(), score);
  };
  for (int i = 0; i < 16; ++i) ASSERT_THAT(report(absl::StrCat("best-", i)), IsOk());
  EXPECT_THAT(report("best"),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("16 labels")));
  EXPECT_THAT(report("best-3"), IsOk());
  EXPECT_THAT(server.manager().SetLabel(server.model(), "stable", {1, 0}), IsOk());
}

}  // namespace
}  // namespace ema
