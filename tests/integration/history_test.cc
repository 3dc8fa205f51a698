// SPDX-License-Identifier: Apache-2.0
//
// The checker itself: it must find each thing that it is for.
#include "tests/integration/history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace ema {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Version MakeVersion(int64_t number, int64_t step, double weight) {
  Version version;
  version.number = number;
  version.step = step;
  version.tracks.push_back({.track = "ema", .updated = true, .update_weight = weight});
  return version;
}

class HistoryTest : public testing::Test {
 protected:
  // Steps 1 and 2 commit, and both versions are pulled.
  void SetUp() override {
    history_.OnBegin(1);
    history_.OnVersion(MakeVersion(1, 1, 1), 0);
    history_.OnAck(1, MakeVersion(1, 1, 1));
    history_.OnPull(RightPull(1));
    history_.OnBegin(2);
    history_.OnVersion(MakeVersion(2, 2, 0.5), 0);
    history_.OnAck(2, MakeVersion(2, 2, 0.5));
    history_.OnPull(RightPull(2));
  }

  History::Pull RightPull(int64_t version) const {
    History::Pull pull;
    pull.acked_before = history_.acked_version();
    pull.begun_after = history_.begun_step();
    pull.version = pull.step = version;
    const auto first = static_cast<float>(FillValue(1));
    pull.sight.average =
        version == 1 ? first : first + (static_cast<float>(FillValue(2)) - first) / 2;
    pull.sight.copied = FillValue(version);
    return pull;
  }

  // That a pull which is right but for what `spoil` does is found.
  template <typename Spoil>
  void ExpectFound(const std::string& text, const Spoil& spoil) {
    History::Pull pull = RightPull(2);
    spoil(pull);
    history_.OnPull(pull);
    EXPECT_THAT(history_.Check(0), Contains(HasSubstr(text)));
  }

  History history_;
};

TEST_F(HistoryTest, ARightOneHasNoViolations) {
  History::Pull older = RightPull(1);
  older.asked = 1;  // So it may be older than the newest.
  history_.OnPull(older);
  EXPECT_THAT(history_.Check(3), IsEmpty());
}

TEST_F(HistoryTest, ATornPullIsFound) {
  ExpectFound("is torn: here", [](History::Pull& pull) { pull.sight.torn = "here"; });
}

TEST_F(HistoryTest, AnAverageThatIsOneBitOffIsFound) {
  ExpectFound("has the average", [](History::Pull& pull) {
    pull.sight.average = std::nextafterf(pull.sight.average, 1000.0f);
  });
}

TEST_F(HistoryTest, AnotherStepsCopyIsFound) {
  ExpectFound("copied, expected", [](History::Pull& pull) { ++pull.sight.copied; });
}

TEST_F(HistoryTest, AVersionThatWasNeverCommittedIsFound) {
  ExpectFound("was never committed", [](History::Pull& pull) { pull.version = 3; });
  ExpectFound("was never committed", [](History::Pull& pull) { pull.step = 3; });
}

TEST_F(HistoryTest, APullOlderThanAnAcknowledgedVersionIsFound) {
  ExpectFound("had been acknowledged before it began", [this](History::Pull& pull) {
    pull = RightPull(1);
    pull.puller = 9;
  });
}

TEST_F(HistoryTest, APullOlderThanTheOneBeforeIsFound) {
  ExpectFound("after version 2", [this](History::Pull& pull) {
    pull = RightPull(1);
    pull.acked_before = 0;
  });
}

TEST_F(HistoryTest, AStepThatNobodyHasBegunIsFound) {
  ExpectFound("before any rank began it", [](History::Pull& pull) { pull.begun_after = 1; });
}

TEST_F(HistoryTest, AnotherVersionThanWasAskedForIsFound) {
  ExpectFound("but 1 was asked for", [](History::Pull& pull) { pull.asked = 1; });
}

TEST_F(HistoryTest, AnAcknowledgedPushThatWasNotCommittedIsFound) {
  history_.OnAck(3, MakeVersion(3, 3, 0.5));
  EXPECT_THAT(history_.Check(0), Contains(HasSubstr("acknowledged, but not committed so")));
}

TEST_F(HistoryTest, VersionsThatAreMissedOrGoBackAreFound) {
  history_.OnVersion(MakeVersion(4, 4, 0.5), 0);
  EXPECT_THAT(history_.Check(0), Contains(HasSubstr("version 4 of step 4 after version 2")));
  history_.OnVersion(MakeVersion(5, 4, 0.5), 1);
  EXPECT_THAT(history_.Check(0), Contains(HasSubstr("the watcher missed 1")));
}

TEST_F(HistoryTest, TrafficThatIsTooThinIsFound) {
  EXPECT_THAT(history_.Check(2), IsEmpty());
  EXPECT_THAT(history_.Check(3), Contains(HasSubstr("too thin: 2 pulls between the start")));
  history_.OnFault("a cut");
  EXPECT_THAT(history_.Check(2),
              Contains(HasSubstr("too thin: 0 pulls between a cut and the end")));
}

}  // namespace
}  // namespace ema
