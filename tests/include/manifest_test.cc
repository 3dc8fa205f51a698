// SPDX-License-Identifier: Apache-2.0
#include "ema/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/crc32c.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

Manifest Make(std::vector<TensorSpec> tensors) { return *Manifest::Create(std::move(tensors)); }

TEST(ValidateNameTest, AcceptsTheDocumentedForm) {
  for (const std::string& name :
       {std::string("a"), std::string("0"), std::string("Gpt-2.run_1"), std::string(128, 'x')}) {
    EXPECT_THAT(ValidateName("model", name), IsOk());
  }
}

TEST(ValidateNameTest, RefusesAllElse) {
  for (const std::string& name :
       {std::string(""), std::string(129, 'x'), std::string(".a"), std::string("-a"),
        std::string("_a"), std::string("a b"), std::string("a/b"), std::string("a\n"),
        std::string("\xc3\xa9"), std::string("a\0b", 3)}) {
    const absl::Status status = ValidateName("model", name);
    EXPECT_THAT(status, StatusIs(kInvalid, AllOf(StartsWith("model \""),
                                                 HasSubstr("[A-Za-z0-9][A-Za-z0-9._-]{0,127}"))));
    EXPECT_THAT(status, ReasonIs(ErrorReason::kBadName));
  }
  EXPECT_THAT(ValidateName("track", "a\n"), StatusIs(kInvalid, StartsWith("track \"a\\n\": ")));
}

TEST(ManifestTest, FindsTensorsAndSumsBytes) {
  const Manifest manifest = Make(
      {{"a", Dtype::kFloat32, {2, 3}}, {"b", Dtype::kBFloat16, {}}, {"c", Dtype::kInt64, {0}}});
  EXPECT_EQ(manifest.tensor_count(), 3);
  EXPECT_EQ(manifest.total_bytes(), 26);
  EXPECT_EQ(manifest.Find("b"), 1);
  EXPECT_EQ(manifest.Find("d"), std::nullopt);
  EXPECT_EQ(manifest.Find(""), std::nullopt);
}

TEST(ManifestTest, DigestIsAsTheHeaderSays) {
  const Manifest manifest = Make({{"ab", Dtype::kBFloat16, {258}}, {"c", Dtype::kInt8, {}}});
  const std::string bytes =
      std::string("ab\0\x03\x01\x02\x01\0\0\0\0\0\0", 13) + std::string("c\0\x05\0", 4);
  EXPECT_EQ(manifest.digest(), int64_t{Crc32c(0, std::as_bytes(std::span(bytes)))});

  const Manifest buffers = Make({{"ab", Dtype::kBFloat16, {258}, true}, {"c", Dtype::kInt8, {}}});
  std::string buffer_bytes = bytes;
  buffer_bytes[3] = '\x83';
  EXPECT_EQ(buffers.digest(), int64_t{Crc32c(0, std::as_bytes(std::span(buffer_bytes)))});
}

TEST(ManifestTest, DigestTellsManifestsApart) {
  const Manifest a = Make({{"a", Dtype::kFloat32, {2, 3}}, {"b", Dtype::kFloat32, {1}}});
  EXPECT_EQ(a, Make({{"a", Dtype::kFloat32, {2, 3}}, {"b", Dtype::kFloat32, {1}}}));
  for (const Manifest& b :
       {Make({{"b", Dtype::kFloat32, {1}}, {"a", Dtype::kFloat32, {2, 3}}}),
        Make({{"a", Dtype::kFloat32, {3, 2}}, {"b", Dtype::kFloat32, {1}}}),
        Make({{"a", Dtype::kFloat32, {2, 3}}, {"b", Dtype::kFloat16, {1}}}),
        Make({{"a", Dtype::kFloat32, {2, 3}}, {"b", Dtype::kFloat32, {1}, true}}),
        Make({{"a", Dtype::kFloat32, {2, 3}}, {"b", Dtype::kFloat32, {}}}),
        Make({{"a", Dtype::kFloat32, {2, 3}}})}) {
    EXPECT_FALSE(a == b);
    EXPECT_NE(a.digest(), b.digest());
  }
}

TEST(ManifestTest, RefusesBadOnes) {
  EXPECT_THAT(Manifest::Create({}), StatusIs(kInvalid, HasSubstr("0 tensors; expected 1 to")));
  EXPECT_THAT(Manifest::Create(std::vector<TensorSpec>(kMaxTensorCount + 1)),
              StatusIs(kInvalid, HasSubstr("200001 tensors")));
  EXPECT_THAT(Manifest::Create({{"a", Dtype::kInt8, {1}}, {"b", Dtype::kInt8, {-1}}}),
              StatusIs(kInvalid, StartsWith("tensor \"b\": extent -1")));
  const absl::StatusOr<Manifest> doubled = Manifest::Create(
      {{"a", Dtype::kInt8, {1}}, {"b", Dtype::kInt8, {1}}, {"a", Dtype::kInt8, {2}}});
  EXPECT_THAT(doubled, StatusIs(kInvalid, StartsWith("tensor \"a\": is at 0 and at 2")));
  EXPECT_THAT(doubled, ReasonIs(ErrorReason::kBadManifest));
}

TEST(ManifestTest, RefusesMoreBytesThanCanBeCounted) {
  const int64_t most = int64_t{1} << 61;
  EXPECT_THAT(Manifest::Create({{"a", Dtype::kInt8, {most}}, {"b", Dtype::kInt8, {most}}}), IsOk());
  EXPECT_THAT(
      Manifest::Create(
          {{"a", Dtype::kInt8, {most}}, {"b", Dtype::kInt8, {most}}, {"c", Dtype::kInt8, {1}}}),
      StatusIs(kInvalid, HasSubstr("tensor \"c\"")));
  // Averages of float16 can take four times the bytes that are pushed.
  const int64_t count = most / 8;
  EXPECT_THAT(Manifest::Create({{"a", Dtype::kFloat16, {count}}, {"b", Dtype::kFloat16, {count}}}),
              StatusIs(kInvalid, HasSubstr("tensor \"b\"")));
}

TEST(ManifestTest, LargestCountIsQuick) {
  std::vector<TensorSpec> tensors;
  for (int64_t i = 0; i < kMaxTensorCount; ++i) {
    tensors.push_back({absl::StrCat("layers.", i, ".weight"), Dtype::kBFloat16, {64, 64}});
  }
  EMA_ASSERT_OK_AND_ASSIGN(const Manifest manifest, Manifest::Create(std::move(tensors)));
  EXPECT_EQ(manifest.Find("layers.199999.weight"), 199999);
}

TEST(ManifestTest, SaysWhatDiffers) {
  const TensorSpec a3{"a", Dtype::kFloat32, {3}};
  const TensorSpec a4{"a", Dtype::kFloat32, {4}};
  const TensorSpec b{"b", Dtype::kBool, {}};
  const TensorSpec c{"c", Dtype::kBool, {}};
  EXPECT_EQ(Make({a3, b}).DifferenceFrom(Make({a3, b})), "");
  EXPECT_EQ(Make({a3, b}).DifferenceFrom(Make({a4, b})),
            "other tensors of one name: \"a\" float32[3] here, float32[4] there");
  const TensorSpec buffer{"a", Dtype::kFloat32, {3}, /*is_buffer=*/true};
  EXPECT_EQ(Make({a3, b}).DifferenceFrom(Make({buffer, b})),
            "other tensors of one name: \"a\" float32[3] here, buffer float32[3] there");
  EXPECT_EQ(Make({a3, b}).DifferenceFrom(Make({a3})), "here, not there: \"b\"");
  EXPECT_EQ(Make({a3}).DifferenceFrom(Make({a3, b})), "there, not here: \"b\"");
  EXPECT_EQ(Make({a3, b}).DifferenceFrom(Make({c, a4})),
            "here, not there: \"b\"; there, not here: \"c\"; other tensors of one name: \"a\" "
            "float32[3] here, float32[4] there");
  EXPECT_EQ(Make({a3, b}).DifferenceFrom(Make({b, a3})),
            "another order: tensor 0 is \"a\" here, \"b\" there");
}

TEST(ManifestTest, NamesFiveOfManyThatDiffer) {
  std::vector<TensorSpec> many;
  for (int i = 0; i < 13; ++i) many.push_back({absl::StrCat("t", i), Dtype::kBool, {}});
  const TensorSpec other{"other", Dtype::kBool, {}};
  EXPECT_EQ(Make(many).DifferenceFrom(Make({other})),
            "here, not there: \"t0\", \"t1\", \"t2\", \"t3\", \"t4\" and 8 more; there, not here: "
            "\"other\"");
}

TEST(StorageLayoutTest, AlignsEachTensorToItsElement) {
  const Manifest manifest = Make({{"flag", Dtype::kBool, {3}},
                                  {"half", Dtype::kBFloat16, {2}},
                                  {"none", Dtype::kFloat64, {0}},
                                  {"double", Dtype::kFloat64, {1}},
                                  {"count", Dtype::kInt64, {}}});
  const StorageLayout average(manifest, std::vector(5, TensorAction::kAverage), Dtype::kFloat32);
  EXPECT_EQ(average.entry(1).dtype, Dtype::kFloat32);
  EXPECT_EQ(average.entry(1).offset, 4);
  EXPECT_EQ(average.entry(1).length_bytes, 8);
  EXPECT_EQ(average.entry(2).offset, 12);
  EXPECT_EQ(average.entry(2).length_bytes, 0);
  EXPECT_EQ(average.entry(3).offset, 12);
  EXPECT_EQ(average.entry(4).dtype, Dtype::kInt64);
  const StorageLayout wide(manifest, std::vector(5, TensorAction::kAverage), Dtype::kFloat64);
  EXPECT_EQ(wide.entry(1).dtype, Dtype::kFloat64);
  EXPECT_EQ(wide.entry(1).offset, 8);
  EXPECT_EQ(wide.entry(1).length_bytes, 16);
  EXPECT_EQ(wide.entry(4).dtype, Dtype::kInt64);
  EXPECT_EQ(average.entry(4).offset, 16);
  EXPECT_EQ(average.total_bytes(), 24);

  const StorageLayout pushed(manifest, std::vector(5, TensorAction::kCopy), Dtype::kFloat32);
  EXPECT_EQ(pushed.entry(1).dtype, Dtype::kBFloat16);
  EXPECT_EQ(pushed.entry(3).offset, 8);
  EXPECT_EQ(pushed.total_bytes(), 24);
}

TEST(StorageLayoutTest, ActionsDecideTensorByTensor) {
  const Manifest manifest = Make({{"a", Dtype::kBFloat16, {2}},
                                  {"b", Dtype::kBFloat16, {3}},
                                  {"c", Dtype::kFloat64, {5}},
                                  {"d", Dtype::kFloat64, {1}}});
  const StorageLayout layout(
      manifest,
      {TensorAction::kAverage, TensorAction::kCopy, TensorAction::kIgnore, TensorAction::kCopy},
      Dtype::kFloat32);
  EXPECT_EQ(layout.entry(0).dtype, Dtype::kFloat32);
  EXPECT_EQ(layout.entry(0).length_bytes, 8);
  EXPECT_EQ(layout.entry(1).dtype, Dtype::kBFloat16);
  EXPECT_EQ(layout.entry(1).offset, 8);
  EXPECT_EQ(layout.entry(1).length_bytes, 6);
  EXPECT_TRUE(layout.entry(1).is_stored);
  EXPECT_FALSE(layout.entry(2).is_stored);
  EXPECT_EQ(layout.entry(2).offset, 14);
  EXPECT_EQ(layout.entry(2).length_bytes, 0);
  EXPECT_EQ(layout.entry(3).dtype, Dtype::kFloat64);
  EXPECT_EQ(layout.entry(3).offset, 16);
  EXPECT_EQ(layout.total_bytes(), 24);

  const StorageLayout nothing(manifest, std::vector(4, TensorAction::kIgnore), Dtype::kFloat32);
  EXPECT_EQ(nothing.total_bytes(), 0);
}

TEST(StorageLayoutTest, LargeTensorsAndThoseAfterThemAreAlignedMore) {
  const int64_t large = kLargeTensorBytes / 2;
  const Manifest manifest = Make({{"small", Dtype::kBool, {3}},
                                  {"large", Dtype::kBFloat16, {large + 1}},
                                  {"after", Dtype::kBool, {1}},
                                  {"last", Dtype::kBool, {1}},
                                  {"below", Dtype::kBFloat16, {large - 1}}});
  const StorageLayout layout(manifest, std::vector(5, TensorAction::kCopy), Dtype::kFloat32);
  EXPECT_EQ(layout.entry(1).offset, 64);
  EXPECT_EQ(layout.entry(2).offset, 64 + kLargeTensorBytes + 64);
  EXPECT_EQ(layout.entry(3).offset, layout.entry(2).offset + 1);
  EXPECT_EQ(layout.entry(4).offset, layout.entry(2).offset + 2);
}

TEST(StorageLayoutTest, EntriesFollowEachOtherWithLeastPadding) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<TensorSpec> tensors;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back({absl::StrCat("t", i),
                         static_cast<Dtype>(1 + random() % 10),
                         {static_cast<int64_t>(random() % 9)}});
    }
    const Manifest manifest = Make(tensors);
    std::vector<TensorAction> actions;
    for (int i = 0; i < 20; ++i) actions.push_back(static_cast<TensorAction>(random() % 3));
    const StorageLayout layout(manifest, actions, Dtype::kFloat32);
    int64_t end = 0;
    for (int i = 0; i < 20; ++i) {
      const StorageLayout::Entry& entry = layout.entry(i);
      EXPECT_EQ(entry.is_stored, actions[i] != TensorAction::kIgnore);
      if (!entry.is_stored) {
        EXPECT_EQ(entry.length_bytes, 0);
        EXPECT_EQ(entry.offset, end);
        continue;
      }
      EXPECT_EQ(entry.offset % DtypeSize(entry.dtype), 0);
      EXPECT_GE(entry.offset, end);
      EXPECT_LT(entry.offset - end, DtypeSize(entry.dtype));
      EXPECT_EQ(entry.length_bytes, manifest.tensor(i).element_count() * DtypeSize(entry.dtype));
      end = entry.offset + entry.length_bytes;
    }
    EXPECT_EQ(layout.total_bytes(), end);
  }
}

}  // namespace
}  // namespace ema
