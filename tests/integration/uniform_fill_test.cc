// SPDX-License-Identifier: Apache-2.0
//
// Eight ranks and eight readers of a real server, some of them through shared memory, while ranks
// repeat, abandon, double and die, and connections are cut, delayed and stalled: no reader ever
// sees anything but one whole step, the newest that it could know of or a newer one.
//
// EMA_FILL_SCALE: the model's size.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "tests/integration/fill_rank.h"
#include "tests/testutil/campaign.h"
#include "tests/testutil/server_process.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

using ::testing::IsEmpty;

constexpr int kPullers = 8;
constexpr int64_t kPinnedVersions = 32;
// The least numbers of pulls.
constexpr int64_t kCampaignPulls = 100'000;
constexpr int64_t kLargeModelCampaignPulls = 10'000;
constexpr int64_t kSamplePulls = 3000;
// Between two faults; fewer make the run invalid.
constexpr int64_t kLeastPulls = 20;
constexpr int64_t kLeastVersions = 2;
constexpr absl::Duration kTrafficTimeout = absl::Seconds(60);
constexpr absl::Duration kDeathTimeout = absl::Seconds(60);

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  int64_t value = 0;
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : otherwise;
}

class UniformFillTest : public testing::Test {
 protected:
  void SetUp() override {
    EMA_ASSERT_OK_AND_ASSIGN(
        server_, ServerProcess::Start(
                     EMA_SERVER_BINARY,
                     {"--block-bytes", "4096", "--session-timeout", "3s", "--stream-timeout", "3s",
                      "--drain-grace", "5s", "--max-pull-streams", "256", "--memory-bytes", "2G"}));
    proxy_ = std::make_unique<TcpProxy>(server_->port());
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_->address()));
    ASSERT_THAT(client_->CreateModel(kFillModel, FillManifest(scale_), FillTracks(),
                                     {.max_pinned_versions = kPinnedVersions}),
                IsOk());
  }

  // A quarter of the ranks and readers through shared memory; half of them, and the watcher,
  // through the proxy.
  void StartTraffic() {
    watcher_ = std::thread([this] { WatchAll(); });
    for (int64_t rank = 0; rank < kFillRanks; ++rank) {
      threads_.emplace_back([this, rank] {
        FillRank(AddressOf(WayOf(rank)), WayOf(rank), rank, &lives_, &history_, &counts_).Run();
      });
    }
    for (int puller = 0; puller < kPullers; ++puller) {
      threads_.emplace_back([this, puller] {
        const auto has_version = [this] { return history_.version_count() > 0; };
        while (!has_version() && !lives_.stopped()) {
          history_.AwaitTraffic(0, 1, absl::Milliseconds(100));
        }
        PullFilled(AddressOf(WayOf(puller)), WayOf(puller), puller, lives_, history_, counts_);
      });
    }
  }

  static FillWay WayOf(int64_t number) {
    if (number % 2 == 1) return FillWay::kProxy;
    return number % 4 == 0 ? FillWay::kSharedMemory : FillWay::kTcp;
  }
  std::string AddressOf(FillWay way) const {
    return way == FillWay::kProxy ? proxy_->address() : server_->address();
  }

  // Until it is interrupted.
  void WatchAll() {
    Client::Options options;
    options.is_interrupted = [this] { return watched_all_.load(); };
    options.same_host_lane = false;
    const auto client = *Client::Create(proxy_->address(), options);
    const auto watch = *client->Watch(kFillModel, VersionId());
    auto item = watch->Next();
    for (; item.ok(); item = watch->Next()) history_.OnVersion(item->version, item->skipped);
    if (item.status().code() != absl::StatusCode::kCancelled) {
      history_.OnViolation(absl::StrCat("Watch: ", item.status().ToString()));
    }
  }

  // True: there was enough of it.
  bool AwaitTraffic() {
    if (history_.AwaitTraffic(kLeastPulls, kLeastVersions, kTrafficTimeout)) return true;
    ADD_FAILURE() << "the traffic has stopped: " << Summary();
    return false;
  }

  // A life in which `rank` dies at the given point of a step, and the next one, which goes on.
  void Kill(int64_t rank, int64_t death) {
    const FillLives::Life life = lives_.Begin(rank);
    EMA_ASSERT_OK_AND_ASSIGN(
        const std::unique_ptr<ChildProcess> doomed,
        ChildProcess::Start({EMA_DOOMED_RANK_BINARY, server_->address(), life.launch_id(),
                             absl::StrCat(rank), "2", absl::StrCat(death)}));
    EMA_ASSERT_OK_AND_ASSIGN(const int status, doomed->Wait(kDeathTimeout));
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        << "rank " << rank << " was to die at " << death << ", ended with " << status;
    history_.OnFault(absl::StrCat("the death of rank ", rank, " at ", death));
    ++kill_count_;
    lives_.Begin(-1);
    ASSERT_TRUE(AwaitTraffic());
  }

  void Cut(int64_t kind, int64_t bytes) {
    if (kind == 0) proxy_->CutAll();
    if (kind == 1) proxy_->CutAfter(bytes);
    if (kind == 2) proxy_->HalfOpenAll();
    ASSERT_TRUE(history_.AwaitTraffic(0, 1, kTrafficTimeout)) << Summary();
  }

  // Something that is done to the connections, and lifted after some traffic.
  void Disturb(int64_t kind) {
    static constexpr std::array<const char*, 6> kNames = {
        "a reset", "a reset in a message", "half-open", "a delay", "a trickle", "a stall"};
    const auto name = kNames[kind % kNames.size()];
    history_.OnFault(name);
    ++disturbance_count_;
    switch (kind % kNames.size()) {
      case 0:
      case 1:
      case 2:
        // Several times: what a cut hits is chance.
        for (int i = 0; i < 3; ++i) {
          ASSERT_NO_FATAL_FAILURE(Cut(kind % kNames.size(), 1 + (kind * 7919 + i * 1009) % 20'000));
        }
        break;
      case 3:
        proxy_->SetDelay(std::chrono::milliseconds(15));
        break;
      case 4:
        proxy_->SetTrickle(700 * scale_);
        break;
      default:
        proxy_->SetStalled(true);
    }
    if (kind % kNames.size() == 5) {
      // Steps wait for the stalled ranks: only the other readers go on.
      ASSERT_TRUE(history_.AwaitTraffic(kLeastPulls, 0, kTrafficTimeout)) << Summary();
    } else {
      ASSERT_TRUE(AwaitTraffic());
    }
    proxy_->SetDelay(std::chrono::milliseconds(0));
    proxy_->SetTrickle(0);
    proxy_->SetStalled(false);
    history_.OnFault(absl::StrCat("the end of ", name));
    ASSERT_TRUE(AwaitTraffic());
  }

  // First ranks and readers, then, when it has seen all, the watcher.
  void StopTraffic() {
    lives_.Stop();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo info, client_->GetModel(kFillModel));
    const int64_t left = info.latest->number - history_.version_count();
    EXPECT_TRUE(history_.AwaitTraffic(0, left, kTrafficTimeout)) << left << " were not watched";
    watched_all_ = true;
    watcher_.join();
  }

  std::string Summary() const {
    return absl::StrCat(
        history_.pull_count(), " pulls (", counts_.failed_pulls.load(), " failed), ",
        history_.version_count(), " versions, ", counts_.pushes.load(), " pushes, of which ",
        counts_.repeated.load(), " repeated, ", counts_.other_content.load(),
        " with other content, ", counts_.abandoned.load(), " abandoned, ", counts_.doubled.load(),
        " by two clients, ", counts_.resumed.load(), " resumed, ", counts_.failed.load(), " lost; ",
        kill_count_, " ranks killed, ", disturbance_count_, " disturbances, ", proxy_->cut_count(),
        " connections cut");
  }

  void TearDown() override {
    lives_.Stop();
    if (proxy_ != nullptr) proxy_->SetStalled(false);
    for (std::thread& thread : threads_) thread.join();
    watched_all_ = true;
    if (watcher_.joinable()) watcher_.join();
  }

  const int64_t scale_ = FromEnvironment("EMA_FILL_SCALE", 1);
  const int64_t least_pulls_ = !IsCampaign() ? kSamplePulls
                               : scale_ > 1  ? kLargeModelCampaignPulls
                                             : kCampaignPulls;
  FillLives lives_;
  History history_;
  FillCounts counts_;
  int64_t kill_count_ = 0;
  int64_t disturbance_count_ = 0;
  std::atomic<bool> watched_all_ = false;
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<TcpProxy> proxy_;
  std::unique_ptr<Client> client_;
  std::vector<std::thread> threads_;
  std::thread watcher_;
};

TEST_F(UniformFillTest, ReadersOnlyEverSeeWholeSteps) {
  StartTraffic();
  lives_.Begin(-1);
  ASSERT_TRUE(AwaitTraffic());
  // Each round a rank dies one chunk later, and the connections suffer in another way.
  constexpr int64_t kDeaths = kFillChunks + 2;
  for (int64_t round = 0; round < kDeaths || history_.pull_count() < least_pulls_; ++round) {
    ASSERT_NO_FATAL_FAILURE(Kill((round * 3 + round / kDeaths) % kFillRanks, round % kDeaths));
    ASSERT_NO_FATAL_FAILURE(Disturb(round));
    ASSERT_TRUE(server_->is_running());
  }
  ASSERT_NO_FATAL_FAILURE(StopTraffic());
  std::cout << Summary() << "\n";

  EXPECT_THAT(history_.Check(kLeastPulls), IsEmpty()) << Summary();
  EXPECT_GE(history_.pull_count(), least_pulls_);
  EXPECT_GE(kill_count_, kDeaths);
  EXPECT_GT(proxy_->cut_count(), 0);
  EXPECT_GT(counts_.repeated * counts_.other_content * counts_.abandoned * counts_.doubled, 0)
      << Summary();
  EXPECT_EQ(server_->Stop(), 0);
}

}  // namespace
}  // namespace ema
