// SPDX-License-Identifier: Apache-2.0
#include "server/ops/port_file.h"

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

TEST(WritePortFileTest, ReplacesTheFile) {
  const std::string path = absl::StrCat(testing::TempDir(), "/ema_port_file-", getpid());
  for (const int port : {50051, 7}) {
    ASSERT_THAT(WritePortFile(path, port), IsOk());
    std::ifstream file(path);
    int read = 0;
    file >> read;
    EXPECT_EQ(read, port);
  }
  EXPECT_FALSE(std::ifstream(path + ".tmp").good());
  std::remove(path.c_str());
  EXPECT_THAT(WritePortFile(testing::TempDir() + "/no/such/folder/port", 1),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("no/such/folder/port\" cannot be written: No such file")));
}

}  // namespace
}  // namespace ema
