// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/library_log.h"

#include <gmock/gmock.h>
#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ema/v1/ema_service.pb.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;

class LibraryLogTest : public testing::Test {
 protected:
  LibraryLogTest() {
    gpr_set_log_verbosity(GPR_LOG_SEVERITY_DEBUG);
    SendLibraryLogTo(
        [this](const LogEvent& event) {
          const std::lock_guard lock(mu_);
          events_.push_back(event);
        },
        [] {});
  }
  ~LibraryLogTest() override {
    google::protobuf::SetLogHandler(nullptr);
    gpr_set_log_function(nullptr);
    gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
  }

  std::mutex mu_;
  std::vector<LogEvent> events_;
};

TEST_F(LibraryLogTest, ALineIsAnEventWithItsPlace) {
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

// Each call of a client's may bring a text that is no UTF-8.
TEST_F(LibraryLogTest, ProtobufsLinesAreEventsToo) {
  v1::GetModelRequest request;
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(request.ParseFromString("\x0a\x02\xff\xfe"));
  ASSERT_FALSE(events_.empty());
  EXPECT_LT(events_.size(), 100);
  EXPECT_EQ(events_[0].level, LogLevel::kWarning);
  EXPECT_THAT(ToText(events_[0]),
              AllOf(StartsWith("protobuf message="), HasSubstr("ema.v1.GetModelRequest.model")));
  // They take nothing from gRPC's.
  gpr_log(GPR_ERROR, "handshake");
  EXPECT_THAT(ToText(events_.back()), StartsWith("gRPC message=handshake"));
}

TEST_F(LibraryLogTest, AStormGetsAFewLinesOfABoundedLength) {
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

TEST_F(LibraryLogTest, WhatEndsTheProcessIsSaidInAStorm) {
  EXPECT_DEATH(
      {
        std::string lines;
        SendLibraryLogTo([&](const LogEvent& event) { lines += ToText(event) + '\n'; },
                         [&] { std::fputs(lines.c_str(), stderr); });
        for (int i = 0; i < 100; ++i) gpr_log(GPR_ERROR, "handshake");
        GPR_ASSERT(1 + 1 == 3);
      },
      "assertion failed: 1 \\+ 1 == 3");
}

}  // namespace
}  // namespace ema
