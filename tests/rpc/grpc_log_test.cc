// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/grpc_log.h"

#include <gmock/gmock.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace ema {
namespace {

using ::testing::SizeIs;

class GrpcLogTest : public testing::Test {
 protected:
  GrpcLogTest() {
    gpr_set_log_verbosity(GPR_LOG_SEVERITY_DEBUG);
    SendGrpcLogTo([this](const LogEvent& event) {
      const std::lock_guard lock(mu_);
      events_.push_back(event);
    });
  }
  ~GrpcLogTest() override {
    gpr_set_log_function(nullptr);
    gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
  }

  std::mutex mu_;
  std::vector<LogEvent> events_;
};

TEST_F(GrpcLogTest, ALineIsAnEventWithItsPlace) {
  gpr_log("/build/src/core/tsi/x.cc", 47, GPR_LOG_SEVERITY_ERROR, "Handshake\n%s", "failed");
  gpr_log("y.cc", 48, GPR_LOG_SEVERITY_INFO, "more");
  gpr_log("y.cc", 49, GPR_LOG_SEVERITY_DEBUG, "most");
  ASSERT_THAT(events_, SizeIs(3));
  EXPECT_EQ(ToText(events_[0]),
            "gRPC message=\"Handshake\\nfailed\" file=x.cc line=47 more_before=0");
  EXPECT_EQ(events_[0].level, LogLevel::kWarning);
  EXPECT_EQ(ToText(events_[1]), "gRPC message=more file=y.cc line=48");
  EXPECT_EQ(events_[1].level, LogLevel::kInfo);
  EXPECT_EQ(events_[2].level, LogLevel::kDebug);
}

TEST_F(GrpcLogTest, AStormGetsAFewLinesOfABoundedLength) {
  const std::string text(100'000, 'x');
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&text] {
      for (int times = 0; times < 1000; ++times) gpr_log(GPR_ERROR, "%s", text.c_str());
    });
  }
  threads.clear();
  EXPECT_GE(events_.size(), 10);
  EXPECT_LT(events_.size(), 1000);
  for (const LogEvent& event : events_) EXPECT_LT(ToText(event).size(), 1200);
}

TEST_F(GrpcLogTest, WhatEndsTheProcessIsSaidInAStorm) {
  EXPECT_DEATH(
      {
        SendGrpcLogTo(
            [](const LogEvent& event) { std::fprintf(stderr, "%s\n", ToText(event).c_str()); });
        for (int i = 0; i < 100; ++i) gpr_log(GPR_ERROR, "handshake");
        GPR_ASSERT(1 + 1 == 3);
      },
      "assertion failed: 1 \\+ 1 == 3");
}

}  // namespace
}  // namespace ema
