// SPDX-License-Identifier: Apache-2.0
#include "server/core/attached_files.h"

#include <chrono>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "server/base/crc32c.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

auto IsBad(ErrorReason reason, const char* text) {
  return AllOf(StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)), ReasonIs(reason));
}

class AttachedFilesTest : public testing::Test {
 protected:
  absl::Status Attach(const std::string& name, const std::string& bytes) {
    return files_.AddPart(name, static_cast<int64_t>(bytes.size()), 0, bytes);
  }
  std::vector<AttachedFile> Files() {
    std::vector<AttachedFile> result;
    for (const auto& file : files_.files()) result.push_back(*file);
    return result;
  }

  MemoryBudget budget_{1'000};
  AttachedFiles files_{&budget_};
};

TEST_F(AttachedFilesTest, AreThereByNameAndReplaced) {
  ASSERT_THAT(Attach("b.json", "old"), IsOk());
  ASSERT_THAT(Attach("a.txt", ""), IsOk());
  ASSERT_THAT(Attach("b.json", "newer"), IsOk());
  EXPECT_EQ(Files(), (std::vector<AttachedFile>{{"a.txt", ""}, {"b.json", "newer"}}));
  EXPECT_EQ(budget_.reserved_bytes(), 5);
  files_.Remove("b.json");
  files_.Remove("b.json");
  EXPECT_EQ(Files(), (std::vector<AttachedFile>{{"a.txt", ""}}));
  EXPECT_EQ(budget_.reserved_bytes(), 0);
}

TEST_F(AttachedFilesTest, ComesInPartsAndIsThereWithTheLast) {
  ASSERT_THAT(Attach("f", "before"), IsOk());
  ASSERT_THAT(files_.AddPart("f", 8, 0, "abc"), IsOk());
  ASSERT_THAT(files_.AddPart("f", 8, 3, "def"), IsOk());
  EXPECT_EQ(Files(), (std::vector<AttachedFile>{{"f", "before"}}));
  // A part whose answer was lost comes again.
  ASSERT_THAT(files_.AddPart("f", 8, 3, "def"), IsOk());
  EXPECT_THAT(files_.AddPart("f", 8, 3, "xyz"), IsBad(ErrorReason::kBadRequest, "the one at 6"));
  EXPECT_THAT(files_.AddPart("f", 8, 7, "h"), IsBad(ErrorReason::kBadRequest, "the one at 6"));
  EXPECT_THAT(files_.AddPart("f", 9, 6, "gh"), IsBad(ErrorReason::kBadRequest, "the first part"));
  ASSERT_THAT(files_.AddPart("f", 8, 6, "gh"), IsOk());
  ASSERT_THAT(files_.AddPart("f", 8, 6, "gh"), IsOk());
  EXPECT_THAT(files_.AddPart("f", 8, 6, "gx"), IsBad(ErrorReason::kBadRequest, "the first part"));
  EXPECT_EQ(Files(), (std::vector<AttachedFile>{{"f", "abcdefgh"}}));
  EXPECT_EQ(budget_.reserved_bytes(), 8);
}

TEST_F(AttachedFilesTest, TheFirstPartBeginsAnew) {
  ASSERT_THAT(files_.AddPart("f", 500, 0, "abc"), IsOk());
  ASSERT_THAT(files_.AddPart("f", 4, 0, "wx"), IsOk());
  ASSERT_THAT(files_.AddPart("f", 4, 2, "yz"), IsOk());
  EXPECT_EQ(Files(), (std::vector<AttachedFile>{{"f", "wxyz"}}));
  EXPECT_EQ(budget_.reserved_bytes(), 4);
}

TEST_F(AttachedFilesTest, BadPartsAreNamedAndChangeNothing) {
  ASSERT_THAT(Attach("f", "abc"), IsOk());
  for (const char* name : {"../x", ".hidden", "a/b", "", "model.safetensors", "MODEL.Safetensors",
                           "other-00001-of-00002.safetensors", "model.safetensors.index.json"}) {
    EXPECT_THAT(Attach(name, "x"), IsBad(ErrorReason::kBadName, "file")) << name;
  }
  EXPECT_THAT(files_.AddPart("f", -1, 0, ""), IsBad(ErrorReason::kBadRequest, "total_bytes -1"));
  EXPECT_THAT(files_.AddPart("f", kMaxAttachedFileBytes + 1, 0, "x"),
              IsBad(ErrorReason::kBadRequest, "total_bytes 67108865, expected 0 to 67108864"));
  EXPECT_THAT(files_.AddPart("f", 3, 0, ""), IsBad(ErrorReason::kBadRequest, "empty"));
  EXPECT_THAT(files_.AddPart("f", 3, 0, "abcd"), IsBad(ErrorReason::kBadRequest, "not inside"));
  EXPECT_THAT(files_.AddPart("f", 3, -1, "a"), IsBad(ErrorReason::kBadRequest, "offset -1"));
  EXPECT_THAT(files_.AddPart("f", 3, 4, ""), IsBad(ErrorReason::kBadRequest, "offset 4"));
  EXPECT_THAT(files_.AddPart("g", 3, 1, "bc"), IsBad(ErrorReason::kBadRequest, "the first part"));
  EXPECT_EQ(Files(), (std::vector<AttachedFile>{{"f", "abc"}}));
}

TEST_F(AttachedFilesTest, AreFoundByNameOnceTheyAreWhole) {
  ASSERT_THAT(Attach("f", "abc"), IsOk());
  ASSERT_THAT(files_.AddPart("unfinished", 2, 0, "x"), IsOk());
  const auto found = files_.Find("f");
  ASSERT_THAT(found, IsOk());
  EXPECT_EQ(found->file->bytes, "abc");
  EXPECT_THAT(files_.Find("unfinished"),
              AllOf(StatusIs(absl::StatusCode::kNotFound, HasSubstr("attached files: f")),
                    ReasonIs(ErrorReason::kFileNotFound)));
  // Who has it keeps it.
  files_.Remove("f");
  EXPECT_THAT(files_.Find("f"), ReasonIs(ErrorReason::kFileNotFound));
  EXPECT_EQ(found->file->bytes, "abc");
}

TEST_F(AttachedFilesTest, HaveTheChecksumOfAllTheirParts) {
  const auto crc_of = [](std::string_view text) {
    return Crc32c(0, std::as_bytes(std::span(text)));
  };
  for (const std::string text : {"abcdef", "uvwxyz"}) {  // The second in the first one's place.
    for (const int64_t offset : {0, 2, 2, 4, 4}) {       // Some parts again.
      ASSERT_THAT(files_.AddPart("f", 6, offset, text.substr(offset, 2)), IsOk());
    }
    EXPECT_EQ(files_.Find("f")->crc32c, crc_of(text));
  }
  ASSERT_THAT(files_.AddPart("empty", 0, 0, ""), IsOk());
  EXPECT_EQ(files_.Find("empty")->crc32c, 0U);
}

TEST_F(AttachedFilesTest, TakesNoMoreThanThereIsRoomFor) {
  const auto exhausted = [](const char* text) {
    return AllOf(StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr(text)),
                 ReasonIs(ErrorReason::kMemoryBudget));
  };
  EXPECT_THAT(Attach("big", std::string(1'001, 'x')), exhausted("file \"big\" needs 1001 bytes"));
  EXPECT_THAT(Files(), IsEmpty());
  for (size_t i = 0; i + 1 < kMaxAttachedFiles; ++i) {
    ASSERT_THAT(Attach(absl::StrCat("f", i), "x"), IsOk());
  }
  ASSERT_THAT(files_.AddPart("unfinished", 2, 0, "x"), IsOk());
  EXPECT_THAT(Attach("more", "x"), exhausted("the model has 64 attached files"));
  EXPECT_THAT(Attach("f0", "y"), IsOk());
  files_.Remove("unfinished");
  EXPECT_THAT(Attach("more", "x"), IsOk());
}

TEST_F(AttachedFilesTest, FewMayBeUnfinishedAndOnlyForSoLong) {
  ASSERT_THAT(files_.AddPart("a", 400, 0, "x"), IsOk());
  ASSERT_THAT(files_.AddPart("b", 400, 0, "x"), IsOk());
  const absl::Status refused = files_.AddPart("c", 4, 0, "x");
  EXPECT_THAT(refused,
              AllOf(StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("incomplete")),
                    ReasonIs(ErrorReason::kTooManyCalls)));
  EXPECT_GT(GetRetryDelay(refused), absl::ZeroDuration());
  ASSERT_THAT(Attach("whole", "x"), IsOk());
  ASSERT_THAT(files_.AddPart("b", 300, 0, "x"), IsOk());
  EXPECT_EQ(budget_.reserved_bytes(), 701);

  const auto now = std::chrono::steady_clock::now();
  files_.ExpireUnfinished(now, std::chrono::hours(1));
  EXPECT_EQ(budget_.reserved_bytes(), 701);
  files_.ExpireUnfinished(now + std::chrono::hours(2), std::chrono::hours(1));
  EXPECT_EQ(budget_.reserved_bytes(), 1);
  EXPECT_EQ(Files(), (std::vector<AttachedFile>{{"whole", "x"}}));
  EXPECT_THAT(files_.AddPart("a", 400, 1, "x"), IsBad(ErrorReason::kBadRequest, "the first part"));
  EXPECT_THAT(files_.AddPart("c", 4, 0, "x"), IsOk());
}

}  // namespace
}  // namespace ema
