// SPDX-License-Identifier: Apache-2.0
//
// A name service that does not answer.
#include "client/cpp/transport/dial.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ema/client.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"

namespace {

std::atomic<bool> name_service_hangs = false;

}  // namespace

// In place of the C library's: "server.test" is this machine, "nobody.test" is none.
extern "C" int getaddrinfo(const char* host, const char* port, const addrinfo* hints,
                           addrinfo** found) {
  using Function = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "getaddrinfo"));
  if (host != nullptr && std::strcmp(host, "nobody.test") == 0) return EAI_NONAME;
  if (host == nullptr || std::strcmp(host, "server.test") != 0) {
    return real(host, port, hints, found);
  }
  name_service_hangs.wait(true);
  return real("127.0.0.1", port, hints, found);
}

namespace ema::client_internal {
namespace {

using ::testing::HasSubstr;

class DialTest : public testing::Test {
 protected:
  ~DialTest() override { SetHanging(false); }

  static void SetHanging(bool hangs) {
    name_service_hangs = hangs;
    name_service_hangs.notify_all();
  }
  absl::StatusOr<int> Dial(absl::Duration timeout) {
    return dialer_.Dial(After(SteadyNow(), timeout), &interrupt_);
  }

  FakeServer server_{*Manifest::Create({{.name = "w", .shape = {4}}})};
  Dialer dialer_{{.host = "server.test", .port = absl::StrCat(server_.port()), .path = {}}};
  Interrupt interrupt_;
};

TEST_F(DialTest, ALookUpKeepsTheDeadline) {
  SetHanging(true);
  EXPECT_THAT(Dial(absl::Milliseconds(50)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("server.test")));
}

TEST_F(DialTest, AHostThatNobodyKnowsIsUnavailable) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create("nobody.test:50051"));
  EXPECT_THAT(client->GetModel("m", absl::Milliseconds(50)),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("nobody.test")));
}

TEST_F(DialTest, ALookUpCanBeInterrupted) {
  SetHanging(true);
  std::thread other([this] { interrupt_.Fire(); });
  EXPECT_THAT(Dial(absl::InfiniteDuration()),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("interrupted")));
  other.join();
}

TEST_F(DialTest, WhatWasFoundOnceIsUsedWhileTheNameServiceHangs) {
  EMA_ASSERT_OK_AND_ASSIGN(const int first, Dial(absl::Seconds(20)));
  SetHanging(true);
  EMA_ASSERT_OK_AND_ASSIGN(const int second, Dial(absl::Seconds(20)));
  close(first);
  close(second);
}

}  // namespace
}  // namespace ema::client_internal
