// SPDX-License-Identifier: Apache-2.0
//
// What a StepPusher does while its server is unavailable: a real one, that is killed and started
// again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/trainer/run_joiner.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/step_pusher.h"
#include "tests/testutil/free_ports.h"
#include "tests/testutil/server_process.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kPatience = absl::Seconds(60);
using OnError = StepPusher::OnError;

// While one lives, nobody in this process gets a thread: a stack of this size has no room.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge = before_;
    pthread_attr_setstacksize(&huge, size_t{1} << 48);
    EXPECT_EQ(pthread_setattr_default_np(&huge), 0);
  }
  ~NoThreads() { pthread_setattr_default_np(&before_); }

 private:
  pthread_attr_t before_;
};

// One rank, with a tensor that changes and one that is frozen.
class OutageTest : public testing::Test {
 protected:
  void SetUp() override {
    // No outgoing connection gets it while there is no server.
    port_ = FindFreePorts(1)[0];
    ASSERT_NO_FATAL_FAILURE(Restart());
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(absl::StrCat("127.0.0.1:", port_)));
  }
  void TearDown() override {
    pusher_ = nullptr;
    Kill();
    if (!data_dir_.empty()) std::filesystem::remove_all(data_dir_);
  }
  void Kill() { server_ = nullptr; }
  // One that has forgotten the model, unless there is a data_dir_: at the same address, beside one
  // of its own.
  void Restart() {
    EMA_ASSERT_OK_AND_ASSIGN(
        server_,
        ServerProcess::Start(EMA_SERVER_BINARY, {"--listen", absl::StrCat("127.0.0.1:", port_),
                                                 absl::StrCat("--data-dir=", data_dir_)}));
  }

  void Attach(OnError on_error, absl::Duration max_outage = kPatience) {
    StepPusher::Options options;
    options.max_outage = max_outage;
    AttachBy(*client_, on_error, std::move(options));
  }
  void AttachBy(Client& client, OnError on_error, StepPusher::Options options) {
    const Manifest manifest =
        *Manifest::Create({{.name = "frozen", .shape = {3}}, {.name = "live", .shape = {1000}}});
    options.tracks = {{.name = "ema", .schedule = *Schedule::Parse("copy")}};
    options.on_error = on_error;
    options.on_skip = [this](int64_t step, const absl::Status&) { told_.push_back(step); };
    const bool frozen[] = {true, false};
    EMA_ASSERT_OK_AND_ASSIGN(pusher_, StepPusher::Create(client, "m", manifest, frozen, options));
  }
  void Step() {
    pusher_->WaitReleased();
    for (float& value : live_) value += 1;
    pusher_->AfterStep([this](const StepPusher::Piece& piece) {
      const std::vector<float>& tensor = piece.tensor_index == 0 ? frozen_ : live_;
      return StepPusher::Weights{std::as_bytes(std::span(tensor).subspan(piece.first, piece.count)),
                                 nullptr};
    });
  }
  // The newest version's, in the manifest's order.
  std::vector<float> Pulled() {
    std::vector<float> values(frozen_.size() + live_.size());
    const auto target = [&](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
      EXPECT_EQ(info.total_bytes, static_cast<int64_t>(values.size() * sizeof(float)));
      return std::as_writable_bytes(std::span(values));
    };
    EXPECT_THAT(client_->Pull("m", "ema", {}, target, kPatience), IsOk());
    return values;
  }
  std::vector<float> Weights() const {
    std::vector<float> values = frozen_;
    values.insert(values.end(), live_.begin(), live_.end());
    return values;
  }

  int port_ = 0;
  std::string data_dir_;
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Client> client_;
  std::vector<float> frozen_ = {1, 2, 3};
  std::vector<float> live_ = std::vector<float>(1000);
  std::vector<int64_t> told_;
  std::unique_ptr<StepPusher> pusher_;
};

TEST_F(OutageTest, WaitPushesTheStepAgainThatTheOutageCutOff) {
  Attach(OnError::kWait);
  Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  Kill();
  Step();
  std::thread restart([this] { Restart(); });
  pusher_->WaitReleased();
  restart.join();
  // The same step with the same weights, and what is frozen, which this server had not.
  EXPECT_EQ(pusher_->stats().pushes, 2) << pusher_->stats().last_error;
  EXPECT_EQ(pusher_->stats().skipped, 0);
  EXPECT_THAT(pusher_->TakeError(), IsOk());
  EXPECT_THAT(told_, ElementsAre());
  ASSERT_TRUE(pusher_->version().has_value());
  EXPECT_EQ(pusher_->version()->number, 1);
  EXPECT_EQ(pusher_->version()->step, 2);
  EXPECT_EQ(Pulled(), Weights());
  Step();
  pusher_->Close();
  EXPECT_EQ(pusher_->stats().pushes, 3);
  EXPECT_EQ(Pulled(), Weights());
}

TEST_F(OutageTest, WaitLosesNoStepOfManyOutages) {
  Attach(OnError::kWait);
  for (int outage = 0; outage < 2; ++outage) {
    Kill();
    std::thread restart([this] { Restart(); });
    for (int i = 0; i < 3; ++i) Step();
    pusher_->WaitReleased();
    restart.join();
  }
  EXPECT_EQ(pusher_->stats().pushes, 6) << pusher_->stats().last_error;
  EXPECT_EQ(pusher_->stats().skipped, 0);
}

TEST_F(OutageTest, CountsWhatAServerThatComesBackFromACheckpointHasLost) {
  data_dir_ = testing::TempDir() + "/ema_away_XXXXXX";
  ASSERT_NE(mkdtemp(data_dir_.data()), nullptr);
  Kill();
  Restart();
  Attach(OnError::kWait);
  Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  ASSERT_THAT(client_->CreateCheckpoint("m"), IsOk());
  for (int i = 0; i < 3; ++i) Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  EXPECT_EQ(pusher_->stats().lost_versions, 0);
  Kill();
  Restart();
  for (int i = 0; i < 2; ++i) Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  EXPECT_EQ(pusher_->stats().pushes, 6) << pusher_->stats().last_error;
  EXPECT_EQ(pusher_->stats().lost_versions, 3);
  EXPECT_EQ(pusher_->version()->number, 3);
  EXPECT_EQ(pusher_->version()->step, 6);
  EXPECT_EQ(Pulled(), Weights());
}

TEST_F(OutageTest, ARestartForgetsNobodyWhoWasFenced) {
  Attach(OnError::kSkip);
  Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  std::unique_ptr<StepPusher> fenced = std::move(pusher_);
  Attach(OnError::kSkip);
  Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  Kill();
  // It has not heard that it was fenced, and comes back first.
  pusher_.swap(fenced);
  const absl::Time wait_end = absl::Now() + kPatience;
  while (!pusher_->stats().is_disconnected && absl::Now() < wait_end) Step();
  Restart();
  while (pusher_->stats().is_disconnected && absl::Now() < wait_end) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  pusher_.swap(fenced);
  while (pusher_->stats().pushes < 2 && absl::Now() < wait_end) {
    Step();
    (void)pusher_->WaitPushed();
  }
  EXPECT_EQ(pusher_->stats().pushes, 2) << pusher_->stats().last_error;
  pusher_.swap(fenced);
  while (GetErrorReason(pusher_->stats().last_error) != ErrorReason::kFenced &&
         absl::Now() < wait_end) {
    Step();
  }
  EXPECT_THAT(pusher_->stats().last_error, ReasonIs(ErrorReason::kFenced));
  pusher_.swap(fenced);
  Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  EXPECT_EQ(pusher_->stats().pushes, 3) << pusher_->stats().last_error;
}

TEST_F(OutageTest, WaitEndsWithTheOutagesTime) {
  Attach(OnError::kWait, absl::Milliseconds(200));
  Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  Kill();
  Step();
  pusher_->WaitReleased();
  EXPECT_THAT(pusher_->TakeError(), Not(IsOk()));
  EXPECT_THAT(pusher_->TakeError(), IsOk());
  EXPECT_EQ(pusher_->stats().skipped, 1);
  EXPECT_THAT(told_, ElementsAre(2));
  // It is said once, and waited for once.
  Step();
  EXPECT_THAT(pusher_->TakeError(), IsOk());
  EXPECT_EQ(pusher_->stats().skipped, 2);
  Restart();
  const absl::Time wait_end = absl::Now() + kPatience;
  while (pusher_->stats().pushes < 2 && absl::Now() < wait_end) {
    Step();
    ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  }
  EXPECT_EQ(Pulled(), Weights());
}

TEST_F(OutageTest, AnOutageThatIsOverIsToldOnceUntilAPushHasSucceeded) {
  Attach(OnError::kWait, absl::Milliseconds(200));
  Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  Kill();
  Step();
  pusher_->WaitReleased();
  EXPECT_THAT(pusher_->TakeError(), Not(IsOk()));
  Restart();
  const absl::Time wait_end = absl::Now() + kPatience;
  while (pusher_->stats().is_disconnected && absl::Now() < wait_end) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  // It has come back, but no push has succeeded.
  Kill();
  Step();
  pusher_->WaitReleased();
  EXPECT_THAT(told_, ElementsAre(2, 3));
  EXPECT_THAT(pusher_->TakeError(), IsOk());
  Restart();
  while (pusher_->stats().pushes < 2 && absl::Now() < wait_end) {
    Step();
    ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  }
  // The next one is told of again.
  EXPECT_THAT(pusher_->TakeError(), IsOk());
  Kill();
  Step();
  pusher_->WaitReleased();
  EXPECT_THAT(pusher_->TakeError(), Not(IsOk()));
}

TEST_F(OutageTest, RaiseGivesTheErrorOnceAndGoesOn) {
  Attach(OnError::kRaise);
  Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  EXPECT_THAT(pusher_->TakeError(), IsOk());
  Kill();
  const absl::Time wait_end = absl::Now() + kPatience;
  absl::Status error;
  while (error.ok() && absl::Now() < wait_end) {
    Step();
    error = pusher_->TakeError();
  }
  EXPECT_THAT(error, Not(IsOk()));
  EXPECT_THAT(pusher_->TakeError(), IsOk());
  EXPECT_GE(pusher_->step(), 2);
  Restart();
  while (pusher_->stats().pushes < 2 && absl::Now() < wait_end) {
    Step();
    ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  }
  EXPECT_EQ(Pulled(), Weights());
}

TEST_F(OutageTest, SkipStartsWithoutTheServerAndJoinsLater) {
  Kill();
  StepPusher::Options options;
  options.timeout = absl::Seconds(2);  // So long is the server waited for.
  std::vector<std::string> warnings;
  options.on_warning = [&](const std::string& text) { warnings.push_back(text); };
  AttachBy(*client_, OnError::kSkip, options);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("the training starts without its average")));
  for (int i = 0; i < 3; ++i) Step();
  EXPECT_TRUE(pusher_->stats().is_disconnected);
  EXPECT_EQ(pusher_->stats().skipped, 3);
  EXPECT_THAT(pusher_->TakeError(), IsOk());
  Restart();
  const absl::Time wait_end = absl::Now() + kPatience;
  while (pusher_->stats().pushes == 0 && absl::Now() < wait_end) {
    Step();
    ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  }
  ASSERT_EQ(pusher_->stats().pushes, 1) << pusher_->stats().last_error;
  EXPECT_EQ(pusher_->version()->step, pusher_->step());
  EXPECT_EQ(pusher_->stats().skipped, pusher_->step() - 1);
  EXPECT_EQ(Pulled(), Weights());
  pusher_ = nullptr;  // It uses `warnings`.
}

TEST_F(OutageTest, ALateStartReplacesNoLaterTraining) {
  Attach(OnError::kSkip);
  Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  const client_internal::RunJoiner joiner(
      std::shared_ptr<Client>(std::shared_ptr<Client>(), &*client_),
      {.model = "m", .existing = StepPusher::Existing::kNew});
  const absl::Status refused =
      joiner.Open(/*last_run_epoch=*/0, absl::Seconds(5), absl::Now() - absl::Minutes(2)).status();
  EXPECT_THAT(refused, ReasonIs(ErrorReason::kResumeMismatch));
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kFailedPrecondition,
                                HasSubstr("another training has committed step 1")));
  Step();
  EXPECT_THAT(pusher_->WaitPushed(), IsOk());
  EXPECT_EQ(Pulled(), Weights());
}

TEST_F(OutageTest, WithoutAnOnErrorItDoesNotStart) {
  Kill();
  const Manifest manifest = *Manifest::Create({{.name = "live", .shape = {1000}}});
  StepPusher::Options options;
  options.tracks = {{.name = "ema", .schedule = *Schedule::Parse("copy")}};
  options.timeout = absl::Seconds(1);
  EXPECT_THAT(StepPusher::Create(*client_, "m", manifest, {}, options).status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("server")));
}

TEST_F(OutageTest, SkipGivesNoError) {
  Attach(OnError::kSkip);
  Kill();
  for (int i = 0; i < 3; ++i) Step();
  EXPECT_GE(pusher_->stats().skipped, 1);
  EXPECT_THAT(pusher_->TakeError(), IsOk());
}

TEST_F(OutageTest, TrainingGoesOnWithoutAThreadToJoinAgainWith) {
  Attach(OnError::kSkip);
  Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  Kill();
  {
    const NoThreads no_threads;
    for (int i = 0; i < 3; ++i) Step();
    EXPECT_EQ(pusher_->step(), 4);
    EXPECT_EQ(pusher_->stats().skipped, 3);
    EXPECT_TRUE(pusher_->stats().is_disconnected);
    EXPECT_THAT(pusher_->stats().last_error,
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr("thread to rejoin")));
  }
  Restart();
  const absl::Time wait_end = absl::Now() + kPatience;
  while (pusher_->stats().pushes < 2 && absl::Now() < wait_end) {
    Step();
    ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  }
  EXPECT_EQ(pusher_->stats().pushes, 2) << pusher_->stats().last_error;
  EXPECT_EQ(Pulled(), Weights());
}

TEST_F(OutageTest, WaitLastsUntilThereIsAThreadToJoinAgainWith) {
  Attach(OnError::kWait);
  Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  Kill();
  Restart();
  Step();
  std::optional<NoThreads> no_threads;
  std::atomic<bool> has_none = false;
  std::thread mend([&] {
    while (!has_none) absl::SleepFor(absl::Milliseconds(1));
    absl::SleepFor(absl::Seconds(3));
    no_threads.reset();
  });
  no_threads.emplace();
  has_none = true;
  // The push ends meanwhile: the server that it meets does not know the run.
  pusher_->WaitReleased();
  mend.join();
  EXPECT_EQ(pusher_->stats().pushes, 2) << pusher_->stats().last_error;
  EXPECT_EQ(pusher_->stats().skipped, 0);
  EXPECT_THAT(pusher_->TakeError(), IsOk());
}

TEST_F(OutageTest, RefusesAnOutageOfNegativeTime) {
  StepPusher::Options options;
  options.max_outage = -absl::Seconds(1);
  EXPECT_THAT(StepPusher::Create(*client_, "m", *Manifest::Create({{.name = "w", .shape = {3}}}),
                                 {}, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_outage -1s")));
}

TEST_F(OutageTest, RefusesTooLittlePinnedMemory) {
  StepPusher::Options options;
  options.max_staging_bytes = 1;
  EXPECT_THAT(StepPusher::Create(*client_, "m", *Manifest::Create({{.name = "w", .shape = {3}}}),
                                 {}, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_staging_bytes 1: must")));
}

// Behind a proxy that can keep what the server says.
class LostReplyTest : public OutageTest {
 protected:
  void SetUp() override {
    OutageTest::SetUp();
    proxy_ = std::make_unique<TcpProxy>(port_);
    Client::Options options;
    options.same_host_lane = false;
    options.is_interrupted = [this, trainer = std::this_thread::get_id()] {
      // Who joins again asks.
      if (mends_ && std::this_thread::get_id() != trainer) proxy_->HoldReplies(false);
      return false;
    };
    EMA_ASSERT_OK_AND_ASSIGN(far_client_, Client::Create(proxy_->address(), options));
  }
  void TearDown() override {
    proxy_->HoldReplies(false);
    OutageTest::TearDown();
  }
  void AwaitVersion(int64_t number) {
    std::optional<ModelInfo> info;
    const absl::Time wait_end = absl::Now() + kPatience;
    do {
      EMA_ASSERT_OK_AND_ASSIGN(info, client_->GetModel("m"));
      ASSERT_LT(absl::Now(), wait_end);
    } while (!info->latest.has_value() || info->latest->number < number);
  }

  std::unique_ptr<TcpProxy> proxy_;
  std::unique_ptr<Client> far_client_;
  std::atomic<bool> mends_ = false;
};

TEST_F(LostReplyTest, IsAskedForAndTheStepCounts) {
  StepPusher::Options options;
  options.timeout = absl::Seconds(2);
  AttachBy(*far_client_, OnError::kSkip, options);
  proxy_->HoldReplies(true);
  Step();
  AwaitVersion(1);
  EXPECT_THAT(pusher_->WaitPushed(kPatience), IsOk());
  EXPECT_EQ(pusher_->stats().skipped, 1);
  proxy_->HoldReplies(false);
  const absl::Time wait_end = absl::Now() + kPatience;
  while (pusher_->stats().is_disconnected && absl::Now() < wait_end) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(pusher_->stats().pushes, 1);
  EXPECT_EQ(pusher_->stats().skipped, 0);
  ASSERT_TRUE(pusher_->version().has_value());
  EXPECT_EQ(pusher_->version()->number, 1);
  EXPECT_EQ(pusher_->version()->step, 1);
  // What is frozen is there, and is not sent again.
  const int64_t sent_bytes = pusher_->stats().sent_bytes;
  Step();
  EXPECT_THAT(pusher_->WaitPushed(), IsOk());
  EXPECT_EQ(pusher_->stats().pushes, 2) << pusher_->stats().last_error;
  EXPECT_EQ(pusher_->stats().sent_bytes - sent_bytes,
            static_cast<int64_t>(live_.size() * sizeof(float)));
  EXPECT_EQ(Pulled(), Weights());
}

TEST_F(LostReplyTest, IsAskedForByWhoWaits) {
  StepPusher::Options options;
  options.timeout = absl::Seconds(2);
  AttachBy(*far_client_, OnError::kWait, options);
  proxy_->HoldReplies(true);
  Step();
  AwaitVersion(1);
  mends_ = true;
  pusher_->WaitReleased();
  EXPECT_THAT(pusher_->TakeError(), IsOk());
  EXPECT_THAT(told_, ElementsAre());
  EXPECT_EQ(pusher_->stats().pushes, 1);
  EXPECT_EQ(pusher_->stats().skipped, 0);
  // Its bytes went once.
  EXPECT_EQ(pusher_->stats().sent_bytes, static_cast<int64_t>(Weights().size() * sizeof(float)));
  ASSERT_TRUE(pusher_->version().has_value());
  EXPECT_EQ(pusher_->version()->number, 1);
}

TEST_F(LostReplyTest, WaitLastsAsLongAsThePushOfAServerThatIsThere) {
  StepPusher::Options options;
  options.max_wait = absl::Milliseconds(100);
  options.max_outage = absl::Seconds(3);
  AttachBy(*far_client_, OnError::kWait, options);
  proxy_->SetDelay(std::chrono::milliseconds(200));
  Step();
  pusher_->WaitReleased();
  EXPECT_THAT(pusher_->stats().last_error, IsOk());
  EXPECT_EQ(pusher_->stats().pushes, 1);
  EXPECT_EQ(pusher_->stats().sent_bytes, static_cast<int64_t>(Weights().size() * sizeof(float)));
}

TEST_F(LostReplyTest, TheStepThatIsSkippedMeanwhileIsTold) {
  StepPusher::Options options;
  options.max_wait = absl::Milliseconds(100);
  AttachBy(*far_client_, OnError::kSkip, options);
  proxy_->HoldReplies(true);
  Step();
  AwaitVersion(1);
  Step();
  EXPECT_THAT(told_, ElementsAre(2));
  EXPECT_EQ(pusher_->stats().skipped, 1);
  EXPECT_THAT(pusher_->stats().last_error.message(),
              HasSubstr("the push of step 1 had not ended after"));
  proxy_->HoldReplies(false);
  EXPECT_THAT(pusher_->WaitPushed(), IsOk());
  EXPECT_EQ(pusher_->stats().pushes, 1);
}

TEST_F(LostReplyTest, MayTakeATrackAwayWhileAStepWaitsForIt) {
  AttachBy(*far_client_, OnError::kSkip, {});
  const TrackConfig more = {.name = "more", .schedule = *Schedule::Parse("copy")};
  ASSERT_THAT(client_->UpdateModel("m", {.put = {more}}), IsOk());
  Step();
  ASSERT_THAT(pusher_->WaitPushed(), IsOk());
  ASSERT_THAT(client_->UpdateModel("m", {.remove = {"ema"}}), IsOk());
  proxy_->HoldReplies(true);
  Step();
  AwaitVersion(2);
  std::thread answer([this] {
    absl::SleepFor(absl::Milliseconds(300));
    proxy_->HoldReplies(false);
  });
  Step();
  answer.join();
  EXPECT_THAT(pusher_->WaitPushed(), IsOk());
  EXPECT_EQ(pusher_->stats().pushes, 3) << pusher_->stats().last_error;
  EXPECT_THAT(told_, ElementsAre());
}

TEST_F(LostReplyTest, DoesNotHoldAnException) {
  StepPusher::Options options;
  options.timeout = options.max_wait = absl::Hours(1);
  for (const OnError on_error : {OnError::kSkip, OnError::kWait}) {
    AttachBy(*far_client_, on_error, options);
    proxy_->HoldReplies(true);
    Step();
    const auto train = [this] {
      const std::unique_ptr<StepPusher> pusher = std::move(pusher_);
      throw std::runtime_error("the training has failed");
    };
    EXPECT_THROW(train(), std::runtime_error);
    proxy_->HoldReplies(false);
  }
}

// One that has no memory for a step says so: the others go on at once, whatever their patience.
TEST(SkippedStepTest, HoldsNoOtherRank) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto server, ServerProcess::Start(EMA_SERVER_BINARY, {}));
  const Manifest manifest = *Manifest::Create({{.name = "live", .shape = {1000}}});
  std::array<StepPusher::Stats, 2> stats;
  const auto train = [&](int64_t rank) {
    EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(server->address()));
    StepPusher::Options options;
    options.tracks = {{.name = "ema", .schedule = *Schedule::Parse("copy")}};
    options.launch_id = "one";
    options.rank = rank;
    options.world_size = 2;
    options.on_error = OnError::kWait;
    options.max_wait = options.max_outage = options.timeout = kPatience;
    EMA_ASSERT_OK_AND_ASSIGN(const auto pusher,
                             StepPusher::Create(*client, "m", manifest, {}, options));
    std::vector<float> live(1000);
    for (int step = 1; step <= 2; ++step) {
      pusher->WaitReleased();
      pusher->AfterStep([&](const StepPusher::Piece& piece) -> absl::StatusOr<StepPusher::Weights> {
        if (rank == 1 && step == 1) return absl::ResourceExhaustedError("no memory today");
        return StepPusher::Weights{std::as_bytes(std::span(live).subspan(piece.first, piece.count)),
                                   nullptr};
      });
    }
    EXPECT_THAT(pusher->WaitPushed(), IsOk());
    stats[rank] = pusher->stats();
  };
  std::thread other(train, 1);
  train(0);
  other.join();
  EXPECT_EQ(stats[0].pushes, 1);
  EXPECT_EQ(stats[0].skipped, 1);
  EXPECT_EQ(stats[1].pushes, 1);
  EXPECT_EQ(stats[1].skipped, 1);
  EXPECT_EQ(GetErrorReason(stats[0].last_error), ErrorReason::kStepSkipped) << stats[0].last_error;
  EXPECT_THAT(stats[0].last_error.message(), HasSubstr("rank 1 has abandoned it: no memory today"));
}

}  // namespace
}  // namespace ema
