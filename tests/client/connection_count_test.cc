// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/connection_count.h"

#include <gtest/gtest.h>

namespace ema::client_internal {
namespace {

// As many pushes as a judgement takes.
void Note(ConnectionCount& count, double speed) {
  for (int64_t i = 0; i < ConnectionCount::kPushes; ++i) count.Note(speed);
}

ConnectionCount AfterWarmUp(int64_t max) {
  ConnectionCount count(max);
  for (int64_t i = 0; i < ConnectionCount::kWarmUp; ++i) count.Note(0.01);
  return count;
}

TEST(ConnectionCountTest, MoreAreKeptWhileTheyMakeItFaster) {
  ConnectionCount count = AfterWarmUp(8);
  EXPECT_EQ(count.get(), 1);
  Note(count, 1.0);
  EXPECT_EQ(count.get(), 2);
  Note(count, 1.9);
  EXPECT_EQ(count.get(), 4);
  Note(count, 2.0);  // Not worth it.
  EXPECT_EQ(count.get(), 2);
}

TEST(ConnectionCountTest, OneIsKeptWhereMoreDoNotHelp) {
  ConnectionCount count = AfterWarmUp(8);
  Note(count, 1.0);
  Note(count, 0.7);
  EXPECT_EQ(count.get(), 1);
  for (int64_t i = 0; i < ConnectionCount::kRest; ++i) count.Note(1.0);
  EXPECT_EQ(count.get(), 1);
  Note(count, 1.0);  // Tried again: something may have changed.
  EXPECT_EQ(count.get(), 2);
}

TEST(ConnectionCountTest, OneOddPushDecidesNothing) {
  ConnectionCount count = AfterWarmUp(8);
  count.Note(1.0);
  count.Note(0.01);
  count.Note(1.0);
  count.Note(1.0);
  count.Note(100.0);
  count.Note(1.0);
  EXPECT_EQ(count.get(), 1);
}

TEST(ConnectionCountTest, AFailureGoesBackToOne) {
  ConnectionCount trial = AfterWarmUp(8);
  Note(trial, 1.0);
  ASSERT_EQ(trial.get(), 2);
  trial.NoteFailure();
  EXPECT_EQ(trial.get(), 1);
  Note(trial, 1.0);
  EXPECT_EQ(trial.get(), 1);

  ConnectionCount kept = AfterWarmUp(2);
  Note(kept, 1.0);
  Note(kept, 2.0);
  ASSERT_EQ(kept.get(), 2);
  kept.NoteFailure();
  EXPECT_EQ(kept.get(), 1);
}

TEST(ConnectionCountTest, NeverMoreThanAllowed) {
  ConnectionCount one = AfterWarmUp(1);
  for (int i = 0; i < 20; ++i) Note(one, 1.0 + i);
  EXPECT_EQ(one.get(), 1);
  ConnectionCount five = AfterWarmUp(5);
  for (int i = 0; i < 20; ++i) Note(five, 1 << i);
  EXPECT_EQ(five.get(), 4);
}

}  // namespace
}  // namespace ema::client_internal
