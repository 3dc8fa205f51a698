// SPDX-License-Identifier: Apache-2.0
#include "server/ops/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr char kTrainer[] = "trainer-6f1d2c70b4e94b0f";
constexpr char kEvaluator[] = "evaluator-0d0f6f0c0b3a";

class TokenFileTest : public testing::Test {
 protected:
  ~TokenFileTest() override { std::remove(path_.c_str()); }

  // As an operator should: by a rename.
  void Write(const std::string& text) const {
    std::ofstream(path_ + ".tmp") << text;
    ASSERT_EQ(std::rename((path_ + ".tmp").c_str(), path_.c_str()), 0);
  }
  absl::StatusOr<std::unique_ptr<TokenFile>> Open(const std::string& text) const {
    Write(text);
    return TokenFile::Open(path_);
  }
  static void LookTwice(TokenFile& file) {
    file.Refresh();
    file.Refresh();
  }
  static std::string Bearer(const std::string& token) { return "Bearer " + token; }

  // Of this process: tests run side by side.
  const std::string path_ = absl::StrCat(testing::TempDir(), "/ema_tokens-", getpid());
};

TEST_F(TokenFileTest, SaysWhatTheBearerOfEachTokenMayDo) {
  const auto file =
      Open(std::string("# who   token\n\n trainer\t") + kTrainer + " vision-* gpt\r\nevaluator " +
           kEvaluator + "\nserver server-token-0123456789");
  ASSERT_THAT(file, IsOk());
  EXPECT_EQ((*file)->Authenticate(Bearer("server-token-0123456789"))->role, Role::kServer);
  const auto trainer = (*file)->Authenticate(Bearer(kTrainer));
  ASSERT_THAT(trainer, IsOk());
  EXPECT_EQ(trainer->role, Role::kTrainer);
  EXPECT_THAT(trainer->models, ElementsAre("vision-*", "gpt"));
  EXPECT_TRUE(trainer->Covers("vision-7"));
  EXPECT_TRUE(trainer->Covers("vision-"));
  EXPECT_TRUE(trainer->Covers("gpt"));
  EXPECT_FALSE(trainer->Covers("gpt2"));
  EXPECT_FALSE(trainer->Covers("vision"));
  const auto evaluator = (*file)->Authenticate(Bearer(kEvaluator));
  ASSERT_THAT(evaluator, IsOk());
  EXPECT_EQ(evaluator->role, Role::kEvaluator);
  EXPECT_THAT(evaluator->models, IsEmpty());
  EXPECT_TRUE(evaluator->Covers("anything"));
}

TEST_F(TokenFileTest, AStarAloneIsAnyModel) {
  const auto file = Open(std::string("trainer ") + kTrainer + " *");
  ASSERT_THAT(file, IsOk());
  EXPECT_TRUE((*file)->Authenticate(Bearer(kTrainer))->Covers("anything"));
}

TEST_F(TokenFileTest, RefusesWhatIsNoKnownToken) {
  const auto file = Open(std::string("admin ") + kTrainer);
  ASSERT_THAT(file, IsOk());
  const std::string known = kTrainer;
  for (const std::string& authorization :
       {std::string(), known, Bearer(""), Bearer(known + "x"), Bearer(known.substr(1)),
        "bearer " + known, "Basic " + known, Bearer(known + " "), Bearer(" " + known)}) {
    EXPECT_THAT((*file)->Authenticate(authorization),
                AllOf(StatusIs(absl::StatusCode::kUnauthenticated, Not(HasSubstr(known))),
                      ReasonIs(ErrorReason::kBadToken)))
        << authorization;
  }
}

struct BadFile {
  const char* name;
  const char* text;
  const char* problem;
};
class BadTokenFileTest : public TokenFileTest, public testing::WithParamInterface<BadFile> {};

TEST_P(BadTokenFileTest, IsRefusedWithoutItsTokens) {
  EXPECT_THAT(Open(GetParam().text).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(GetParam().problem), Not(HasSubstr("secret")))));
}

INSTANTIATE_TEST_SUITE_P(
    Files, BadTokenFileTest,
    testing::Values(
        BadFile{"Empty", "", "line 1: the file has no tokens"},
        BadFile{"OnlyComments", "# secret\n", "the file has no tokens"},
        BadFile{"NoRole", "secret-6f1d2c70b4e94b0f", "line 1: the first word is not a role"},
        BadFile{"NoToken", "\nadmin\n", "line 2: expected a token of 16 to 512"},
        BadFile{"ShortToken", "admin secret", "line 1: expected a token of 16 to 512"},
        BadFile{"NotPrintable", "admin secret-6f1d2c70\xff-b4e94b0f", "printable"},
        BadFile{"Twice", "admin secret-6f1d2c70b4e94b0f\ntrainer secret-6f1d2c70b4e94b0f",
                "line 2: an earlier line has the same token"},
        BadFile{
            "StarInTheMiddle", "trainer secret-6f1d2c70b4e94b0f a*b",
            "line 1: word 3, \"a*b\": expected a model's name, or the beginning of one followed by "
            "\"*\""},
        BadFile{
            "CommentBehindAToken", "\nadmin secret-6f1d2c70b4e94b0f # the on-call's",
            "line 2: word 3, \"#\": expected a model's name, or the beginning of one followed by "
            "\"*\"; a comment needs a line of its own"},
        BadFile{"NoBeginningOfAName", "admin secret-6f1d2c70b4e94b0f gpt .tmp*",
                "line 1: word 4, \".tmp*\": expected"},
        BadFile{"NoName", "admin secret-6f1d2c70b4e94b0f a,b", "word 3, \"a,b\": expected"},
        BadFile{"ASecondToken", "admin token-6f1d2c70b4e94b0f secret-7a5b2c70b4e9/0f==",
                "line 1: word 3: expected a model's name"},
        BadFile{"ASecondTokenThatIsNotPrintable",
                "admin token-6f1d2c70b4e94b0f secret-7a5b2c70\xff-b4e94b0f",
                "line 1: word 3: expected a model's name"}),
    [](const auto& suite) { return suite.param.name; });

TEST_F(TokenFileTest, AMissingFileIsRefused) {
  EXPECT_THAT(TokenFile::Open(path_ + ".none"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cannot be read")));
}

TEST_F(TokenFileTest, AChangedFileIsTakenOverUnlessItIsWrong) {
  const auto file = Open(std::string("admin ") + kTrainer);
  ASSERT_THAT(file, IsOk());
  std::optional<absl::Status> told;
  (*file)->on_change = [&](const absl::Status& status) { told = status; };
  (*file)->Refresh();
  EXPECT_FALSE(told.has_value());

  Write("admin");
  LookTwice(**file);
  ASSERT_TRUE(told.has_value());
  EXPECT_THAT(*told, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("line 1")));
  EXPECT_THAT((*file)->Authenticate(Bearer(kTrainer)), IsOk());
  told.reset();
  LookTwice(**file);
  EXPECT_FALSE(told.has_value()) << "said once";

  Write(std::string("evaluator ") + kEvaluator);
  LookTwice(**file);
  EXPECT_THAT(told.value_or(absl::UnknownError("not told")), IsOk());
  EXPECT_THAT((*file)->Authenticate(Bearer(kEvaluator)), IsOk());
  EXPECT_THAT((*file)->Authenticate(Bearer(kTrainer)), ReasonIs(ErrorReason::kBadToken));
}

TEST_F(TokenFileTest, AFileThatIsBeingWrittenIsNotTakenOver) {
  const auto file = Open(std::string("admin ") + kTrainer);
  ASSERT_THAT(file, IsOk());
  int told = 0;
  (*file)->on_change = [&](const absl::Status&) { ++told; };
  std::ofstream writer(path_);
  writer << "evaluator " << kEvaluator << std::flush;
  (*file)->Refresh();
  writer << "\nadmin " << kTrainer << std::flush;
  EXPECT_FALSE((*file)->Refresh());
  EXPECT_THAT((*file)->Authenticate(Bearer(kTrainer)), IsOk());
  EXPECT_EQ(told, 0);
  EXPECT_TRUE((*file)->Refresh());
  EXPECT_THAT((*file)->Authenticate(Bearer(kEvaluator)), IsOk());
  EXPECT_THAT((*file)->Authenticate(Bearer(kTrainer)), IsOk());
  EXPECT_EQ(told, 1);
}

// Its writer may never come, and whoever looks at the tokens does other things, too.
TEST_F(TokenFileTest, APipeIsNotWaitedFor) {
  const auto file = Open(std::string("admin ") + kTrainer);
  ASSERT_THAT(file, IsOk());
  absl::Status told;
  (*file)->on_change = [&](const absl::Status& status) { told = status; };
  std::remove(path_.c_str());
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  LookTwice(**file);
  EXPECT_THAT(told, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not a regular file")));
  EXPECT_THAT((*file)->Authenticate(Bearer(kTrainer)), IsOk());
  EXPECT_THAT(TokenFile::Open(path_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not a regular file")));
}

TEST_F(TokenFileTest, AFileThatDisappearsIsToldOfOnce) {
  const auto file = Open(std::string("admin ") + kTrainer);
  ASSERT_THAT(file, IsOk());
  std::vector<absl::Status> told;
  (*file)->on_change = [&](const absl::Status& status) { told.push_back(status); };
  for (int times = 1; times <= 2; ++times) {
    std::remove(path_.c_str());
    LookTwice(**file);
    ASSERT_EQ(told.size(), 2 * times - 1);
    EXPECT_EQ((*file)->problem(), told.back());
    EXPECT_THAT(told.back(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(path_)));
    EXPECT_THAT((*file)->Authenticate(Bearer(kTrainer)), IsOk());
    Write(std::string("admin ") + kTrainer);
    LookTwice(**file);
    ASSERT_EQ(told.size(), 2 * times);
    EXPECT_THAT(told.back(), IsOk());
    EXPECT_THAT((*file)->problem(), IsOk());
  }
}

}  // namespace
}  // namespace ema
