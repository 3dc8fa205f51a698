// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/retention.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/data_directory.h"
#include "tests/testutil/fake_file_system.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The version of each step is a tenth of it.
CheckpointId IdOfStep(int64_t step) {
  return {.incarnation = 1, .version = step / 10, .step = step};
}
std::string Whole(int64_t step) { return CheckpointName(IdOfStep(step)); }
std::string Partial(int64_t step) { return PartialCheckpointName(IdOfStep(step), {"ema"}); }
std::string Abandoned(int64_t step) {
  return absl::StrCat(std::string(kAbandonedPrefix), Whole(step));
}

class RetentionTest : public ::testing::Test {
 protected:
  RetentionTest() {
    EXPECT_THAT(data_->MakeCheckpointsFolder("m"), IsOk());
    for (int64_t step = 10; step <= 50; step += 10) Make(Whole(step));
  }

  void Make(const std::string& name) {
    EXPECT_THAT(disk_.CreateDirectory(files_.Path(name)), IsOk());
  }
  std::vector<std::string> Expired(const RetentionRules& rules) {
    const auto expired = FindExpiredCheckpoints(files_, rules);
    EXPECT_THAT(expired, IsOk());
    return expired.ok() ? *expired : std::vector<std::string>();
  }

  FakeFileSystem disk_;
  std::unique_ptr<DataDirectory> data_ =
      *DataDirectory::Open(disk_, "/data", /*log=*/nullptr, absl::FromUnixSeconds(1'760'000'000));
  FolderFiles files_{*data_, "m"};
};

TEST_F(RetentionTest, KeepsTheNewestOfEachKind) {
  for (const int64_t step : {20, 30, 40}) Make(Partial(step));
  for (const int64_t step : {60, 70}) Make(Abandoned(step));
  EXPECT_THAT(Expired({.keep_count = 2}),
              ElementsAre(Whole(30), Whole(20), Whole(10), Partial(20), Abandoned(60)));
}

TEST_F(RetentionTest, KeepsLabelsMultiplesTheLatestAndTheSavedOne) {
  const LabelMap labels = {{"best", {.name = "best", .id = {2, 1}, .step = 20}}};
  EXPECT_THAT(Expired({.keep_count = 1}), ElementsAre(Whole(40), Whole(30), Whole(20), Whole(10)));
  EXPECT_THAT(Expired({.keep_count = 1, .labels = labels}),
              ElementsAre(Whole(40), Whole(30), Whole(10)));
  EXPECT_THAT(Expired({.keep_count = 1, .keep_step_multiple = 20}),
              ElementsAre(Whole(30), Whole(10)));
  EXPECT_THAT(Expired({.keep_count = 1, .latest = IdOfStep(30)}),
              ElementsAre(Whole(40), Whole(20), Whole(10)));
  EXPECT_THAT(Expired({.keep_count = 1, .saved_name = Whole(10)}),
              ElementsAre(Whole(40), Whole(30), Whole(20)));
}

TEST_F(RetentionTest, NeitherKeepsNorCountsThoseWithAKeepFile) {
  EXPECT_THAT(files_.Keep(files_.Path(Whole(50))), IsOk());
  EXPECT_THAT(files_.Keep(files_.Path(Whole(10))), IsOk());
  EXPECT_THAT(Expired({.keep_count = 2}), ElementsAre(Whole(20)));
}

TEST_F(RetentionTest, IgnoresOtherNames) {
  for (const char* name : {".corrupt-x", "notes"}) Make(name);
  Make(absl::StrCat(std::string(kCorruptPrefix), Whole(10)));
  EXPECT_THAT(Expired({.keep_count = 5}), IsEmpty());
}

TEST_F(RetentionTest, AFailedDiskExpiresNothing) {
  disk_.set_hook([](const std::string& operation, const std::string&) {
    return operation == "exists" ? absl::UnavailableError("I/O error") : absl::OkStatus();
  });
  EXPECT_THAT(FindExpiredCheckpoints(files_, {}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("I/O error")));
  disk_.set_hook(nullptr);
}

}  // namespace
}  // namespace ema
