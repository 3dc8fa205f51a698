// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>

#include "ema/client.h"
#include "ema/internal/status_macros.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

v1::VersionRecord Record(int64_t incarnation, int64_t version) {
  v1::VersionRecord record;
  record.set_incarnation(incarnation);
  record.set_version(version);
  return record;
}

class WatchTest : public testing::Test {
 protected:
  void SetUp() override { EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_.address())); }

  // Until there are `count`.
  absl::Status Watch(std::optional<VersionId> after, size_t count,
                     absl::Duration timeout = absl::Seconds(20)) {
    EMA_ASSIGN_OR_RETURN(const auto watch, client_->Watch("m", after, timeout));
    while (seen_.size() < count) {
      EMA_ASSIGN_OR_RETURN(const VersionWatch::Item item, watch->Next());
      seen_.push_back(item.version.number);
    }
    return absl::OkStatus();
  }

  FakeServer server_{*Manifest::Create({{.name = "w", .shape = {4}}})};
  std::unique_ptr<Client> client_;
  std::vector<int64_t> seen_;
};

TEST_F(WatchTest, GivesEveryCommitToWhoAsks) {
  server_.watch_scripts = {{.versions = {Record(1, 4), Record(1, 5), Record(1, 6)}, .hold = true}};
  EXPECT_THAT(Watch(VersionId{.version = 3}, 2), IsOk());
  EXPECT_THAT(seen_, ElementsAre(4, 5));
  EXPECT_EQ(server_.watches()[0].after_version(), 3);
  EXPECT_EQ(server_.watches()[0].incarnation(), 0);
}

TEST_F(WatchTest, GoesOnWhereItWas) {
  server_.watch_scripts = {
      {.versions = {Record(1, 4)}},
      {.end = MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDraining, "x")},
      {.versions = {Record(1, 5)}, .hold = true}};
  EXPECT_THAT(Watch(VersionId{.version = 3}, 2), IsOk());
  EXPECT_THAT(seen_, ElementsAre(4, 5));
  EXPECT_EQ(server_.watches()[2].after_version(), 4);
  EXPECT_EQ(server_.watches()[2].incarnation(), 1);
}

TEST_F(WatchTest, SkipsWhatItHasSeenBeforeARestart) {
  server_.watch_scripts = {{.versions = {Record(1, 4), Record(1, 5)}},
                           {.versions = {Record(1, 4), Record(1, 5), Record(2, 6)}, .hold = true}};
  EXPECT_THAT(Watch(VersionId{.version = 3}, 3), IsOk());
  EXPECT_THAT(seen_, ElementsAre(4, 5, 6));
}

TEST_F(WatchTest, KnowsTheLivesOfAServerApart) {
  // It has gone back to version 4.
  server_.watch_scripts = {{.versions = {Record(1, 4), Record(2, 5), Record(2, 6)}, .hold = true}};
  EXPECT_THAT(Watch(VersionId{.version = 9, .incarnation = 1}, 2), IsOk());
  EXPECT_THAT(seen_, ElementsAre(5, 6));
  EXPECT_EQ(server_.watches()[0].after_version(), 9);
  EXPECT_EQ(server_.watches()[0].incarnation(), 1);
}

TEST_F(WatchTest, FromNowOnMeansFromTheCall) {
  server_.SetLatest(Record(3, 9));
  server_.watch_scripts = {{}, {.versions = {Record(3, 10)}, .hold = true}};
  EXPECT_THAT(Watch(std::nullopt, 1), IsOk());
  EXPECT_EQ(server_.watches()[1].after_version(), 9);
  EXPECT_EQ(server_.watches()[1].incarnation(), 3);
}

TEST_F(WatchTest, FromNowOnBeforeTheFirstCommitMissesNone) {
  server_.watch_scripts = {{}, {.versions = {Record(3, 1), Record(3, 2)}, .hold = true}};
  EXPECT_THAT(Watch(std::nullopt, 2), IsOk());
  EXPECT_THAT(seen_, ElementsAre(1, 2));
  EXPECT_TRUE(server_.watches()[0].has_after_version());
  EXPECT_EQ(server_.watches()[0].after_version(), 0);
}

TEST_F(WatchTest, EndsWithoutCommitsAfterTheTimeOut) {
  server_.watch_scripts = {{.hold = true}};
  const absl::Time start = absl::Now();
  EXPECT_THAT(Watch(VersionId{.version = 1}, 1, absl::Seconds(2)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("no commit for 2s")));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  EXPECT_THAT(seen_, IsEmpty());
}

TEST_F(WatchTest, MayBeAskedAgainAfterTheTimeOut) {
  server_.watch_scripts = {{.hold = true}, {.versions = {Record(1, 2)}, .hold = true}};
  EMA_ASSERT_OK_AND_ASSIGN(const auto watch,
                           client_->Watch("m", VersionId{.version = 1}, absl::Seconds(2)));
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(watch->Next(),
                StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("no commit for")));
  }
  EXPECT_THAT(server_.watches(), SizeIs(1));
  server_.Release();
  EMA_ASSERT_OK_AND_ASSIGN(const VersionWatch::Item item, watch->Next());
  EXPECT_EQ(item.version.number, 2);
}

TEST_F(WatchTest, TheTimeOutIsThatOfEachItem) {
  server_.watch_scripts = {{.versions = {Record(1, 2), Record(1, 3)}, .hold = true}};
  EMA_ASSERT_OK_AND_ASSIGN(const auto watch,
                           client_->Watch("m", VersionId{.version = 1}, absl::Seconds(2)));
  EXPECT_THAT(watch->Next(), IsOk());
  absl::SleepFor(absl::Milliseconds(2500));  // A reader that is slow has not waited.
  EXPECT_THAT(watch->Next(), IsOk());
}

TEST_F(WatchTest, OutlivesItsClient) {
  server_.watch_scripts = {{.versions = {Record(1, 2)}}, {.versions = {Record(1, 3)}}};
  EMA_ASSERT_OK_AND_ASSIGN(const auto watch, client_->Watch("m", VersionId{.version = 1}));
  EXPECT_THAT(watch->Next(), IsOk());
  client_ = nullptr;
  EXPECT_THAT(watch->Next(), IsOk());
}

TEST_F(WatchTest, EndsAtOnceWithoutAskingForAnInterrupt) {
  server_.watch_scripts = {{.versions = {Record(1, 2)}, .hold = true}};
  std::atomic<bool> may_ask = true;
  EMA_ASSERT_OK_AND_ASSIGN(const auto client,
                           Client::Create(server_.address(), {.is_interrupted = [&may_ask] {
                                            EXPECT_TRUE(may_ask);
                                            return false;
                                          }}));
  EMA_ASSERT_OK_AND_ASSIGN(auto watch, client->Watch("m", VersionId{.version = 1}));
  EXPECT_THAT(watch->Next(), IsOk());
  may_ask = false;
  watch = nullptr;
}

TEST_F(WatchTest, TheTimeOutCountsWhileTheServerIsAway) {
  server_.Stop();
  EXPECT_THAT(Watch(VersionId{.version = 1}, 1, absl::Seconds(2)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("refused")));
}

TEST_F(WatchTest, EndsWithTheModel) {
  server_.watch_scripts = {
      {.versions = {Record(1, 2)},
       .end = MakeError(absl::StatusCode::kNotFound, ErrorReason::kModelNotFound, "deleted")}};
  EXPECT_THAT(Watch(VersionId{.version = 1}, 5), ReasonIs(ErrorReason::kModelNotFound));
  EXPECT_THAT(seen_, ElementsAre(2));
}

TEST_F(WatchTest, AnInterruptEndsIt) {
  server_.watch_scripts = {{.hold = true}};
  const absl::Time start = absl::Now();
  const auto client = Client::Create(server_.address(), {.is_interrupted = [&] {
                                       return absl::Now() - start > absl::Milliseconds(100);
                                     }});
  ASSERT_THAT(client, IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto watch, (*client)->Watch("m", VersionId{.version = 1}));
  EXPECT_THAT(watch->Next(), StatusIs(absl::StatusCode::kCancelled, HasSubstr("interrupted")));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

}  // namespace
}  // namespace ema
