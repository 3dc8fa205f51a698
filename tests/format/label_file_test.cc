// SPDX-License-Identifier: Apache-2.0
#include "server/format/label_file.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "server/format/checkpoint_name.h"
#include "server/format/json_file.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

LabelMap SomeLabels() {
  return {{"best",
           {.name = "best",
            .id = {12, 1760000000},
            .step = 400,
            .metric = -0.1,
            .lower_is_better = true}},
          {"stable", {.name = "stable", .id = {3, 7}, .step = 0}}};
}

TEST(LabelFileTest, WhatIsWrittenIsReadBack) {
  EXPECT_THAT(ParseLabels(EncodeLabels({})), IsOkAndHolds(LabelMap()));
  EXPECT_THAT(ParseLabels(EncodeLabels(SomeLabels())), IsOkAndHolds(SomeLabels()));
  LabelMap precise = SomeLabels();
  precise.at("best").metric = 0.1 + 0.2;
  EXPECT_THAT(ParseLabels(EncodeLabels(precise)), IsOkAndHolds(precise));
}

TEST(LabelFileTest, EveryChangedOrMissingByteIsDetected) {
  const std::string text = EncodeLabels(SomeLabels());
  for (size_t i = 0; i < text.size(); ++i) {
    std::string bad = text;
    bad[i] = static_cast<char>(bad[i] ^ 1);
    EXPECT_FALSE(ParseLabels(bad).ok()) << i;
    EXPECT_THAT(ParseLabels(text.substr(0, i)),
                AllOf(StatusIs(absl::StatusCode::kDataLoss, HasSubstr("LABELS.json: ")),
                      ReasonIs(ErrorReason::kCheckpointCorrupt)))
        << i;
  }
}

TEST(LabelFileTest, ANewerFormatIsRefusedByName) {
  EXPECT_THAT(ParseLabels(FormatJsonFile(3, Json::object())),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("LABELS.json: written in format_version 3; this build reads only "
                                 "2")));
}

TEST(LabelFileTest, ABadFieldIsNamed) {
  const Json good = SomeLabels().at("best");
  ASSERT_THAT(ParseLabels(FormatJsonFile(2, Json::object({{"labels", Json::array({good})}}))),
              IsOk());
  const auto expect_refused = [&good](const char* key, const Json& value, const char* message) {
    Json bad = good;
    bad[key] = value;
    EXPECT_THAT(
        ParseLabels(FormatJsonFile(2, Json::object({{"labels", Json::array({good, bad})}}))),
        AllOf(StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr(absl::StrCat("LABELS.json: labels[1]", message))),
              ReasonIs(ErrorReason::kCheckpointCorrupt)))
        << bad;
  };
  expect_refused("label", "../best", ": label \"../best\"");
  expect_refused("label", "best", ".label: \"best\" is there twice");
  expect_refused("label", 1, ".label is not a string");
  expect_refused("version", 0, ".version is not an integer");
  expect_refused("step", -1, ".step is not an integer");
  expect_refused("metric", "1", ".metric is not a number");
  expect_refused("note", "", ".note is not a field");
}

TEST(CheckpointNameTest, NamesOfPartsAndOfWhatIsSetAsideAreParsed) {
  const CheckpointId id{7, 3, 30};
  const std::string whole = CheckpointName(id);
  const std::string part = PartialCheckpointName(id, {"b", "a"});
  EXPECT_EQ(part, PartialCheckpointName(id, {"a", "b"}));
  EXPECT_NE(part, PartialCheckpointName(id, {"ab"}));
  EXPECT_EQ(part.substr(0, whole.size() + 6), whole + "-part-");
  EXPECT_EQ(ParseStoredName(whole), (StoredName{id, false}));
  EXPECT_EQ(ParseStoredName(part), (StoredName{id, true}));
  EXPECT_EQ(ParseCheckpointName(part), std::nullopt);
  EXPECT_EQ(ParseStoredName(part + "0"), std::nullopt);
  EXPECT_EQ(ParseStoredName(whole + "-part-0000000G"), std::nullopt);
  EXPECT_EQ(ParseStoredName(".corrupt-" + whole), std::nullopt);
  for (const CheckpointId& negative : {CheckpointId{-7, 3, 30}, {7, -3, 30}, {7, 3, -30}}) {
    EXPECT_EQ(ParseStoredName(CheckpointName(negative)), std::nullopt);
  }
  EXPECT_EQ(ParseSetAsideName(".corrupt-" + whole), (StoredName{id, false}));
  EXPECT_EQ(ParseSetAsideName(".corrupt-" + whole + "-12"), (StoredName{id, false}));
  EXPECT_EQ(ParseSetAsideName(".corrupt-" + part + "-1"), (StoredName{id, true}));
  EXPECT_EQ(ParseSetAsideName(".abandoned-" + whole), (StoredName{id, false}));
  EXPECT_EQ(ParseSetAsideName(".corrupt-LABELS.json"), std::nullopt);
  EXPECT_EQ(ParseSetAsideName(whole), std::nullopt);
}

}  // namespace
}  // namespace ema
