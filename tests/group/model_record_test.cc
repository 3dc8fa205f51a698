// SPDX-License-Identifier: Apache-2.0
#include "server/group/model_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "absl/strings/str_cat.h"
#include "server/format/record_json.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using State = ModelRecord::State;

constexpr std::string_view kKey = "models/gpt";
constexpr int64_t kIncarnation = 1'760'000'000;

GroupCheckpoint CheckpointOf(int64_t version, int64_t incarnation = kIncarnation) {
  return {.id = {version, incarnation}, .step = 10 * version, .total_bytes = 4096};
}

// A model whose base is version 5 of an earlier incarnation. A rollback to it has discarded version
// 6, and nothing has been saved since.
ModelRecord SomeRecord() {
  return {.state = State::kActive,
          .incarnation = kIncarnation,
          .base = VersionId{5, 7},
          .partitions = {{"ema-1", "b1", 0, 4, 40},
                         {"ema-2", "b2", 4, 1, 10},
                         {"ema-0", "b0", 5, 3, 30}},
          .checkpoints = {CheckpointOf(4, 7), CheckpointOf(5, 7), CheckpointOf(6, 7)}};
}

MemberRecord SomeMember() {
  return {.boot = "000102030405060708090a0b0c0d0e0f",
          .address = "ema-0.ema-group:50051",
          .device = "cuda:0",
          .memory_budget_bytes = int64_t{1} << 40,
          .program_version = "0.1.0",
          .protocol = 1};
}

std::string TextOf(const ModelRecord& record) {
  const absl::StatusOr<std::string> text = FormatModelRecord(kKey, record);
  EXPECT_THAT(text, IsOk());
  return text.value_or("");
}

absl::StatusOr<ModelRecord> Parse(const Json& json) { return ParseModelRecord(kKey, json.dump()); }

TEST(RecordTest, RecordsAreReadBack) {
  EXPECT_THAT(ParseModelRecord(kKey, TextOf(SomeRecord())), IsOkAndHolds(SomeRecord()));
  const ModelRecord created{
      .state = State::kCreating, .incarnation = 1, .partitions = {{"ema-0", "b0", 0, 1}}};
  EXPECT_THAT(ParseModelRecord(kKey, TextOf(created)), IsOkAndHolds(created));
  ModelRecord deleting = SomeRecord();
  deleting.state = State::kDeleting;
  deleting.checkpoints[0].keep = true;
  deleting.copy = {{9, kIncarnation}, 90};
  EXPECT_THAT(ParseModelRecord(kKey, TextOf(deleting)), IsOkAndHolds(deleting));

  EXPECT_THAT(ParseMemberRecord("members/ema-0", FormatMemberRecord(SomeMember())),
              IsOkAndHolds(SomeMember()));
  MemberRecord member = SomeMember();
  member.device = "\xff";  // Not UTF-8.
  EXPECT_THAT(ParseMemberRecord("members/ema-0", FormatMemberRecord(member)), IsOk());
}

TEST(RecordTest, NewerFormatIsRefusedWhateverElseItHas) {
  for (const char* text : {R"({"format_version": 2, "zone": "a"})", R"({"format_version": 2})"}) {
    EXPECT_THAT(ParseModelRecord(kKey, text),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         AllOf(HasSubstr("models/gpt: written in format_version 2; this build "
                                         "reads only 1: "),
                               HasSubstr("install the version of the other members"))));
  }
}

TEST(RecordTest, DamageIsRefusedWithKeyAndField) {
  const std::string text = TextOf(SomeRecord());
  for (size_t i = 0; i < text.size(); ++i) {
    EXPECT_THAT(ParseModelRecord(kKey, text.substr(0, i)),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("models/gpt: ")))
        << i;
  }
  const auto expect_refused = [](std::string_view json, const char* message) {
    EXPECT_THAT(ParseModelRecord(kKey, json), StatusIs(absl::StatusCode::kDataLoss, message));
    EXPECT_THAT(ParseMemberRecord(kKey, json), StatusIs(absl::StatusCode::kDataLoss, message));
  };
  expect_refused("[]", "models/gpt: format_version is missing");
  expect_refused(R"({"format_version": 0})",
                 "models/gpt: format_version is not an integer of 1 or more");
  expect_refused(R"({"format_version": 1, "format_version": 1})",
                 "models/gpt: format_version is there twice");
}

struct BadField {
  const char* pointer;  // Where in the record's JSON.
  const char* value;
  const char* message;
};

TEST(RecordTest, BadFieldIsNamed) {
  const Json good = Json::parse(TextOf(SomeRecord()));
  for (const BadField& bad : {
           BadField{"/note", "1", "note is not a field of this build"},
           BadField{"/partitions/0/zone", "1", "partitions[0].zone is not a field of this build"},
           BadField{"/state", R"("OPEN")", "state is \"OPEN\", which this build does not know"},
           BadField{"/incarnation", "0", "incarnation is not an integer of 1 to"},
           BadField{"/partitions", "[]", "partitions is empty"},
           BadField{"/partitions/1/member", R"("../a")", "partitions[1]: member \"../a\""},
           BadField{"/partitions/1/member", R"("ema-1")",
                    "partitions[1].member: \"ema-1\" is there twice"},
           BadField{"/partitions/1/boot", R"("")", "partitions[1].boot is empty"},
           BadField{"/partitions/0/first_tensor", "1",
                    "partitions[0].first_tensor is 1, expected 0"},
           BadField{"/partitions/1/first_tensor", "3",
                    "partitions[1].first_tensor is 3, expected 4"},
           BadField{"/partitions/2/tensor_count", "0",
                    "partitions[2].tensor_count is 0, expected 1 to 199995"},
           BadField{"/partitions/2/tensor_count", "199996", "partitions[2].tensor_count is 199996"},
           BadField{"/checkpoints/1/version", "4",
                    "checkpoints[1] is version 4 of incarnation 7, and comes after version 4"},
           BadField{"/checkpoints/2/incarnation", "1760000001",
                    "checkpoints[2] is version 6 of incarnation 1760000001, but the model is in "
                    "incarnation 1760000000"},
           BadField{"/checkpoints/0/step", "-1", "checkpoints[0].step is not an integer"},
           BadField{"/base/version", "3",
                    "base is version 3 of incarnation 7, which is not in .checkpoints"},
           BadField{"/earlier_bases", R"([{"incarnation": 1760000000,
                    "base": {"incarnation": 7, "version": 4}}])",
                    "earlier_bases[0] is of incarnation 1760000000, but the model is in"},
           BadField{"/earlier_bases", R"([{"incarnation": 7,
                    "base": {"incarnation": 7, "version": 4}}])",
                    "earlier_bases[0] is of incarnation 7, but its base is version 4 of "
                    "incarnation 7"},
       }) {
    Json json = good;
    json[Json::json_pointer(bad.pointer)] = Json::parse(bad.value);
    EXPECT_THAT(Parse(json), StatusIs(absl::StatusCode::kDataLoss,
                                      HasSubstr(absl::StrCat("models/gpt: ", bad.message))));
  }
  Json copied = good;
  copied["copy"] = {{"incarnation", 7}, {"version", 6}, {"step", 60}};
  EXPECT_THAT(Parse(copied),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("models/gpt: copy is version 6 of incarnation 7, expected one of "
                                 "incarnation 1760000000, or the base")));
  Json member = Json::parse(FormatMemberRecord(SomeMember()));
  member["boot"] = "";
  EXPECT_THAT(ParseMemberRecord("members/ema-0", member.dump()),
              StatusIs(absl::StatusCode::kDataLoss, "members/ema-0: boot is empty"));
}

TEST(RecordTest, BadRecordIsNotWritten) {
  ModelRecord record = SomeRecord();
  record.partitions[1].boot = "";
  EXPECT_THAT(FormatModelRecord(kKey, record), StatusIs(absl::StatusCode::kInvalidArgument,
                                                        "models/gpt: partitions[1].boot is empty"));
}

TEST(RecordTest, RecordHasALimit) {
  ModelRecord record = SomeRecord();
  // The sizes that group.md promises room for.
  record.partitions.clear();
  for (int64_t i = 0; i < 256; ++i) {
    record.partitions.push_back({absl::StrCat("ema-", i, ".group"), SomeMember().boot, i, 1});
  }
  for (int64_t version = 1; version <= 1000; ++version) {
    record.checkpoints.push_back(CheckpointOf(version));
  }
  EXPECT_LT(TextOf(record).size(), 230'000);
  for (int64_t version = 1001; version <= 20'000; ++version) {
    record.checkpoints.push_back(CheckpointOf(version));
  }
  EXPECT_THAT(
      FormatModelRecord(kKey, record),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("models/gpt: the record would have "),
                     HasSubstr("(limit 1000000) with 256 partitions and 20003 checkpoints"))));
}

TEST(ModelRecordTest, ProcessHasAPlaceOnlyWithItsOwnBoot) {
  const ModelRecord record = SomeRecord();
  EXPECT_EQ(record.PartitionOf("ema-1", "b1"), 0);
  EXPECT_EQ(record.PartitionOf("ema-0", "b0"), 2);
  EXPECT_EQ(record.PartitionOf("ema-0", "b1"), std::nullopt);
  EXPECT_EQ(record.PartitionOf("ema-3", "b1"), std::nullopt);
  EXPECT_TRUE(record.IsHome("ema-1", "b1"));
  EXPECT_FALSE(record.IsHome("ema-1", "b0"));
  EXPECT_FALSE(record.IsHome("ema-0", "b0"));
}

TEST(ModelRecordTest, OtherStatesRefuseChanges) {
  ModelRecord creating = SomeRecord();
  creating.state = State::kCreating;
  const auto is_refused =
      StatusIs(absl::StatusCode::kFailedPrecondition, "state: CREATING, expected ACTIVE");
  EXPECT_THAT(BeginIncarnation(creating, {.partitions = creating.partitions}), is_refused);
  EXPECT_THAT(AddCheckpoint(creating, kIncarnation, CheckpointOf(7)), is_refused);
  EXPECT_THAT(RemoveCheckpoint(creating, {4, 7}), is_refused);

  EMA_ASSERT_OK_AND_ASSIGN(const ModelRecord active, Activate(creating));
  EXPECT_EQ(active, SomeRecord());
  EXPECT_THAT(Activate(active),
              StatusIs(absl::StatusCode::kFailedPrecondition, "state: ACTIVE, expected CREATING"));
}

TEST(ModelRecordTest, IncarnationsNeverRepeat) {
  EXPECT_THAT(NextIncarnation(0, 100, 0), IsOkAndHolds(100));
  EXPECT_THAT(NextIncarnation(100, 100, 0), IsOkAndHolds(101));
  EXPECT_THAT(NextIncarnation(100, 50, 99), IsOkAndHolds(101));
  // The registry was restored from a backup, and the clock is behind.
  EXPECT_THAT(NextIncarnation(100, 50, 200), IsOkAndHolds(201));
  EXPECT_THAT(NextIncarnation(100, 50, INT64_MAX),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("incarnation: 9223372036854775807")));
}

TEST(ModelRecordTest, RestartedMemberBeginsAnIncarnation) {
  ModelRecord record = SomeRecord();
  const std::vector<Partition> partitions = record.PartitionsWithBoot("ema-2", "new");
  EXPECT_EQ(record.PartitionsWithBoot("ema-3", "new"), record.partitions);
  EMA_ASSERT_OK_AND_ASSIGN(
      const ModelRecord next,
      BeginIncarnation(
          record, {.now_micros = 1, .newest_stored_incarnation = 2, .partitions = partitions}));
  EXPECT_EQ(next.PartitionOf("ema-2", "b2"), std::nullopt);
  EXPECT_EQ(next.PartitionOf("ema-2", "new"), 1);
  ModelRecord expected = SomeRecord();
  expected.incarnation = kIncarnation + 1;
  expected.partitions[1].boot = "new";
  EXPECT_EQ(next, expected);
}

TEST(ModelRecordTest, CrashGoesBackToTheNewestCheckpointSinceTheRollback) {
  ModelRecord record = SomeRecord();
  const auto base_after_crash = [&] {
    return BeginIncarnation(record, {.partitions = record.partitions})->base;
  };
  EXPECT_EQ(base_after_crash(), (VersionId{5, 7}));
  EMA_ASSERT_OK_AND_ASSIGN(record, AddCheckpoint(record, kIncarnation, CheckpointOf(6)));
  EMA_ASSERT_OK_AND_ASSIGN(record, AddCheckpoint(record, kIncarnation, CheckpointOf(7)));
  EXPECT_EQ(base_after_crash(), (VersionId{7, kIncarnation}));
  record = {.state = State::kActive, .incarnation = 1, .partitions = record.partitions};
  EXPECT_EQ(base_after_crash(), std::nullopt);
}

TEST(ModelRecordTest, RollbackAndRebalanceBeginAnIncarnation) {
  const std::vector<Partition> two = {{"ema-4", "b4", 0, 5}, {"ema-5", "b5", 5, 3}};
  EMA_ASSERT_OK_AND_ASSIGN(const ModelRecord next,
                           BeginIncarnation(SomeRecord(), {.now_micros = kIncarnation + 50,
                                                           .partitions = two,
                                                           .base = VersionId{4, 7}}));
  EXPECT_EQ(next.incarnation, kIncarnation + 50);
  EXPECT_EQ(next.partitions, two);
  EXPECT_EQ(next.base, (VersionId{4, 7}));

  EXPECT_THAT(BeginIncarnation(SomeRecord(), {.partitions = two, .base = VersionId{4, 8}}),
              AllOf(StatusIs(absl::StatusCode::kNotFound,
                             "base: there is no checkpoint of version 4 of incarnation 8"),
                    ReasonIs(ErrorReason::kCheckpointNotFound)));
  EXPECT_THAT(
      BeginIncarnation(SomeRecord(), {.partitions = {{"ema-4", "b4", 0, 7}}}),
      StatusIs(absl::StatusCode::kInvalidArgument, "partitions: they have 7 tensors, expected 8"));
}

TEST(ModelRecordTest, ARollbackLeavesTheHistoryAndMayBeUndone) {
  // Incarnation 7 has versions 4 to 6. A rollback to version 4 has begun the present one.
  ModelRecord record = SomeRecord();
  EMA_ASSERT_OK_AND_ASSIGN(record, BeginIncarnation(record, {.now_micros = kIncarnation + 1,
                                                             .partitions = record.partitions,
                                                             .base = VersionId{4, 7}}));
  const int64_t newest = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(record.History(), ElementsAre(VersionId{newest, kIncarnation + 1}, VersionId{4, 7}));
  EMA_ASSERT_OK_AND_ASSIGN(
      record, AddCheckpoint(record, record.incarnation, CheckpointOf(5, record.incarnation)));
  // After a crash, version 4 of incarnation 7 is still in the history; 5 and 6 are not.
  EMA_ASSERT_OK_AND_ASSIGN(record, BeginIncarnation(record, {.now_micros = kIncarnation + 2,
                                                             .partitions = record.partitions}));
  EXPECT_THAT(record.History(), ElementsAre(VersionId{newest, kIncarnation + 2},
                                            VersionId{5, kIncarnation + 1}, VersionId{4, 7}));
  EXPECT_THAT(ParseModelRecord(kKey, TextOf(record)), IsOkAndHolds(record));
  // The operator wants the discarded version after all.
  EMA_ASSERT_OK_AND_ASSIGN(record, BeginIncarnation(record, {.now_micros = kIncarnation + 3,
                                                             .partitions = record.partitions,
                                                             .base = VersionId{6, 7}}));
  EXPECT_THAT(record.History(), ElementsAre(VersionId{newest, kIncarnation + 3}, VersionId{6, 7}));
  // And then the other one again.
  EMA_ASSERT_OK_AND_ASSIGN(record,
                           BeginIncarnation(record, {.now_micros = kIncarnation + 4,
                                                     .partitions = record.partitions,
                                                     .base = VersionId{5, kIncarnation + 1}}));
  EXPECT_THAT(record.History(), ElementsAre(VersionId{newest, kIncarnation + 4},
                                            VersionId{5, kIncarnation + 1}, VersionId{4, 7}));
}

TEST(ModelRecordTest, BasesThatNothingDescendsFromAreForgotten) {
  ModelRecord record = SomeRecord();
  for (int i = 1; i <= 5; ++i) {
    EMA_ASSERT_OK_AND_ASSIGN(record, BeginIncarnation(record, {.partitions = record.partitions}));
  }
  EXPECT_THAT(record.earlier_bases, IsEmpty());
}

TEST(ModelRecordTest, ALostBaseIsReplacedByTheNextOlderOneInTheHistory) {
  const ModelRecord record = SomeRecord();
  const VersionId lost = {5, 7};
  EMA_ASSERT_OK_AND_ASSIGN(
      const ModelRecord next,
      BeginIncarnation(record, {.partitions = record.partitions, .base = lost, .lost = lost}));
  EXPECT_EQ(next.base, (VersionId{4, 7}));  // Version 6 has been discarded.
  EXPECT_EQ(next.Find(lost), nullptr);
  EXPECT_THAT(ParseModelRecord(kKey, TextOf(next)), IsOkAndHolds(next));
  EXPECT_THAT(BeginIncarnation(next, {.partitions = record.partitions,
                                      .base = VersionId{4, 7},
                                      .lost = VersionId{4, 7}}),
              AllOf(StatusIs(absl::StatusCode::kNotFound,
                             "base: version 4 of incarnation 7 cannot be read, and the model has "
                             "no older checkpoint"),
                    ReasonIs(ErrorReason::kCheckpointNotFound)));
}

// --- Copies ---

// The base of the next incarnation after a crash; `partitions` empty: every one stays.
std::optional<VersionId> BaseAfterCrash(const ModelRecord& record,
                                        const std::vector<Partition>& partitions = {}) {
  const absl::StatusOr<ModelRecord> next =
      BeginIncarnation(record, {.partitions = partitions.empty() ? record.partitions : partitions});
  EXPECT_THAT(next, IsOk());
  EXPECT_THAT(ParseModelRecord(kKey, TextOf(*next)), IsOkAndHolds(*next));
  EXPECT_EQ(next->copy.has_value(), next->BeginsWithCopy());
  return next->base;
}

GroupCopy CopyOf(int64_t version, int64_t incarnation = kIncarnation) {
  return {.id = {version, incarnation}, .step = 10 * version};
}

TEST(CopyTest, CrashGoesBackToTheNewerOneOfCopyAndCheckpoint) {
  EMA_ASSERT_OK_AND_ASSIGN(ModelRecord record, SetCopy(SomeRecord(), CopyOf(6)));
  EXPECT_EQ(BaseAfterCrash(record), (VersionId{6, kIncarnation}));
  // A message that was late.
  EXPECT_THAT(SetCopy(record, CopyOf(5)), IsOkAndHolds(record));
  EMA_ASSERT_OK_AND_ASSIGN(record, AddCheckpoint(record, kIncarnation, CheckpointOf(7)));
  EXPECT_EQ(BaseAfterCrash(record), (VersionId{7, kIncarnation}));
  EMA_ASSERT_OK_AND_ASSIGN(record, SetCopy(record, CopyOf(8)));
  EXPECT_EQ(BaseAfterCrash(record), (VersionId{8, kIncarnation}));
  // The same version is on the disk, which is the better place.
  EMA_ASSERT_OK_AND_ASSIGN(record, AddCheckpoint(record, kIncarnation, CheckpointOf(8)));
  EMA_ASSERT_OK_AND_ASSIGN(const ModelRecord next,
                           BeginIncarnation(record, {.partitions = record.partitions}));
  EXPECT_EQ(next.base, (VersionId{8, kIncarnation}));
  EXPECT_FALSE(next.copy.has_value());
}

TEST(CopyTest, TheNewestCheckpointRemainsDurableWhileTheBaseIsACopy) {
  EMA_ASSERT_OK_AND_ASSIGN(ModelRecord record, SetCopy(SomeRecord(), CopyOf(6)));
  for (int64_t crash = 1; crash <= 2; ++crash) {
    EMA_ASSERT_OK_AND_ASSIGN(record, BeginIncarnation(record, {.now_micros = kIncarnation + crash,
                                                               .partitions = record.partitions}));
    EXPECT_TRUE(record.BeginsWithCopy());
    ASSERT_NE(record.NewestCheckpoint(), nullptr);
    EXPECT_EQ(record.NewestCheckpoint()->id, (VersionId{5, 7}));  // Version 6 of it was discarded.
    EXPECT_THAT(RemoveCheckpoint(record, {5, 7}), ReasonIs(ErrorReason::kCheckpointInUse));
  }
  // The copied version is saved, and later a newer one is copied.
  EMA_ASSERT_OK_AND_ASSIGN(
      record, AddCheckpoint(record, record.incarnation, CheckpointOf(6, kIncarnation)));
  EXPECT_FALSE(record.BeginsWithCopy());
  EXPECT_EQ(record.NewestCheckpoint()->id, (VersionId{6, kIncarnation}));
  EMA_ASSERT_OK_AND_ASSIGN(record, SetCopy(record, CopyOf(7, record.incarnation)));
  EXPECT_THAT(ParseModelRecord(kKey, TextOf(record)), IsOkAndHolds(record));
  EXPECT_EQ(BaseAfterCrash(record), (VersionId{7, kIncarnation + 2}));
}

TEST(CopyTest, ACopyMayReplaceTheCopyThatWasTheBase) {
  EMA_ASSERT_OK_AND_ASSIGN(ModelRecord record, SetCopy(SomeRecord(), CopyOf(6)));
  EMA_ASSERT_OK_AND_ASSIGN(record, BeginIncarnation(record, {.partitions = record.partitions}));
  EMA_ASSERT_OK_AND_ASSIGN(record, SetCopy(record, CopyOf(7, record.incarnation)));
  EXPECT_THAT(ParseModelRecord(kKey, TextOf(record)), IsOkAndHolds(record));
  EXPECT_EQ(record.NewestCheckpoint()->id, (VersionId{5, 7}));
  EXPECT_EQ(BaseAfterCrash(record), (VersionId{7, kIncarnation + 1}));
}

TEST(CopyTest, ARollbackDiscardsTheCopy) {
  EMA_ASSERT_OK_AND_ASSIGN(ModelRecord record, SetCopy(SomeRecord(), CopyOf(6)));
  EMA_ASSERT_OK_AND_ASSIGN(
      record, BeginIncarnation(record, {.partitions = record.partitions, .base = VersionId{4, 7}}));
  EXPECT_FALSE(record.copy.has_value());
  EXPECT_EQ(BaseAfterCrash(record), (VersionId{4, 7}));
}

TEST(CopyTest, AMovedPartitionCannotLoadTheCopy) {
  EMA_ASSERT_OK_AND_ASSIGN(const ModelRecord record, SetCopy(SomeRecord(), CopyOf(6)));
  const VersionId copied = {6, kIncarnation};
  const VersionId stored = {5, 7};
  EXPECT_EQ(BaseAfterCrash(record, record.PartitionsWithBoot("ema-0", "new")), copied);
  std::vector<Partition> moved = record.partitions;
  moved[1].member = "ema-3";
  EXPECT_EQ(BaseAfterCrash(record, moved), stored);
  EXPECT_EQ(
      BaseAfterCrash(record, {{"ema-1", "b1", 0, 3}, {"ema-2", "b2", 3, 2}, {"ema-0", "b0", 5, 3}}),
      stored);
  EXPECT_EQ(BaseAfterCrash(record, {{"ema-1", "b1", 0, 5}, {"ema-0", "b0", 5, 3}}), stored);
}

TEST(CopyTest, ALostCopyIsReplacedByTheNewestCheckpoint) {
  EMA_ASSERT_OK_AND_ASSIGN(ModelRecord record, SetCopy(SomeRecord(), CopyOf(6)));
  EMA_ASSERT_OK_AND_ASSIGN(record, BeginIncarnation(record, {.partitions = record.partitions}));
  EMA_ASSERT_OK_AND_ASSIGN(const ModelRecord next,
                           BeginIncarnation(record, {.partitions = record.partitions,
                                                     .lost = VersionId{6, kIncarnation}}));
  EXPECT_EQ(next.base, (VersionId{5, 7}));
  EXPECT_FALSE(next.copy.has_value());
  EXPECT_EQ(next.checkpoints, record.checkpoints);
}

TEST(CopyTest, AModelWithOnlyACopySurvivesACrash) {
  ModelRecord record = {
      .state = State::kActive, .incarnation = kIncarnation, .partitions = SomeRecord().partitions};
  EXPECT_FALSE(record.SurvivesCrash());
  EMA_ASSERT_OK_AND_ASSIGN(record, SetCopy(record, CopyOf(1)));
  EXPECT_TRUE(record.SurvivesCrash());
  EMA_ASSERT_OK_AND_ASSIGN(record, BeginIncarnation(record, {.partitions = record.partitions}));
  EXPECT_EQ(record.base, (VersionId{1, kIncarnation}));
  EXPECT_EQ(record.NewestCheckpoint(), nullptr);
  EXPECT_THAT(BeginIncarnation(record, {.partitions = record.partitions, .lost = record.base}),
              ReasonIs(ErrorReason::kCheckpointNotFound));
}

TEST(ModelRecordTest, AnOldRegistryBeginsNoIncarnation) {
  const ModelRecord record = SomeRecord();
  EXPECT_THAT(BeginIncarnation(record, {.newest_stored_incarnation = kIncarnation + 1,
                                        .partitions = record.partitions}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("the folder has a checkpoint of 1760000001"),
                             HasSubstr("`emactl group recover`"))));
}

TEST(ModelRecordTest, CheckpointIsAddedOnceAndInItsIncarnation) {
  EMA_ASSERT_OK_AND_ASSIGN(ModelRecord record,
                           AddCheckpoint(SomeRecord(), kIncarnation, CheckpointOf(6)));
  EXPECT_EQ(record.checkpoints.back(), CheckpointOf(6));
  // A call that is repeated since its reply was lost.
  EXPECT_THAT(AddCheckpoint(record, kIncarnation, CheckpointOf(6)), IsOkAndHolds(record));
  GroupCheckpoint kept = CheckpointOf(6);
  kept.keep = true;
  EMA_ASSERT_OK_AND_ASSIGN(record, AddCheckpoint(record, kIncarnation, kept));
  EXPECT_TRUE(record.checkpoints.back().keep);
  EXPECT_THAT(AddCheckpoint(record, kIncarnation, CheckpointOf(6)), IsOkAndHolds(record));
  // A version that was loaded, and whose checkpoint was removed.
  EMA_ASSERT_OK_AND_ASSIGN(record, AddCheckpoint(record, kIncarnation, CheckpointOf(3, 7)));
  EXPECT_EQ(record.checkpoints.front(), CheckpointOf(3, 7));

  kept.total_bytes = 1;
  EXPECT_THAT(
      AddCheckpoint(record, kIncarnation, kept),
      StatusIs(absl::StatusCode::kAlreadyExists,
               HasSubstr("with 1 bytes was saved, but the record has it at step 60 with 4096")));
  EXPECT_THAT(
      AddCheckpoint(record, 7, CheckpointOf(8, 7)),
      AllOf(StatusIs(absl::StatusCode::kAborted, HasSubstr("was saved in 7, but 1760000000")),
            ReasonIs(ErrorReason::kFenced)));
}

TEST(ModelRecordTest, NeededCheckpointIsNotRemoved) {
  ModelRecord record = SomeRecord();
  const auto expect_in_use = [&](VersionId id, const char* why) {
    EXPECT_THAT(RemoveCheckpoint(record, id),
                AllOf(StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(why)),
                      ReasonIs(ErrorReason::kCheckpointInUse)));
  };
  expect_in_use({5, 7}, "version 5 of incarnation 7 is the one from which a restarted member");
  EXPECT_THAT(RemoveCheckpoint(record, {9, 9}), IsOkAndHolds(record));

  // All partitions have loaded the base if the incarnation has a checkpoint.
  EMA_ASSERT_OK_AND_ASSIGN(record, AddCheckpoint(record, kIncarnation, CheckpointOf(6)));
  EMA_ASSERT_OK_AND_ASSIGN(record, RemoveCheckpoint(record, {5, 7}));
  EXPECT_EQ(record.Find({5, 7}), nullptr);
  expect_in_use({6, kIncarnation}, "restarted member");
  EXPECT_THAT(ParseModelRecord(kKey, TextOf(record)), IsOkAndHolds(record));
}

}  // namespace
}  // namespace ema::group
