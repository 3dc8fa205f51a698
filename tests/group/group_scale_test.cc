// SPDX-License-Identifier: Apache-2.0
//
// The commits of a large group, by the state machines of its servers alone: 4096 ranks push to 100
// partitions.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/group/participant.h"
#include "server/group/rounds.h"

namespace ema::group {
namespace {

constexpr size_t kPartitions = 100;
constexpr int64_t kRanks = 4096;
constexpr int64_t kIncarnation = 7;
constexpr int64_t kEpoch = 1;

// The servers of a model whose run is open. Counts the messages between them; the home's own
// partition needs none.
class LargeGroup {
 public:
  LargeGroup() : rounds_(OptionsOf(), now_) {
    for (size_t p = 0; p < kPartitions; ++p) {
      participants_.emplace_back(IdOf(p), /*base_version=*/0);
      rounds_.OnSync({.from = IdOf(p)}, now_);
    }
    rounds_.OpenRun(kEpoch, "launch");
    for (Participant& participant : participants_) participant.OnState(rounds_.state());
  }

  const std::vector<Participant>& participants() const { return participants_; }
  int64_t round() const { return rounds_.state().round; }
  int64_t requests() const { return requests_; }
  int64_t replies() const { return replies_; }

  // All ranks push the step to all partitions, in random order.
  void Push(int64_t step, std::mt19937& random) {
    std::vector<size_t> arrivals;  // The partition of each push.
    for (size_t p = 0; p < kPartitions; ++p) arrivals.insert(arrivals.end(), kRanks, p);
    std::shuffle(arrivals.begin(), arrivals.end(), random);
    std::vector<int64_t> missing_ranks(kPartitions, kRanks);
    const Participant::Header header = HeaderOf(step, round());
    for (const size_t p : arrivals) {
      ASSERT_EQ(participants_[p].OnHeader(header), Participant::HeaderAnswer::kAccept) << p;
      if (--missing_ranks[p] > 0) continue;
      ASSERT_TRUE(participants_[p].EndReceiving(header.round,
                                                PreparedStep{.step = step, .run_epoch = kEpoch}));
      ASSERT_NO_FATAL_FAILURE(SendVote(p));
    }
  }

  // The answer of a partition to a push of that round.
  Participant::HeaderAnswer PushLate(size_t partition, int64_t step, int64_t round) {
    return participants_[partition].OnHeader(HeaderOf(step, round));
  }

 private:
  static PartitionId IdOf(size_t partition) {
    return {kIncarnation, static_cast<int64_t>(partition), absl::StrCat("boot-", partition)};
  }
  static Rounds::Options OptionsOf() {
    Rounds::Options options{.incarnation = kIncarnation};
    for (size_t p = 0; p < kPartitions; ++p) {
      options.members.push_back({absl::StrCat("ema-", p), IdOf(p).boot});
    }
    return options;
  }
  static Participant::Header HeaderOf(int64_t step, int64_t round) {
    return {.incarnation = kIncarnation, .round = round, .run_epoch = kEpoch, .step = step};
  }

  void SendVote(size_t from) {
    if (from != 0) ++requests_;
    held_.push_back(from);
    const Rounds::Result result =
        rounds_.OnVote(*participants_[from].to_send(), now_, absl::FromUnixSeconds(1000));
    ASSERT_EQ(result.round_ended, held_.size() == kPartitions);
    if (!result.round_ended) return;
    for (const size_t p : held_) {
      if (p != 0) ++replies_;
      ASSERT_EQ(participants_[p].OnState(rounds_.state()).kind, Participant::Action::Kind::kPublish)
          << p;
    }
    held_.clear();
  }

  const SteadyTime now_{std::chrono::hours(1)};
  std::vector<Participant> participants_;
  Rounds rounds_;
  std::vector<size_t> held_;  // The partitions whose Vote the home has not answered.
  int64_t requests_ = 0;
  int64_t replies_ = 0;
};

TEST(GroupScaleTest, APushCostsOneRequestAndOneReplyForEachOtherServer) {
  constexpr int64_t kSteps = 5;
  std::mt19937 random(50);
  LargeGroup group;
  for (int64_t step = 1; step <= kSteps; ++step) {
    ASSERT_NO_FATAL_FAILURE(group.Push(step, random)) << step;
    for (const Participant& participant : group.participants()) {
      ASSERT_EQ(participant.version(), step) << participant.id().partition;
    }
  }
  EXPECT_EQ(group.requests(), kSteps * (static_cast<int64_t>(kPartitions) - 1));
  EXPECT_EQ(group.replies(), group.requests());
  // A rank that pushes the last step again, in its old round, does not begin a session.
  EXPECT_EQ(group.PushLate(kPartitions - 1, kSteps, group.round() - 1),
            Participant::HeaderAnswer::kStaleRound);
}

}  // namespace
}  // namespace ema::group
