// SPDX-License-Identifier: Apache-2.0
#include "server/device/gpu_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const GpuList kMixed = {.gpus = {{"Tesla T4", 75}, {"NVIDIA A10", 86}, {"NVIDIA H200", 90}},
                        .oldest_capability = 80};

TEST(GpuChoiceTest, AGpuWithoutCodeIsRefusedWithWhatItHasAndWhatIsNeeded) {
  EXPECT_THAT(CheckGpu(kMixed, 0), StatusIs(absl::StatusCode::kFailedPrecondition,
                                            AllOf(HasSubstr("GPU 0"), HasSubstr("Tesla T4"),
                                                  HasSubstr("7.5"), HasSubstr("8.0 and later"))));
  EXPECT_THAT(CheckGpu(kMixed, 1), IsOk());
  EXPECT_THAT(CheckGpu(kMixed, 2), IsOk());
}

TEST(GpuChoiceTest, AnIndexThatIsNotThereIsRefused) {
  for (const int index : {-1, 3}) {
    EXPECT_THAT(CheckGpu(kMixed, index),
                StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("there are 3")));
  }
}

TEST(GpuChoiceTest, ADescriptionSaysWhyAGpuIsOfNoUse) {
  EXPECT_THAT(Describe(kMixed),
              AllOf(testing::StartsWith("3 GPUs; GPU 0"), testing::Not(HasSubstr("H200"))));
  EXPECT_EQ(Describe({{{"NVIDIA H200", 90}}, 80}), "1 GPU");
}

}  // namespace
}  // namespace ema
