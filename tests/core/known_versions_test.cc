// SPDX-License-Identifier: Apache-2.0
#include "server/core/known_versions.h"

#include <string>

#include "ema/error_reason.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

KnownVersion Known(int64_t version, int64_t step, bool can_restore = true,
                   int64_t incarnation = 7) {
  return {.id = {version, incarnation}, .step = step, .can_restore = can_restore};
}

Version RecordOf(const KnownVersion& version) {
  Version record;
  record.number = version.id.version;
  record.incarnation = version.id.incarnation;
  record.step = version.step;
  return record;
}

std::vector<int64_t> Numbers(const std::vector<KnownVersion>& versions) {
  std::vector<int64_t> numbers;
  for (const KnownVersion& version : versions) numbers.push_back(version.id.version);
  return numbers;
}

TEST(BranchOfTest, LeavesOutFuturesThatWereGivenUp) {
  // 5 is a rollback to 2; 3 and 4 are no part of what came of it.
  const std::vector<KnownVersion> known = {Known(6, 25), Known(5, 20), Known(4, 40),
                                           Known(3, 30), Known(2, 20), Known(1, 10)};
  EXPECT_EQ(Numbers(BranchOf(known, RecordOf(known[0]))), (std::vector<int64_t>{6, 5, 2, 1}));
}

TEST(BranchOfTest, LeavesOutWhatACrashHasGivenUp) {
  // The server came back with version 2 of its earlier life.
  const std::vector<KnownVersion> known = {Known(3, 25, true, 8), Known(4, 40), Known(3, 30),
                                           Known(2, 20)};
  const auto branch = BranchOf(known, RecordOf(known[0]));
  EXPECT_EQ(Numbers(branch), (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(branch[0].id.incarnation, 8);
}

TEST(BranchOfTest, AVersionOfTheSameStepOnAnotherBranchIsNotOnThisOne) {
  // 4 is a rollback to 1; 5 is of the step that 2 was of.
  const std::vector<KnownVersion> known = {Known(5, 20), Known(4, 10), Known(3, 30), Known(2, 20),
                                           Known(1, 10)};
  EXPECT_EQ(Numbers(BranchOf(known, RecordOf(known[0]))), (std::vector<int64_t>{5, 4, 1}));
}

TEST(BranchOfTest, GoesOnWithWhatWasRestoredAlsoBehindAnotherRestore) {
  // 4 is a rollback to 1, from which 5 came; 6 is one to 3.
  std::vector<KnownVersion> known = {Known(6, 30), Known(5, 20), Known(4, 10),
                                     Known(3, 30), Known(2, 20), Known(1, 10)};
  known[0].restored_from = known[3].id;
  known[2].restored_from = known[5].id;
  EXPECT_EQ(Numbers(BranchOf(known, RecordOf(known[0]))), (std::vector<int64_t>{6, 3, 2, 1}));
  EXPECT_EQ(Numbers(BranchOf(absl::MakeSpan(known).subspan(1), RecordOf(known[1]))),
            (std::vector<int64_t>{5, 4, 1}));
}

TEST(VersionAfterStepTest, IsTheOneOfThatStep) {
  const std::vector<KnownVersion> branch = {Known(4, 40), Known(3, 30), Known(1, 10)};
  EXPECT_EQ(VersionAfterStep(branch, 30), (VersionId{3, 7}));
  EXPECT_EQ(VersionAfterStep(branch, 10), (VersionId{1, 7}));
  EXPECT_EQ(VersionAfterStep(branch, 9), std::nullopt);
}

TEST(VersionAfterStepTest, IsTheOneBeforeIfTheNextIsKnownToBeLater) {
  const std::vector<KnownVersion> branch = {Known(4, 40), Known(3, 30, /*can_restore=*/false),
                                            Known(2, 20), Known(1, 10, false)};
  EXPECT_EQ(VersionAfterStep(branch, 25), (VersionId{2, 7}));
  // Known, but gone.
  EXPECT_EQ(VersionAfterStep(branch, 30), std::nullopt);
  EXPECT_EQ(VersionAfterStep(branch, 35), std::nullopt);
  EXPECT_EQ(VersionAfterStep(branch, 15), std::nullopt);
}

TEST(VersionAfterStepTest, WithAGapNobodyKnows) {
  const std::vector<KnownVersion> branch = {Known(4, 40), Known(2, 20)};
  EXPECT_EQ(VersionAfterStep(branch, 25), std::nullopt);
  EXPECT_EQ(VersionAfterStep(branch, 20), (VersionId{2, 7}));
  EXPECT_EQ(VersionAfterStep(branch, 25, /*is_complete=*/true), (VersionId{2, 7}));
  EXPECT_EQ(VersionAfterStep(branch, 19, /*is_complete=*/true), std::nullopt);
}

TEST(VersionAfterStepTest, ARollbackIsWhatItWentBackTo) {
  std::vector<KnownVersion> branch = {Known(5, 30), Known(4, 20, /*can_restore=*/false),
                                      Known(2, 20), Known(1, 10)};
  // 4 is gone, but it was 2.
  EXPECT_EQ(VersionAfterStep(branch, 20), (VersionId{2, 7}));
  EXPECT_EQ(VersionAfterStep(branch, 25), (VersionId{2, 7}));
  EXPECT_EQ(VersionAfterStep(branch, 15), (VersionId{1, 7}));
  // 2 is not known any more, but 4 says that it went back to it.
  branch = {Known(5, 30), Known(4, 20), Known(1, 10)};
  EXPECT_EQ(VersionAfterStep(branch, 15), std::nullopt);
  branch[1].restored_from = VersionId{2, 7};
  EXPECT_EQ(VersionAfterStep(branch, 15), (VersionId{1, 7}));
}

TEST(VersionAtStepTest, IsTheNewestOfThatStepWithValues) {
  const std::vector<KnownVersion> branch = {Known(6, 40), Known(5, 20, /*can_restore=*/false),
                                            Known(2, 20), Known(1, 0)};
  EXPECT_THAT(VersionAtStep("m", branch, 40), IsOkAndHolds(VersionId{6, 7}));
  EXPECT_THAT(VersionAtStep("m", branch, 20), IsOkAndHolds(VersionId{2, 7}));
  EXPECT_THAT(VersionAtStep("m", branch, 0), IsOkAndHolds(VersionId{1, 7}));
  EXPECT_EQ(GetErrorReason(VersionAtStep("m", branch, 41).status()), ErrorReason::kVersionNotYet);
  const absl::StatusOr<VersionId> none = VersionAtStep("m", branch, 30);
  EXPECT_EQ(GetErrorReason(none.status()), ErrorReason::kVersionNotKept);
  EXPECT_THAT(none, StatusIs(absl::StatusCode::kOutOfRange,
                             ::testing::HasSubstr("there are step 0 (version 1), step 20 (version "
                                                  "2), step 40 (version 6)")));
}

TEST(ListNearestTest, NamesTheNearestInTheirOrder) {
  std::vector<KnownVersion> known;
  for (int64_t version = 30; version > 0; --version) known.push_back(Known(version, 10 * version));
  known[28].can_restore = false;  // Version 2.
  const std::string text = ListNearest(known, 1);
  EXPECT_EQ(text.substr(0, 38), "step 10 (version 1), step 30 (version ");
  EXPECT_NE(text.find("step 170 (version 17)"), std::string::npos);
  EXPECT_EQ(text.find("step 180"), std::string::npos);
  EXPECT_EQ(ListNearest({}, 1), "none");
}

}  // namespace
}  // namespace ema
