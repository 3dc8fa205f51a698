// SPDX-License-Identifier: Apache-2.0
//
// Hundreds of peers that open a stream and do nothing, while one good pair works.
#include "tests/integration/stalled_peers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string_view>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/client.h"
#include "server/base/crc32c.h"
#include "tests/testutil/server_process.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

using ::testing::IsEmpty;

constexpr int kPeers = 300;
constexpr int kPeersPerConnection = 30;
constexpr int64_t kElements = 500'000;  // More than a stream's window takes.
constexpr int64_t kCrowdElements = 300 * 16;
// As ema-server has them.
constexpr int kPushStreams = 32;
constexpr int kPullStreams = 64;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kMemoryFactor = 8;  // Freed memory waits for being misused.
#else
constexpr int64_t kMemoryFactor = 1;
#endif
// What one of these peers may cost: a window of gRPC, and what the call takes.
constexpr int64_t kStalledStreamBytes = kMemoryFactor * (int64_t{256} << 10);
// What the heap may keep when they have gone.
constexpr int64_t kKeptBytes = kMemoryFactor * (int64_t{64} << 20);
// On a GPU, the ring of a stream that has sent a chunk, and a bit; kept for the streams to come.
int64_t RingBytes() {
  const char* const device = std::getenv("EMA_TEST_DEVICE");
  return device != nullptr && std::string_view(device).starts_with("cuda") ? int64_t{17} << 20 : 0;
}
// Until all is freed that they held: long before any time-out of theirs.
constexpr absl::Duration kFreeing = absl::Seconds(30);
constexpr absl::Duration kRefusal = absl::Milliseconds(50);
constexpr absl::Duration kTimeout = absl::Seconds(60);
constexpr absl::Duration kPollInterval = absl::Milliseconds(5);

// Waits until `condition`. False: it was not so in time.
template <typename Condition>
bool Eventually(absl::Duration timeout, const Condition& condition) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!condition()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(kPollInterval);
  }
  return true;
}

class StalledPeersTest : public testing::Test {
 protected:
  // The good pair has "good", with one version; the stalled pushers are the ranks of "crowd".
  void Start(std::vector<std::string> options, const Client::Options& client_options = {}) {
    EMA_ASSERT_OK_AND_ASSIGN(server_, ServerProcess::Start(EMA_SERVER_BINARY, options));
    proxy_ = std::make_unique<TcpProxy>(server_->port());
    EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_->address(), client_options));
    const std::vector<TrackConfig> tracks = {{.name = "ema", .schedule = *Schedule::Parse("1ba")}};
    ASSERT_THAT(client_->CreateModel(
                    "good", *Manifest::Create({{.name = "w", .shape = {kElements}}}), tracks),
                IsOk());
    ASSERT_THAT(client_->CreateModel(
                    "crowd", *Manifest::Create({{.name = "w", .shape = {kCrowdElements}}}), tracks),
                IsOk());
    EMA_ASSERT_OK_AND_ASSIGN(run_, client_->OpenRun("good", {}));
    ASSERT_NO_FATAL_FAILURE(PushAndPull(1));
    for (int64_t rank = 0; rank < kPeers; ++rank) {
      EMA_ASSERT_OK_AND_ASSIGN(
          crowd_,
          client_->OpenRun("crowd", {.launch_id = "crowd",
                                     .rank = rank,
                                     .world_size = kPeers,
                                     .shards = std::vector<Shard>{{0, {rank * 16}, {16}}}}));
      digests_.push_back(crowd_->layout().digest());
    }
  }

  // One step of the good pair.
  void PushAndPull(int64_t step) {
    const std::vector<float> weights(kElements, static_cast<float>(step));
    EMA_ASSERT_OK_AND_ASSIGN(const Version version,
                             run_->Push(step, TrainingTime::AtBatch(step),
                                        {std::as_bytes(std::span(weights))}, kTimeout));
    EXPECT_EQ(version.step, step);
    std::vector<float> pulled(kElements);
    const auto target = [&](const PullInfo&) -> absl::StatusOr<std::span<std::byte>> {
      return std::as_writable_bytes(std::span(pulled));
    };
    EMA_ASSERT_OK_AND_ASSIGN(const PullInfo info,
                             client_->Pull("good", "ema", {}, target, kTimeout));
    EXPECT_EQ(info.version.number, version.number);
    for (const float element : pulled) ASSERT_EQ(element, pulled[0]);
  }

  // A header and a chunk, as rank `rank` of the crowd sends them. Every third: no chunk; every
  // fifth: nothing at all.
  std::vector<v1::PushRequest> CrowdMessages(int64_t rank) const {
    v1::PushRequest header;
    header.mutable_header()->set_model("crowd");
    header.mutable_header()->set_run_epoch(crowd_->run_epoch());
    header.mutable_header()->set_rank(rank);
    header.mutable_header()->set_layout_digest(digests_[rank]);
    header.mutable_header()->set_step(1);
    header.mutable_header()->mutable_time()->set_batch(1);
    v1::PushRequest chunk;
    const std::string data(32, '\0');  // Half of the rank's bytes.
    chunk.mutable_chunk()->set_crc32c(Crc32c(0, std::as_bytes(std::span(data))));
    chunk.mutable_chunk()->set_data(data);
    if (rank % 5 == 0) return {};
    if (rank % 3 == 0) return {header};
    return {header, chunk};
  }

  // Half of the connections go through the proxy.
  void StartPushers(StalledPeers& peers) {
    for (int64_t rank = 0; rank < kPeers; ++rank) {
      if (rank % kPeersPerConnection == 0) Connect(peers, rank / kPeersPerConnection);
      peers.StartPush(CrowdMessages(rank));
    }
  }
  void StartPullers(StalledPeers& peers, int64_t version) {
    v1::PullRequest request;
    request.set_model("good");
    request.set_track("ema");
    request.set_version(version);
    for (int i = 0; i < kPeers; ++i) {
      if (i % kPeersPerConnection == 0) Connect(peers, i / kPeersPerConnection);
      peers.StartPull(request);
    }
  }
  void Connect(StalledPeers& peers, int64_t connection) {
    peers.Connect(connection % 2 == 0 ? server_->address() : proxy_->address());
  }

  PushProgress::State CrowdState() {
    const auto progress = crowd_->QueryPush(1, /*abandon_if_unfinished=*/false);
    EXPECT_THAT(progress, IsOk());
    return progress.ok() ? progress->state : PushProgress::State::kUnknown;
  }

  // As many pushes as there are places are admitted, and one more is not.
  void ExpectAllPlacesFree() {
    StalledPeers again;
    again.Connect(server_->address());
    for (int i = 0; i < kPeers + 1; ++i) again.StartPush({});
    ASSERT_TRUE(again.AwaitStalled(kPeers + 1, kTimeout));
    StalledPeers beyond;
    EXPECT_TRUE(Eventually(kTimeout, [&] {
      beyond.Connect(server_->address());
      beyond.StartPush({});
      return beyond.AwaitEnded(1, absl::Milliseconds(50));
    }));
    EXPECT_THAT(again.ended(), IsEmpty());
  }

  void ExpectRefused(const std::string& name, const std::vector<StalledPeers::Ended>& refused) {
    std::vector<absl::Duration> times;
    for (const StalledPeers::Ended& one : refused) {
      EXPECT_EQ(one.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
      EXPECT_EQ(one.detail.reason(), v1::ERROR_REASON_TOO_MANY_STREAMS);
      EXPECT_GT(one.detail.retry_delay_ms(), 0);
      times.push_back(one.after);
    }
    std::sort(times.begin(), times.end());
    std::cout << refused.size() << " stalled " << name << " refused, after "
              << times[times.size() / 2] << " (median), " << times.back() << " (last)\n";
  }

  // One at a time; the best, because others use this machine, too.
  void ExpectRefusedAtOnce() {
    StalledPeers more;
    more.Connect(server_->address());
    for (size_t i = 1; i <= 20; ++i) {
      more.StartPush({});
      ASSERT_TRUE(more.AwaitEnded(i, kTimeout));
    }
    const std::vector<StalledPeers::Ended> refused = more.ended();
    ExpectRefused("pushers", refused);
    const auto soonest =
        std::min_element(refused.begin(), refused.end(),
                         [](const auto& x, const auto& y) { return x.after < y.after; });
    EXPECT_LT(soonest->after, kRefusal);
  }

  bool IsKept(int64_t version) {
    const auto versions = client_->ListVersions("good");
    if (!versions.ok()) return true;
    return std::any_of(versions->begin(), versions->end(), [&](const auto& listed) {
      return listed.version.number == version && listed.available;
    });
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<TcpProxy> proxy_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<ema::Run> run_;
  std::unique_ptr<ema::Run> crowd_;  // Of its last rank.
  std::vector<int64_t> digests_;
};

TEST_F(StalledPeersTest, AGoodPairWorksBesideThemAndAllIsFreedWhenTheyLeave) {
  Start({"--max-push-streams", absl::StrCat(kPeers + 1), "--max-pull-streams",
         absl::StrCat(kPeers + 1), "--memory-bytes", "1G", "--session-timeout", "5m",
         "--stream-timeout", "5m"});
  int64_t step = 1;
  while (step < 20) ASSERT_NO_FATAL_FAILURE(PushAndPull(++step));
  const int64_t resident_before = server_->resident_bytes();
  const int64_t sockets_before = server_->socket_count();

  StalledPeers pushers;
  StalledPeers pullers;
  StartPullers(pullers, step);  // Of the newest version, which becomes an old one.
  const int64_t held = step;
  StartPushers(pushers);
  ASSERT_TRUE(pushers.AwaitStalled(kPeers, kTimeout));
  ASSERT_TRUE(pullers.AwaitStalled(kPeers, kTimeout));
  while (step < 60) ASSERT_NO_FATAL_FAILURE(PushAndPull(++step));
  // All were admitted, and are still there.
  EXPECT_THAT(pushers.ended(), IsEmpty());
  EXPECT_THAT(pullers.ended(), IsEmpty());
  EXPECT_TRUE(IsKept(held));
  EXPECT_EQ(CrowdState(), PushProgress::State::kOpen);
  const int64_t resident_during = server_->resident_bytes();
  EXPECT_LT(resident_during, resident_before + kPeers * (kStalledStreamBytes + RingBytes()));

  // Some cancel, the others' connections break.
  proxy_->CutAll();
  pushers.Leave();
  pullers.Leave();
  const absl::Time left = absl::Now();
  EXPECT_TRUE(Eventually(kFreeing, [&] { return server_->socket_count() <= sockets_before; }))
      << server_->socket_count();
  EXPECT_TRUE(Eventually(kFreeing - (absl::Now() - left), [&] {
    PushAndPull(++step);
    return !IsKept(held);
  })) << "the stalled readers' version is still there";
  EXPECT_TRUE(Eventually(kFreeing - (absl::Now() - left), [&] {
    return server_->resident_bytes() < resident_before + kKeptBytes + kPeers * RingBytes();
  }));
  std::cout << "resident: " << resident_before << " bytes before, " << resident_during
            << " with the stalled, " << server_->resident_bytes() << " after; all but the session "
            << "freed " << absl::Now() - left << " after they left\n";
  ExpectAllPlacesFree();
  // The ranks may come back to their step, until its timer ends or one of them gives it up.
  EXPECT_EQ(CrowdState(), PushProgress::State::kOpen);
  EXPECT_THAT(crowd_->QueryPush(1, /*abandon_if_unfinished=*/true), IsOk());
  EXPECT_EQ(CrowdState(), PushProgress::State::kUnknown);
  EXPECT_EQ(server_->Stop(), 0);
}

TEST_F(StalledPeersTest, ThoseWithoutAPlaceAreRefusedAtOnceAndTheGoodPairGetsThatOfAStalledOne) {
  constexpr absl::Duration kStreamTimeout = absl::Minutes(1);
  // Without the lane, whose address is another, all are one caller.
  Start({"--stream-timeout", absl::FormatDuration(kStreamTimeout), "--memory-bytes", "1G",
         "--drain-grace", "1s"},
        {.same_host_lane = false});
  StalledPeers pushers;
  StalledPeers pullers;
  StartPushers(pushers);
  StartPullers(pullers, 1);
  ASSERT_TRUE(pushers.AwaitEnded(kPeers - kPushStreams, kTimeout));
  ASSERT_TRUE(pullers.AwaitEnded(kPeers - kPullStreams, kTimeout));
  ExpectRefused("pushers", pushers.ended());
  ExpectRefused("pullers", pullers.ended());
  ExpectRefusedAtOnce();

  const absl::Time begin = absl::Now();
  ASSERT_NO_FATAL_FAILURE(PushAndPull(2));
  const absl::Duration waited = absl::Now() - begin;
  std::cout << "the good pair got in after " << waited << "\n";
  EXPECT_LT(waited, kStreamTimeout / 2);
  for (int64_t step = 3; step <= 20; ++step) ASSERT_NO_FATAL_FAILURE(PushAndPull(step));
  // Who had to go was told why; those who do not read cannot be.
  const std::vector<StalledPeers::Ended> ended = pushers.ended();
  EXPECT_GT(std::count_if(ended.begin(), ended.end(),
                          [](const StalledPeers::Ended& one) {
                            return one.detail.reason() == v1::ERROR_REASON_STALLED;
                          }),
            0);
  EXPECT_LT(ended.size(), size_t{kPeers});
  EXPECT_EQ(server_->Stop(), 0);
}

TEST_F(StalledPeersTest, OneCallerWhoTakesAllPlacesAgainAndAgainDoesNotSlowAGoodPairDown) {
  constexpr char kGood[] = "good-6f1d2c70b4e94b0f";
  constexpr char kGreedy[] = "greedy-0d0f6f0c0b3a4a";
  const std::string tokens = absl::StrCat(testing::TempDir(), "/stalled_peers_tokens-", getpid());
  std::ofstream(tokens) << "trainer " << kGood << "\ntrainer " << kGreedy << "\n";
  const absl::Cleanup remove = [&] { std::remove(tokens.c_str()); };
  Start({"--auth-tokens", tokens, "--memory-bytes", "1G", "--drain-grace", "1s", "--stream-timeout",
         "5m"},
        {.same_host_lane = false, .token = kGood});
  int64_t step = 1;
  const auto time_steps = [&] {
    const absl::Time begin = absl::Now();
    for (int i = 0; i < 40; ++i) PushAndPull(++step);
    return absl::Now() - begin;
  };
  const absl::Duration alone = time_steps();

  StalledPeers pushers;
  StalledPeers pullers;
  pushers.Connect(server_->address(), kGreedy);
  pullers.Connect(server_->address(), kGreedy);
  v1::PullRequest pull;
  pull.set_model("good");
  pull.set_track("ema");
  pull.set_version(step);  // One version: pins have a limit of their own.
  std::atomic<bool> is_over = false;
  std::thread greedy([&] {
    size_t push_count = 0;
    size_t pull_count = 0;
    while (!is_over) {
      for (; push_count < kPushStreams + pushers.ended().size(); ++push_count) {
        pushers.StartPush({});
      }
      for (; pull_count < kPullStreams + pullers.ended().size(); ++pull_count) {
        pullers.StartPull(pull);
      }
      absl::SleepFor(kPollInterval);
    }
  });
  EXPECT_TRUE(pushers.AwaitStalled(kPushStreams, kTimeout));
  EXPECT_TRUE(pullers.AwaitStalled(kPullStreams, kTimeout));
  const absl::Duration beside = time_steps();
  is_over = true;
  greedy.join();
  std::cout << "the good pair's speed: " << absl::FDivDuration(alone, beside)
            << " of that without the other\n";
  // Without shares, each step has to wait until the eviction of a stalled stream is due: one in
  // 7.5 s. The rest is for others who use this machine.
  EXPECT_LT(beside, 2 * alone + absl::Seconds(30));
  EXPECT_EQ(server_->Stop(), 0);
}

}  // namespace
}  // namespace ema
