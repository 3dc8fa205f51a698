// SPDX-License-Identifier: Apache-2.0
//
// A data directory that the servers of a group share.
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "server/checkpoint/data_directory.h"
#include "tests/testutil/fake_file_system.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::_;
using ::testing::AllOf;
using ::testing::HasSubstr;

const absl::Time kNow = absl::FromUnixSeconds(1'760'000'000);

class SharedDirectoryTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<DataDirectory>> Open(const std::string& member) {
    return DataDirectory::Open(files_, "/data", nullptr, kNow, member);
  }
  bool Exists(const std::string& path) { return *files_.Exists(path); }

  FakeFileSystem files_;
};

TEST_F(SharedDirectoryTest, EachMemberHasALockAndAnIncarnation) {
  EMA_ASSERT_OK_AND_ASSIGN(auto a, Open("a"));
  EMA_ASSERT_OK_AND_ASSIGN(const auto b, Open("b"));
  EXPECT_THAT(Open("a").status(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                           HasSubstr("used by another process of member \"a\"")));
  EXPECT_TRUE(Exists("/data/members/a/LOCK"));
  EXPECT_TRUE(Exists("/data/members/b/INCARNATION"));
  EXPECT_FALSE(Exists("/data/LOCK"));
  EXPECT_FALSE(Exists("/data/INCARNATION"));
  EXPECT_THAT(a->CheckWritable(), IsOk());
  EXPECT_THAT(b->CheckWritable(), IsOk());
  ASSERT_THAT(a->WriteScrubTime(kNow), IsOk());
  EXPECT_THAT(b->ReadScrubTime().status(), StatusIs(absl::StatusCode::kNotFound, _));

  const int64_t before = a->incarnation();
  a.reset();
  EMA_ASSERT_OK_AND_ASSIGN(a, Open("a"));
  EXPECT_GE(a->incarnation(), before + DataDirectory::kIncarnationsPerStart);
}

TEST_F(SharedDirectoryTest, AMemberIsTheNameOfAFolder) {
  EXPECT_THAT(Open("../a").status(), AllOf(StatusIs(absl::StatusCode::kInvalidArgument, _),
                                           ReasonIs(ErrorReason::kBadName)));
}

TEST_F(SharedDirectoryTest, AMemberDoesNotClearWhatOthersAreWriting) {
  EMA_ASSERT_OK_AND_ASSIGN(auto a, Open("a"));
  ASSERT_THAT(a->MakeCheckpointsFolder("m"), IsOk());
  const std::string unfinished = a->CheckpointsPath("m") + "/.tmp-step";
  ASSERT_THAT(files_.CreateDirectory(unfinished), IsOk());
  ASSERT_THAT(files_.CreateDirectory("/data/members/a/.tmp-x"), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(auto b, Open("b"));
  EXPECT_TRUE(Exists(unfinished));
  EXPECT_TRUE(Exists("/data/members/a/.tmp-x"));
  a.reset();
  EMA_ASSERT_OK_AND_ASSIGN(a, Open("a"));
  EXPECT_TRUE(Exists(unfinished));
  EXPECT_FALSE(Exists("/data/members/a/.tmp-x"));
  a.reset();
  b.reset();
  ASSERT_THAT(Open("").status(), IsOk());
  EXPECT_FALSE(Exists(unfinished));
}

TEST_F(SharedDirectoryTest, ASingleServerAndMembersExcludeEachOther) {
  EMA_ASSERT_OK_AND_ASSIGN(auto a, Open("a"));
  EXPECT_THAT(Open("").status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("used by another server"), HasSubstr("members/a"))));
  a.reset();
  EMA_ASSERT_OK_AND_ASSIGN(const auto single, Open(""));
  EXPECT_THAT(Open("a").status(), StatusIs(absl::StatusCode::kFailedPrecondition, _));
}

TEST_F(SharedDirectoryTest, AllMembersOfAGroupGetTheSameId) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Open("a"));
  EMA_ASSERT_OK_AND_ASSIGN(const auto b, Open("b"));
  EMA_ASSERT_OK_AND_ASSIGN(const std::string id, a->GroupId("g"));
  EXPECT_EQ(id.size(), 32u);
  EXPECT_THAT(a->GroupId("g"), IsOkAndHolds(id));
  EXPECT_THAT(b->GroupId("g"), IsOkAndHolds(id));
  EXPECT_THAT(b->GroupId("other").status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("belongs to group \"g\", expected \"other\" (--group)")));
  EXPECT_THAT(b->GroupId("g/h").status(), StatusIs(absl::StatusCode::kInvalidArgument, _));
  // The models of the group do not make it that of a single server.
  ASSERT_THAT(a->MakeCheckpointsFolder("m"), IsOk());
  EXPECT_THAT(b->GroupId("g"), IsOkAndHolds(id));
  files_.FileBytes("/data/GROUP/ID") = "g";
  EXPECT_THAT(b->GroupId("g").status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("GROUP/ID is damaged")));
}

TEST_F(SharedDirectoryTest, OfTwoFirstMembersOneWritesTheId) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Open("a"));
  EMA_ASSERT_OK_AND_ASSIGN(const auto b, Open("b"));
  std::string of_b;
  bool is_first = true;
  files_.set_hook([&](const std::string& operation, const std::string& path) -> absl::Status {
    if (operation == "rename" && absl::StrContains(path, "/data/.tmp-group-") &&
        !absl::StrContains(path, "ID") && std::exchange(is_first, false)) {
      of_b = *b->GroupId("g");
    }
    return absl::OkStatus();
  });
  EMA_ASSERT_OK_AND_ASSIGN(const std::string of_a, a->GroupId("g"));
  EXPECT_FALSE(is_first);
  EXPECT_EQ(of_a, of_b);
  for (const std::string& path : files_.AllPaths()) {
    EXPECT_FALSE(absl::StrContains(path, ".tmp-")) << path;
  }
}

TEST_F(SharedDirectoryTest, ADirectoryOfASingleServerIsRefused) {
  {
    EMA_ASSERT_OK_AND_ASSIGN(const auto single, Open(""));
    ASSERT_THAT(single->MakeCheckpointsFolder("m"), IsOk());
  }
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Open("a"));
  EXPECT_THAT(
      a->GroupId("g").status(),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("belongs to a server without a group (it has LOCK, but not GROUP)")));
  ASSERT_THAT(files_.RemoveFile("/data/LOCK"), IsOk());
  EXPECT_THAT(a->GroupId("g").status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("it has models/m")));
}

TEST_F(SharedDirectoryTest, TheIdIsFoundWithoutAChange) {
  const auto find = [&] { return DataDirectory::FindGroupId(files_, "/data", "g"); };
  const size_t path_count = files_.AllPaths().size();
  EXPECT_THAT(find().status(), StatusIs(absl::StatusCode::kNotFound, _));
  EXPECT_EQ(files_.AllPaths().size(), path_count);
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Open("a"));
  EXPECT_THAT(find().status(), StatusIs(absl::StatusCode::kNotFound, _));
  EMA_ASSERT_OK_AND_ASSIGN(const std::string id, a->GroupId("g"));
  EXPECT_THAT(find(), IsOkAndHolds(id));
}

TEST_F(SharedDirectoryTest, TheIdSurvivesAPowerLoss) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto a, Open("a"));
  EMA_ASSERT_OK_AND_ASSIGN(const std::string id, a->GroupId("g"));
  const auto after = files_.AfterCrash(PowerLoss::kNothing);
  EMA_ASSERT_OK_AND_ASSIGN(const auto again,
                           DataDirectory::Open(*after, "/data", nullptr, kNow, "b"));
  EXPECT_THAT(again->GroupId("g"), IsOkAndHolds(id));
}

}  // namespace
}  // namespace ema
