// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/quiet_grpc.h"

#include <gmock/gmock.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace ema::client_internal {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class QuietGrpcTest : public testing::Test {
 protected:
  // As grpc_init() does.
  QuietGrpcTest() { gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR); }
  ~QuietGrpcTest() override {
    gpr_set_log_function(nullptr);
    unsetenv("GRPC_VERBOSITY");
  }
  // What stderr has of it.
  static std::string Told(const char* message) {
    testing::internal::CaptureStderr();
    gpr_log("x.cc", 47, GPR_LOG_SEVERITY_ERROR, "%s", message);
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(QuietGrpcTest, ErrorsAreNotPrinted) {
  unsetenv("GRPC_VERBOSITY");
  EXPECT_THAT(Told("Handshake failed"), HasSubstr("Handshake failed"));
  QuietGrpc();
  EXPECT_THAT(Told("Handshake failed"), IsEmpty());
  // Without it nobody would know why the process has gone.
  EXPECT_THAT(Told("assertion failed: x > 0"), HasSubstr("x.cc:47: assertion failed: x > 0"));
}

TEST_F(QuietGrpcTest, WhoAsksForThemGetsThem) {
  setenv("GRPC_VERBOSITY", "error", /*overwrite=*/1);
  QuietGrpc();
  EXPECT_THAT(Told("Handshake failed"), HasSubstr("Handshake failed"));
}

}  // namespace
}  // namespace ema::client_internal
