// SPDX-License-Identifier: Apache-2.0
#include "server/format/safetensors.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

std::string Length(uint64_t n) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(n >> (8 * i));
  return bytes;
}

// A file with this header and as many bytes of data.
absl::StatusOr<SafetensorsHeader> Parse(const std::string& json, int64_t data_bytes) {
  const std::string first_bytes = Length(json.size()) + json;
  return ParseSafetensorsHeader(first_bytes, static_cast<int64_t>(first_bytes.size()) + data_bytes);
}

std::string Tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return absl::StrCat(R"({"dtype":")", dtype, R"(","shape":[)", shape, R"(],"data_offsets":[)",
                      offsets, "]}");
}

struct BadCase {
  std::string name;
  std::string json;
  int64_t data_bytes = 0;
  std::string message;
};

class BadHeaderTest : public testing::TestWithParam<BadCase> {};

TEST_P(BadHeaderTest, IsRefused) {
  EXPECT_THAT(Parse(GetParam().json, GetParam().data_bytes),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(GetParam().message)));
}

const std::string kDeep = std::string(100'000, '[') + std::string(100'000, ']');

// Numbers are those of reliability.md, section 5.
INSTANTIATE_TEST_SUITE_P(
    Safetensors, BadHeaderTest,
    testing::Values(
        BadCase{"S05_NotUtf8", "{\"\xff\":" + Tensor("F32", "1", "0,4") + "}", 4, "not JSON"},
        BadCase{"S06_NotJson", "{\"a\"", 0, "not JSON"},
        BadCase{"S06_Empty", "", 0, "does not begin with {"},
        BadCase{"S06_Garbage", "{\"a\":" + Tensor("F32", "1", "0,4") + "} x", 4, "not JSON"},
        BadCase{"S06_SecondObject", "{}{}", 0, "not JSON"},
        BadCase{"S06_ZeroByteAndGarbage", std::string("{}\0{", 4), 0, "at its byte 3"},
        BadCase{"S06_Array", "[]", 0, "does not begin with {"},
        BadCase{"S06_Comment", "{/**/}", 0, "not JSON"},
        BadCase{"S06_ByteOrderMark", "\xef\xbb\xbf{}", 0, "does not begin with {"},
        BadCase{"S07_TensorTwice",
                "{\"a\":" + Tensor("F32", "1", "0,4") + ",\"a\":" + Tensor("F32", "1", "4,8") + "}",
                8, "key \"a\" twice"},
        BadCase{"S07_MetadataTwice", R"({"__metadata__":{},"__metadata__":{}})", 0,
                "key \"__metadata__\" twice"},
        BadCase{"S07_InMetadata", R"({"__metadata__":{"a":"1","a":"2"}})", 0,
                "__metadata__: key \"a\" twice"},
        BadCase{"S07_DtypeTwice",
                R"({"a":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4,
                "tensor \"a\": key \"dtype\" twice"},
        BadCase{"S08_MetadataNumber", R"({"__metadata__":{"a":1}})", 0,
                "__metadata__: a number at \"a\""},
        BadCase{"S08_MetadataObject", R"({"__metadata__":{"a":{}}})", 0, "an object at \"a\""},
        BadCase{"S08_MetadataNull", R"({"__metadata__":null})", 0, "null at \"__metadata__\""},
        BadCase{"S09_BeginAfterEnd", "{\"a\":" + Tensor("F32", "1", "4,0") + "}", 4,
                "data_offsets are 4 and 0"},
        BadCase{"S10_NegativeOffset", "{\"a\":" + Tensor("F32", "1", "-4,0") + "}", 4,
                "the number -4"},
        BadCase{"S10_FloatOffset", "{\"a\":" + Tensor("F32", "1", "0,4.0") + "}", 4,
                "the number 4.0"},
        BadCase{"S10_ExponentOffset", "{\"a\":" + Tensor("F32", "1", "0,4e0") + "}", 4,
                "the number 4e0"},
        BadCase{"S10_StringOffset", "{\"a\":" + Tensor("F32", "1", "0,\"4\"") + "}", 4, "a string"},
        BadCase{"S10_HugeOffset",
                "{\"a\":" + Tensor("F32", "1", "18446744073709551612,18446744073709551615") + "}",
                4, "the number 18446744073709551612"},
        BadCase{"S10_OneOffset", "{\"a\":" + Tensor("F32", "1", "0") + "}", 4,
                "1 data_offsets, expected 2"},
        BadCase{"S10_ThreeOffsets", "{\"a\":" + Tensor("F32", "1", "0,4,8") + "}", 4,
                "more than two"},
        BadCase{
            "S11_Overlap",
            "{\"a\":" + Tensor("F32", "2", "0,8") + ",\"b\":" + Tensor("F32", "2", "4,12") + "}",
            12, "begins at 4, but the data before it end at 8"},
        BadCase{"S11_SameBytes",
                "{\"a\":" + Tensor("F32", "1", "0,4") + ",\"b\":" + Tensor("F32", "1", "0,4") + "}",
                4, "begins at 0"},
        BadCase{
            "S12_Gap",
            "{\"a\":" + Tensor("F32", "1", "0,4") + ",\"b\":" + Tensor("F32", "1", "8,12") + "}",
            12, "begins at 8"},
        BadCase{"S12_GapAtBegin", "{\"a\":" + Tensor("F32", "1", "4,8") + "}", 8, "begins at 4"},
        BadCase{"S13_BytesAfterTheLast", "{\"a\":" + Tensor("F32", "1", "0,4") + "}", 5,
                "the data section has 5 bytes, but the tensors 4"},
        BadCase{"S13_BytesWithoutTensors", "{}", 1, "the data section has 1 bytes"},
        BadCase{"S13_FileIsShort", "{\"a\":" + Tensor("F32", "1", "0,4") + "}", 3,
                "the data section has 3 bytes, but the tensors 4"},
        BadCase{"S14_ShapeIsLonger", "{\"a\":" + Tensor("F32", "2", "0,4") + "}", 4,
                "float32[2] takes 8 bytes"},
        BadCase{"S15_ShapeOverflows",
                "{\"a\":" + Tensor("F32", "4294967296,4294967296", "0,0") + "}", 0, "2^62"},
        BadCase{"S15_ShapeOverflowsBesideZero",
                "{\"a\":" + Tensor("F32", "0,4294967296,4294967296,4294967296", "0,0") + "}", 0,
                "2^62"},
        BadCase{"S15_HugeExtent", "{\"a\":" + Tensor("F32", "18446744073709551615", "0,4") + "}", 4,
                "the number 18446744073709551615"},
        BadCase{"S15_NegativeExtent", "{\"a\":" + Tensor("F32", "-1", "0,4") + "}", 4,
                "the number -1"},
        BadCase{"S16_SubByteDtype", "{\"a\":" + Tensor("F4", "3", "0,2") + "}", 2,
                "dtype \"F4\" is not one of F32"},
        BadCase{"S17_Deep", "{\"a\":" + kDeep + "}", 0, "an array at \"a\""},
        BadCase{"S17_DeepObject", R"({"a":{"dtype":{"x":{}}}})", 0, "an object at \"dtype\""},
        BadCase{"S17_DeepShape", R"({"a":{"shape":[[1]]}})", 0, "an array at \"shape\""},
        BadCase{"S18_UnknownDtype", "{\"a\":" + Tensor("U16", "2", "0,4") + "}", 4,
                "dtype \"U16\" is not one of"},
        BadCase{"S19_TensorNamedMetadata", "{\"__metadata__\":" + Tensor("F32", "1", "0,4") + "}",
                4, "__metadata__: an array at \"shape\""},
        BadCase{"NoDtype", R"({"a":{"shape":[],"data_offsets":[0,4]}})", 4, "no dtype"},
        BadCase{"NoShape", R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "no shape"},
        BadCase{"NoOffsets", R"({"a":{"dtype":"F32","shape":[]}})", 4, "no data_offsets"},
        BadCase{"UnknownKey", R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4],"x":1}})", 4,
                "unknown key \"x\""},
        BadCase{"TensorIsANumber", R"({"a":1})", 0, "a number at \"a\""},
        BadCase{"TensorIsABoolean", R"({"a":true})", 0, "a boolean at \"a\""},
        BadCase{"NinthDimension", "{\"a\":" + Tensor("F32", "1,1,1,1,1,1,1,1,1", "0,4") + "}", 4,
                "more than 8 dimensions"},
        BadCase{"EmptyName", "{\"\":" + Tensor("F32", "1", "0,4") + "}", 4, "a name is needed"},
        BadCase{"ControlCharacterInName", "{\"a\\n\":" + Tensor("F32", "1", "0,4") + "}", 4,
                "control characters"}),
    [](const testing::TestParamInfo<BadCase>& tested) { return tested.param.name; });

TEST(SafetensorsTest, S01_FileShorterThanItsLength) {
  for (int64_t size = 0; size < 8; ++size) {
    EXPECT_THAT(ParseSafetensorsHeader(std::string(size, '\0'), size),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("fewer than 8")));
  }
}

TEST(SafetensorsTest, S02_HeaderTooLarge) {
  EXPECT_THAT(ParseSafetensorsHeader(Length(100'000'001) + "{}", int64_t{1} << 40),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at most 100000000")));
}

TEST(SafetensorsTest, S03_HeaderLargerThanTheFile) {
  EXPECT_THAT(ParseSafetensorsHeader(Length(3) + "{}", 10),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("a header of 3 bytes in a file of 10")));
  EXPECT_THAT(ParseSafetensorsHeader(Length(4) + "{}", 100),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cut off after 2")));
}

TEST(SafetensorsTest, S04_LengthWraps) {
  for (const uint64_t n : {~uint64_t{0}, ~uint64_t{0} - 7, uint64_t{1} << 63}) {
    EXPECT_THAT(ParseSafetensorsHeader(Length(n) + "{}", 10),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at most")));
  }
}

TEST(SafetensorsTest, S22_SpacesAroundTheObjectAreAccepted) {
  EMA_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, Parse(" \n{}   ", 0));
  EXPECT_THAT(header.tensors, IsEmpty());
  EXPECT_EQ(header.header_bytes, 8 + 7);
}

TEST(SafetensorsTest, TensorsComeInTheOrderOfTheirBytes) {
  EMA_ASSERT_OK_AND_ASSIGN(
      const SafetensorsHeader header,
      Parse(absl::StrCat(R"({"z":)", Tensor("I64", "", "4,12"), R"(,"empty":)",
                         Tensor("F16", "0,7", "4,4"), R"(,"__metadata__":{"step":"7"},"a":)",
                         Tensor("BF16", "2", "0,4"), "}"),
            12));
  ASSERT_EQ(header.tensors.size(), 3u);
  EXPECT_EQ(header.tensors[0].spec, (TensorSpec{"a", Dtype::kBFloat16, {2}}));
  EXPECT_EQ(header.tensors[1].spec, (TensorSpec{"empty", Dtype::kFloat16, {0, 7}}));
  EXPECT_EQ(header.tensors[2].spec, (TensorSpec{"z", Dtype::kInt64, {}}));
  EXPECT_EQ(header.tensors[2].begin, 4);
  EXPECT_EQ(header.tensors[2].end, 12);
  EXPECT_THAT(header.metadata, ElementsAre(Pair("step", "7")));
}

TEST(SafetensorsTest, WhatIsEncodedIsParsedBack) {
  const std::vector<TensorSpec> specs = {{"f64", Dtype::kFloat64, {3}},
                                         {"i64", Dtype::kInt64, {}},
                                         {"f32", Dtype::kFloat32, {2, 3}},
                                         {"i32", Dtype::kInt32, {5}},
                                         {"f16", Dtype::kFloat16, {1, 1, 1, 1, 1, 1, 1, 2}},
                                         {"bf16", Dtype::kBFloat16, {7}},
                                         {"i16", Dtype::kInt16, {0, 4}},
                                         {"i8", Dtype::kInt8, {3}},
                                         {"u8", Dtype::kUInt8, {3}},
                                         {"bool \"quoted\\\" \xc3\xa4", Dtype::kBool, {1}}};
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"a\n", "\"b\""}};
  const std::string bytes = EncodeSafetensorsHeader(specs, metadata);
  EXPECT_EQ(bytes.size() % 64, 0u);
  EXPECT_EQ(bytes[8], '{');
  int64_t data_bytes = 0;
  for (const TensorSpec& spec : specs) data_bytes += spec.byte_count();
  EMA_ASSERT_OK_AND_ASSIGN(
      const SafetensorsHeader header,
      ParseSafetensorsHeader(bytes, static_cast<int64_t>(bytes.size()) + data_bytes));
  EXPECT_EQ(header.header_bytes, static_cast<int64_t>(bytes.size()));
  EXPECT_EQ(header.metadata, metadata);
  ASSERT_EQ(header.tensors.size(), specs.size());
  int64_t offset = 0;
  for (size_t i = 0; i < specs.size(); ++i) {
    EXPECT_EQ(header.tensors[i].spec, specs[i]);
    EXPECT_EQ(header.tensors[i].begin, offset);
    offset += specs[i].byte_count();
    EXPECT_EQ(header.tensors[i].end, offset);
  }
}

TEST(SafetensorsTest, AFileWithoutTensorsOrMetadataRoundTrips) {
  const std::string bytes = EncodeSafetensorsHeader({}, {});
  EMA_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header,
                           ParseSafetensorsHeader(bytes, static_cast<int64_t>(bytes.size())));
  EXPECT_THAT(header.tensors, IsEmpty());
  EXPECT_THAT(header.metadata, IsEmpty());
}

TEST(SafetensorsTest, EveryCutAndEveryChangedByteIsRefusedOrHarmless) {
  const std::vector<TensorSpec> specs = {{"a", Dtype::kFloat32, {2}}, {"b", Dtype::kInt8, {3}}};
  const std::string bytes = EncodeSafetensorsHeader(specs, {{"step", "1"}});
  const int64_t file_bytes = static_cast<int64_t>(bytes.size()) + 11;
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(ParseSafetensorsHeader(bytes.substr(0, size), file_bytes).ok()) << size;
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string changed = bytes;
      changed[i] = static_cast<char>(changed[i] ^ (1 << bit));
      const absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(changed, file_bytes);
      if (!header.ok()) continue;
      // Names and equal-sized dtypes may change unseen (the checkpoint has a checksum for that);
      // sizes may not.
      ASSERT_EQ(header->tensors.size(), 2u) << i;
      EXPECT_EQ(header->tensors[1].end, 11) << i;
    }
  }
}

class MemoryFile final : public RandomAccessFile {
 public:
  explicit MemoryFile(std::string bytes) : bytes_(std::move(bytes)) {}
  int64_t size_bytes() const override { return static_cast<int64_t>(bytes_.size()); }
  absl::Status Read(int64_t offset, std::span<std::byte> bytes) const override {
    std::copy_n(std::as_bytes(std::span(bytes_)).begin() + offset, bytes.size(), bytes.begin());
    return absl::OkStatus();
  }

 private:
  const std::string bytes_;
};

TEST(SafetensorsTest, HeadersAreReadFromFiles) {
  const std::vector<TensorSpec> specs = {{"a", Dtype::kFloat32, {2}}};
  const MemoryFile file(EncodeSafetensorsHeader(specs, {}) + std::string(8, 'x'));
  EMA_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, ReadSafetensorsHeader(file));
  ASSERT_EQ(header.tensors.size(), 1u);
  EXPECT_EQ(header.tensors[0].spec, specs[0]);
  EXPECT_THAT(ReadSafetensorsHeader(file, 10),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at most 10")));
  EXPECT_THAT(ReadSafetensorsHeader(MemoryFile("1234567")),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("it has 7 bytes")));
}

}  // namespace
}  // namespace ema
