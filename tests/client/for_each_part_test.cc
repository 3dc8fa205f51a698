// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/group/for_each_part.h"

#include <gtest/gtest.h>

#include "absl/status/status.h"
#include "client/cpp/transport/interrupt.h"

namespace ema::client_internal {
namespace {

TEST(ForEachPartTest, ErrorOfTheFailedPartIsReturnedAndNotThoseOfInterruptedParts) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    Interrupt interrupt;
    const absl::Status status = ForEachPart(8, &interrupt, [](size_t part, Interrupt* inner) {
      if (part == 1) return absl::AbortedError("the part has failed");
      while (!inner->fired()) {
      }
      return absl::CancelledError("interrupted");
    });
    ASSERT_EQ(status, absl::AbortedError("the part has failed")) << attempt;
  }
}

}  // namespace
}  // namespace ema::client_internal
