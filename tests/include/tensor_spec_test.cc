// SPDX-License-Identifier: Apache-2.0
#include "ema/tensor_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <ostream>
#include <string>

#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

TEST(DtypeTest, EachHasItsSizeAndName) {
  struct Case {
    Dtype dtype;
    const char* name;
    int size;
    bool is_float;
  };
  const Case cases[] = {
      {Dtype::kFloat32, "float32", 4, true},   {Dtype::kFloat16, "float16", 2, true},
      {Dtype::kBFloat16, "bfloat16", 2, true}, {Dtype::kFloat64, "float64", 8, true},
      {Dtype::kInt8, "int8", 1, false},        {Dtype::kInt16, "int16", 2, false},
      {Dtype::kInt32, "int32", 4, false},      {Dtype::kInt64, "int64", 8, false},
      {Dtype::kUInt8, "uint8", 1, false},      {Dtype::kBool, "bool", 1, false}};
  for (const Case& c : cases) {
    EXPECT_EQ(DtypeName(c.dtype), c.name);
    EXPECT_EQ(DtypeSize(c.dtype), c.size) << c.name;
    EXPECT_EQ(IsFloat(c.dtype), c.is_float) << c.name;
    EXPECT_THAT(ParseDtype(c.name), IsOkAndHolds(c.dtype));
  }
}

TEST(DtypeTest, UnknownNameListsTheRightOnes) {
  const absl::StatusOr<Dtype> dtype = ParseDtype("fp32");
  EXPECT_THAT(dtype, StatusIs(kInvalid, AllOf(StartsWith("dtype \"fp32\": must be one of float32,"),
                                              HasSubstr("bool"))));
  EXPECT_THAT(dtype, ReasonIs(ErrorReason::kBadManifest));
}

TEST(TensorActionTest, HasNames) {
  EXPECT_EQ(TensorActionName(TensorAction::kAverage), "average");
  EXPECT_EQ(TensorActionName(TensorAction::kCopy), "copy");
  EXPECT_EQ(TensorActionName(TensorAction::kIgnore), "ignore");
}

TEST(TensorSpecTest, CountsAndPrints) {
  const TensorSpec spec{"w", Dtype::kBFloat16, {64, 3, 3}};
  EXPECT_THAT(spec.Validate(), IsOk());
  EXPECT_EQ(spec.element_count(), 576);
  EXPECT_EQ(spec.byte_count(), 1152);
  EXPECT_EQ(spec.TypeString(), "bfloat16[64, 3, 3]");
  const TensorSpec buffer{"mean", Dtype::kFloat32, {64}, /*is_buffer=*/true};
  EXPECT_EQ(buffer.TypeString(), "buffer float32[64]");
}

TEST(TensorSpecTest, ScalarsAndEmptyTensorsAreRight) {
  const TensorSpec scalar{"s", Dtype::kInt64, {}};
  EXPECT_THAT(scalar.Validate(), IsOk());
  EXPECT_EQ(scalar.element_count(), 1);
  EXPECT_EQ(scalar.TypeString(), "int64[]");
  const TensorSpec empty{"e", Dtype::kFloat32, {4, 0, 2}};
  EXPECT_THAT(empty.Validate(), IsOk());
  EXPECT_EQ(empty.byte_count(), 0);
}

TEST(TensorSpecTest, NameMayBeAnyPrintableUtf8) {
  for (const std::string name :
       {"layers.0/weight", "a b\"", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xc2\xa0",
        "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_THAT((TensorSpec{name, Dtype::kFloat32, {1}}.Validate()), IsOk()) << name;
  }
  EXPECT_THAT((TensorSpec{std::string(1024, 'x'), Dtype::kFloat32, {1}}.Validate()), IsOk());
}

struct RefusalCase {
  const char* name;
  TensorSpec spec;
  const char* message;
};
void PrintTo(const RefusalCase& c, std::ostream* os) { *os << c.name; }

class TensorSpecRefusalTest : public testing::TestWithParam<RefusalCase> {};

TEST_P(TensorSpecRefusalTest, NamesTheTensor) {
  const absl::Status status = GetParam().spec.Validate();
  EXPECT_THAT(status,
              StatusIs(kInvalid, AllOf(StartsWith("tensor \""), HasSubstr(GetParam().message))));
  EXPECT_THAT(status, ReasonIs(ErrorReason::kBadManifest));
}

constexpr int64_t kHuge = int64_t{1} << 40;

INSTANTIATE_TEST_SUITE_P(
    All, TensorSpecRefusalTest,
    testing::Values(
        RefusalCase{"EmptyName", {"", Dtype::kFloat32, {1}}, "a name is needed"},
        RefusalCase{"LongName", {std::string(1025, 'x'), Dtype::kFloat32, {1}}, "1025 bytes"},
        RefusalCase{"Metadata", {"__metadata__", Dtype::kFloat32, {1}}, "can have this name"},
        RefusalCase{"Newline", {"a\nb", Dtype::kFloat32, {1}}, "\"a\\nb\": a name must be UTF-8"},
        RefusalCase{"Delete", {"\x7f", Dtype::kFloat32, {1}}, "UTF-8"},
        RefusalCase{"Zero", {std::string("a\0b", 3), Dtype::kFloat32, {1}}, "UTF-8"},
        RefusalCase{"C1Control", {"\xc2\x85", Dtype::kFloat32, {1}}, "UTF-8"},
        RefusalCase{"LoneContinuation", {"\x80", Dtype::kFloat32, {1}}, "UTF-8"},
        RefusalCase{"CutSequence", {"\xe2\x82", Dtype::kFloat32, {1}}, "\"\\xe2\\x82\""},
        RefusalCase{"Overlong", {"\xc0\xaf", Dtype::kFloat32, {1}}, "UTF-8"},
        RefusalCase{"OverlongThree", {"\xe0\x80\xaf", Dtype::kFloat32, {1}}, "UTF-8"},
        RefusalCase{"Surrogate", {"\xed\xa0\x80", Dtype::kFloat32, {1}}, "UTF-8"},
        RefusalCase{"BeyondUnicode", {"\xf4\x90\x80\x80", Dtype::kFloat32, {1}}, "UTF-8"},
        RefusalCase{"BadLead", {"\xff", Dtype::kFloat32, {1}}, "UTF-8"},
        RefusalCase{"UnknownDtype", {"w", static_cast<Dtype>(0), {1}}, "dtype number 0"},
        RefusalCase{"FutureDtype", {"w", static_cast<Dtype>(11), {1}}, "dtype number 11"},
        RefusalCase{"NegativeDtype", {"w", static_cast<Dtype>(INT32_MIN), {1}}, "dtype number"},
        RefusalCase{"Rank", {"w", Dtype::kInt8, {1, 1, 1, 1, 1, 1, 1, 1, 1}}, "9 dimensions"},
        RefusalCase{"NegativeExtent", {"w", Dtype::kInt8, {3, -1}}, "extent -1 in int8[3, -1]"},
        RefusalCase{"Overflow", {"w", Dtype::kInt8, {kHuge, kHuge}}, "does not fit in 2^62 bytes"},
        RefusalCase{"HalfOverflow", {"w", Dtype::kFloat32, {int64_t{1} << 60}}, "2^62"},
        RefusalCase{"OverflowBesideZero", {"w", Dtype::kInt8, {0, kHuge, kHuge}}, "2^62"},
        RefusalCase{
            "LargestExtent", {"w", Dtype::kInt8, {std::numeric_limits<int64_t>::max()}}, "2^62"}),
    [](const auto& test) { return test.param.name; });

TEST(TensorSpecTest, LargestSizeIsRight) {
  EXPECT_THAT((TensorSpec{"w", Dtype::kInt8, {(int64_t{1} << 62) - 1}}.Validate()), IsOk());
}

}  // namespace
}  // namespace ema
