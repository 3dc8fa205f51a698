// SPDX-License-Identifier: Apache-2.0
//
// What CheckpointManager makes of checkpoints that it reads again.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/heartbeat.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "tests/checkpoint/test_manager.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class CheckpointScrubTest : public testing::Test {
 protected:
  static std::string PathOf(const std::string& name) {
    return absl::StrCat(kTestFolder, "/", name);
  }
  void Damage(const std::string& name) {
    files_.FileBytes(PathOf(name) + "/tracks/raw/model.safetensors").back() ^= 1;
  }
  void FailReading(const std::string& name,
                   const absl::Status& error = absl::UnavailableError("Input/output error")) {
    files_.set_hook([=](const std::string& operation, const std::string& path) {
      const bool is_bad = operation == "read" && path.starts_with(PathOf(name) + "/tracks/raw");
      return is_bad ? error : absl::OkStatus();
    });
  }
  FakeFileSystem files_;
};

TEST_F(CheckpointScrubTest, AScrubSetsBadOnesAsideAndSavesTheNewestAnew) {
  TestServer server(files_);
  server.PushTo(1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved, server.Save());
  EXPECT_EQ(server.manager().Scrub(server.models()).bad_count, 0);
  Damage(saved.name);
  EXPECT_EQ(server.manager().Scrub(server.models()).bad_count, 1);
  server.manager().AwaitIdle();
  EMA_ASSERT_OK_AND_ASSIGN(const auto listing, server.manager().List(server.model()));
  EXPECT_THAT(listing.checkpoints, SizeIs(2));
  EXPECT_THAT(server.Complete(), ElementsAre(1));
  ASSERT_THAT(server.errors(), SizeIs(1));
  EXPECT_THAT(server.errors()[0], HasSubstr("track \\\"raw\\\""));
  EXPECT_EQ(server.manager().Scrub(server.models()).bad_count, 0);
  const auto after = files_.AfterCrash(PowerLoss::kNothing);
  TestServer next(*after);
  EXPECT_EQ(next.version(), 1);
}

TEST_F(CheckpointScrubTest, AScrubHasTheNewestSavedAnewIfTheDiskCannotReadIt) {
  TestServer server(files_);
  server.PushTo(1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto first, server.Save());
  server.PushTo(2);
  EMA_ASSERT_OK_AND_ASSIGN(const auto newest, server.Save(0, "best"));
  FailReading(newest.name);
  EXPECT_EQ(server.manager().Scrub(server.models()).unreadable_count, 1);
  server.manager().AwaitIdle();
  EXPECT_THAT(server.errors(),
              ElementsAre(AllOf(HasSubstr("checkpoint not readable"), HasSubstr(newest.name)),
                          AllOf(HasSubstr("checkpoint set aside"), HasSubstr(newest.name),
                                HasSubstr("Input/output error"))));
  EXPECT_EQ(server.manager().CountAll()["m"].complete, 2);
  EXPECT_EQ(server.manager().CountAll()["m"].corrupt, 1);
  EXPECT_THAT(server.Complete(), ElementsAre(2, 1));
  EMA_ASSERT_OK_AND_ASSIGN(const VersionId best,
                           server.manager().FindLabel(server.model(), "best"));
  EXPECT_EQ(best.version, 2);
  // Another is not in memory any more.
  FailReading(first.name);
  EXPECT_EQ(server.manager().Scrub(server.models()).unreadable_count, 1);
  server.manager().AwaitIdle();
  EXPECT_EQ(server.manager().CountAll()["m"].unreadable, 1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto info, server.manager().Get(server.model(), first.name));
  EXPECT_THAT(info.problem, HasSubstr("Input/output error"));
  files_.set_hook(nullptr);
  const CheckpointManager::ScrubReport report = server.manager().Scrub(server.models());
  EXPECT_TRUE(report.is_complete);
  EXPECT_EQ(report.unreadable_count + report.bad_count, 0);
  EXPECT_EQ(server.manager().CountAll()["m"].unreadable, 0);
  const auto after = files_.AfterCrash(PowerLoss::kNothing);
  TestServer next(*after);
  EXPECT_EQ(next.version(), 2);
}

TEST_F(CheckpointScrubTest, AScrubEndsInTheMiddleOfACheckpointWhenTheDrainBegins) {
  TestServer server(files_);
  server.PushTo(1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved, server.Save());
  server.PushTo(2);
  const std::string tracks = absl::StrCat(kTestFolder, "/", saved.name, "/tracks/");
  server.models().Drain(SteadyNow());
  std::vector<std::string> read;
  files_.set_hook([&](const std::string& operation, const std::string& path) {
    if (operation != "read" || !path.starts_with(tracks)) return absl::OkStatus();
    read.push_back(path.substr(tracks.size()));
    return read.size() == 1 ? server.manager().Drain(server.models()) : absl::OkStatus();
  });
  EXPECT_FALSE(server.manager().Scrub(server.models()).is_complete);
  EXPECT_THAT(read, Not(Contains("raw/model.safetensors")));
  EXPECT_THAT(server.errors(), IsEmpty());
  EXPECT_THAT(server.Complete(), ElementsAre(2, 1));
}

TEST_F(CheckpointScrubTest, WhatWasLoadedInTheNewestsPlaceIsSavedAnewWhenItGoesBad) {
  std::vector<std::string> names;
  {
    TestServer server(files_);
    for (int64_t version = 1; version <= 3; ++version) {
      server.PushTo(version);
      names.push_back(server.Save()->name);
    }
  }
  Damage(names[2]);
  {
    TestServer server(files_);
    EXPECT_EQ(server.version(), 2);
    Damage(names[1]);
    EXPECT_EQ(server.manager().Scrub(server.models()).bad_count, 1);
    server.manager().AwaitIdle();
    EXPECT_THAT(server.Complete(), ElementsAre(2, 1));
  }
  TestServer server(files_);
  EXPECT_EQ(server.version(), 2);
}

TEST_F(CheckpointScrubTest, WhatIsSavedAnewIsKeptIfItWas) {
  for (const bool is_damaged : {false, true}) {
    TestServer server(files_);
    server.PushTo(server.version() + 1);
    EMA_ASSERT_OK_AND_ASSIGN(const auto saved, server.Save());
    // It was bad before it had one.
    Damage(saved.name);
    server.manager().Scrub(server.models());
    server.manager().AwaitIdle();
    const std::string keep = PathOf(saved.name) + "/KEEP";
    ASSERT_THAT(files_.NewWritableFile(keep), IsOk());
    if (is_damaged) {
      Damage(saved.name);
    } else {
      FailReading(saved.name);
    }
    server.manager().Scrub(server.models());
    server.manager().AwaitIdle();
    files_.set_hook(nullptr);
    EXPECT_TRUE(*files_.Exists(PathOf(".corrupt-" + saved.name + "-1")));
    EXPECT_TRUE(*files_.Exists(keep)) << is_damaged;
  }
}

TEST_F(CheckpointScrubTest, WhatTheDiskHasNotRefusedIsLeftAsItIs) {
  TestServer server(files_);
  server.PushTo(1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved, server.Save());
  FailReading(saved.name, absl::ResourceExhaustedError("Too many open files"));
  const CheckpointManager::ScrubReport report = server.manager().Scrub(server.models());
  EXPECT_EQ(report.bad_count, 0);
  EXPECT_EQ(report.unreadable_count, 0);
  EXPECT_EQ(report.skipped_count, 1);
  server.manager().AwaitIdle();
  EXPECT_THAT(server.errors(), ElementsAre(AllOf(HasSubstr("checkpoint not read again"),
                                                 HasSubstr("Too many open files"))));
  EXPECT_EQ(server.manager().CountAll()["m"].complete, 1);
  EXPECT_EQ(server.manager().CountAll()["m"].corrupt, 0);
}

TEST_F(CheckpointScrubTest, ASaveThatItWaitsForIsNotItsOwnWork) {
  Heartbeats heartbeats;
  CheckpointManager::Options options;
  options.heartbeats = &heartbeats;
  TestServer server(files_, std::move(options));
  server.PushTo(1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved, server.Save());
  const auto is_silent = [&] {
    const auto now = Heartbeats::Clock::now();
    heartbeats.Poll(now);
    for (const Heartbeats::Age& age : heartbeats.Ages(now + std::chrono::hours(1))) {
      if (age.name == "checkpoint-scrub") return age.silent_time > std::chrono::minutes(1);
    }
    return false;
  };
  bool was_silent_reading = false;
  bool was_silent_after = false;
  files_.set_hook([&](const std::string& operation, const std::string& path) {
    if (operation == "read" && path.starts_with(PathOf(saved.name))) {
      was_silent_reading |= is_silent();
      return absl::UnavailableError("Input/output error");
    }
    // It looks for the newest, with the lock that a save holds.
    if (operation == "list" && path == kTestFolder) was_silent_after |= is_silent();
    return absl::OkStatus();
  });
  EXPECT_EQ(server.manager().Scrub(server.models()).unreadable_count, 1);
  server.manager().AwaitIdle();
  files_.set_hook(nullptr);
  EXPECT_TRUE(was_silent_reading);
  EXPECT_FALSE(was_silent_after);
}

TEST_F(CheckpointScrubTest, WhatCannotBeReadIsSavedAnewForWhoAsks) {
  TestServer server(files_);
  server.PushTo(1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved, server.Save());
  files_.set_hook([](const std::string& operation, const std::string& path) {
    const bool is_bad =
        operation == "append" || (operation == "read" && absl::StrContains(path, "/tracks/"));
    return is_bad ? absl::UnavailableError("Input/output error") : absl::OkStatus();
  });
  EXPECT_EQ(server.manager().Scrub(server.models()).unreadable_count, 1);
  server.manager().AwaitIdle();
  files_.set_hook(nullptr);
  EMA_ASSERT_OK_AND_ASSIGN(const auto queued,
                           server.manager().Save(server.model(), {.async = true}));
  EXPECT_EQ(queued.state, CheckpointInfo::State::kSaving);
  server.manager().AwaitIdle();
  EXPECT_EQ(server.manager().CountAll()["m"].unreadable, 0);
  EXPECT_TRUE(*files_.Exists(PathOf(".corrupt-" + saved.name)));
}

TEST_F(CheckpointScrubTest, ACrashWhileTheNewestIsSavedAnewLosesNothing) {
  for (const bool can_exchange : {true, false}) {
    TestServer server(files_);
    server.PushTo(server.version() + 2);
    ASSERT_THAT(server.Save(server.version() - 1), IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(const auto newest, server.Save());
    std::vector<std::unique_ptr<FakeFileSystem>> crashed;
    files_.set_hook([&](const std::string& operation, const std::string& path) {
      if (operation == "read" && path.starts_with(PathOf(newest.name) + "/tracks/raw")) {
        return absl::UnavailableError("Input/output error");
      }
      if (!can_exchange) {
        return operation == "exchange" ? absl::UnimplementedError("") : absl::OkStatus();
      }
      if (operation != "read") {
        crashed.push_back(files_.AfterCrash(PowerLoss::kAnything, crashed.size()));
      }
      return absl::OkStatus();
    });
    server.manager().Scrub(server.models());
    server.manager().AwaitIdle();
    files_.set_hook(nullptr);
    EXPECT_TRUE(*files_.Exists(PathOf(".corrupt-" + newest.name)));
    EXPECT_THAT(server.Complete(), Contains(server.version()));
    for (size_t i = 0; i < crashed.size(); ++i) {
      EXPECT_EQ(TestServer(*crashed[i]).version(), server.version()) << i;
    }
  }
}

TEST_F(CheckpointScrubTest, WhatCouldNotBeSetAsideIsInNobodysWay) {
  CheckpointManager::Options options;
  options.store.keep_count = 1;
  TestServer server(files_, options);
  server.PushTo(1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved, server.Save());
  files_.set_hook([&](const std::string& operation, const std::string& path) {
    const bool fails = (operation == "read" && path.starts_with(PathOf(saved.name) + "/tracks")) ||
                       (operation == "rename" && path.starts_with(PathOf(".tmp-")));
    return fails ? absl::UnavailableError("Input/output error") : absl::OkStatus();
  });
  server.manager().Scrub(server.models());
  server.manager().AwaitIdle();
  files_.set_hook(nullptr);
  server.PushTo(2);
  ASSERT_THAT(server.Save(), IsOk());
  EXPECT_THAT(server.Complete(), ElementsAre(2));
  EMA_ASSERT_OK_AND_ASSIGN(const auto entries, files_.ListDirectory(kTestFolder));
  for (const DirectoryEntry& entry : entries) EXPECT_FALSE(entry.name.starts_with(".tmp-"));
}

TEST_F(CheckpointScrubTest, WhatCannotBeFoundAgainIsSkipped) {
  TestServer server(files_);
  std::vector<std::string> names;
  for (int64_t version = 1; version <= 3; ++version) {
    server.PushTo(version);
    names.push_back(server.Save()->name);
  }
  // While the first one is read, another is removed, but the disk fails: what is there must be
  // looked for.
  bool has_begun = false;
  bool has_failed = false;
  files_.set_hook([&](const std::string& operation, const std::string& path) {
    if (operation == "rename") has_failed = true;
    if (has_failed && (operation == "rename" || path == kTestFolder)) {
      return absl::UnavailableError("Input/output error");
    }
    if (operation == "read" && !std::exchange(has_begun, true)) {
      EXPECT_FALSE(server.manager().Delete(server.model(), names[1]).ok());
    }
    return absl::OkStatus();
  });
  const CheckpointManager::ScrubReport report = server.manager().Scrub(server.models());
  EXPECT_TRUE(has_failed);
  EXPECT_GT(report.skipped_count, 0);
  EXPECT_EQ(report.bad_count + report.unreadable_count, 0);
  files_.set_hook(nullptr);
  EXPECT_EQ(server.manager().Scrub(server.models()).skipped_count, 0);
}

TEST_F(CheckpointScrubTest, WhenItWasOutlivesAServer) {
  CheckpointManager::Options options;
  options.scrub_interval = absl::Hours(24);
  std::string older;
  absl::Time begin;
  {
    TestServer server(files_, options);
    begin = server.manager().scrub_time().value();
    server.PushTo(1);
    older = server.Save()->name;
    server.PushTo(2);
    ASSERT_THAT(server.Save(), IsOk());
  }
  EXPECT_EQ(TestServer(files_, options).manager().scrub_time(), begin);
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  // Long ago; one that skips some does not count.
  const absl::Time long_ago = absl::FromUnixSeconds(1'577'836'800);
  files_.FileBytes("/data/SCRUBBED") = "2020-01-01T00:00:00+00:00\n";
  FailReading(older, absl::ResourceExhaustedError("Too many open files"));
  {
    TestServer server(files_, options);
    const auto has_ended = [](const std::string& text) {
      return absl::StrContains(text, "checkpoints read again");
    };
    for (std::vector<std::string> log; absl::Now() < deadline; std::this_thread::yield()) {
      log = server.others();
      if (std::any_of(log.begin(), log.end(), has_ended)) break;
    }
    EXPECT_THAT(server.others(), Contains(HasSubstr("skipped=1")));
    EXPECT_THAT(server.errors(), ElementsAre(HasSubstr("checkpoint not read again")));
    EXPECT_EQ(server.manager().scrub_time(), long_ago);
  }
  // A disk that does not say when it was.
  files_.set_hook([](const std::string& operation, const std::string& path) {
    const bool is_bad = operation == "read" && path == "/data/SCRUBBED";
    return is_bad ? absl::UnavailableError("Input/output error") : absl::OkStatus();
  });
  EXPECT_GE(TestServer(files_, options).manager().scrub_time().value(), begin);
  files_.set_hook(nullptr);
  TestServer server(files_, options);
  while (server.manager().scrub_time() == long_ago && absl::Now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_GE(server.manager().scrub_time().value(), begin);
}

}  // namespace
}  // namespace ema
