// SPDX-License-Identifier: Apache-2.0
#include "include/ema/internal/tensor_pattern.h"

#include <fnmatch.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

Manifest OfNames(const std::vector<std::string>& names) {
  std::vector<TensorSpec> tensors;
  for (const std::string& name : names) tensors.push_back({name, Dtype::kFloat32, {1}});
  return *Manifest::Create(std::move(tensors));
}

bool Matches(const std::string& pattern, const std::string& name) {
  return !MatchingTensors(pattern, OfNames({name})).empty();
}

TEST(TensorPatternTest, MatchesAsDocumented) {
  EXPECT_TRUE(Matches("*.weight", "head.weight"));
  EXPECT_FALSE(Matches("*.weight", "head.weights"));
  EXPECT_FALSE(Matches("*.weight", "headxweight"));
  EXPECT_TRUE(Matches("layers.?.*.w*", "layers.3.mlp.w1"));
  EXPECT_FALSE(Matches("layers.?.*.w*", "layers.31.mlp.w1"));
  EXPECT_TRUE(Matches("layers.[0-3].[!a]*", "layers.2.mlp"));
  EXPECT_FALSE(Matches("layers.[0-3].[!a]*", "layers.2.attn"));
  EXPECT_TRUE(Matches("[]-]x", "-x"));
  EXPECT_TRUE(Matches("[[:digit:]_]x", "_x"));
  EXPECT_FALSE(Matches("[z-a]", "b"));
  EXPECT_TRUE(Matches("\\*", "*"));
  EXPECT_FALSE(Matches("\\*", "a"));
  EXPECT_TRUE(Matches("*ab*ba*", "xabxba"));
  EXPECT_FALSE(Matches("*ab*ba*", "xaba"));
  EXPECT_TRUE(Matches("a[b", "a[b"));
  EXPECT_TRUE(Matches("w[0]", "w[0]"));      // The name itself.
  EXPECT_TRUE(Matches("a??", "a\xc3\xa9"));  // A character of two bytes.
  EXPECT_FALSE(Matches("a?", "a\xc3\xa9"));
}

TEST(TensorPatternTest, AgreesWithFnmatch) {
  constexpr unsigned kSeed = 7;
  const std::vector<std::string> in_patterns = {"a",    "a",  "b",           ".",       "*",
                                                "?",    "[",  "]",           "[a-b]",   "[!a]",
                                                "[^.]", "\\", "[[:alpha:]]", "\xc3\xa9"};
  const std::vector<std::string> in_names = {"a", "b", "-", "]", "[", ".", "\\", "*", "\xc3\xa9"};
  std::mt19937 random(kSeed);
  const auto text = [&random](const std::vector<std::string>& parts, size_t max_count) {
    std::string result;
    for (size_t count = 1 + random() % max_count; count > 0; --count) {
      result += parts[random() % parts.size()];
    }
    return result;
  };
  int matches = 0;
  for (int i = 0; i < 30'000; ++i) {
    const std::string pattern = text(in_patterns, 6);
    const std::string name = text(in_names, 5);
    // glibc differs: an escape at the end matches nothing, and it knows collating symbols.
    if (pattern.ends_with('\\') || pattern.find("[.") != std::string::npos) continue;
    const bool expected = name == pattern || fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
    matches += expected ? 1 : 0;
    ASSERT_EQ(Matches(pattern, name), expected) << pattern << " with " << name;
  }
  EXPECT_GT(matches, 500);
}

TEST(TensorPatternTest, AliasesMatch) {
  TensorSpec tensor{"w", Dtype::kFloat32, {1}};
  tensor.aliases = {"tied.w"};
  const Manifest manifest = *Manifest::Create({std::move(tensor)});
  EXPECT_EQ(MatchingTensors("tied.*", manifest).size(), 1);
  EXPECT_EQ(MatchingTensors("tied.w", manifest).size(), 1);
}

TEST(TensorPatternTest, PatternsThatExceedTheBudgetAreRejected) {
  std::vector<std::string> names;
  for (int i = 0; i < 1000; ++i) names.push_back(absl::StrCat(std::string(90, 'a'), ".", i));
  const Manifest manifest = OfNames(names);
  GlobBudget budget{.steps = 1'000'000};
  EXPECT_THAT(MatchTensors("a*.7", manifest, budget), IsOk());
  EXPECT_THAT(MatchTensors("?a*", manifest, budget), IsOk());
  EXPECT_GT(budget.steps, 700'000);
  // It costs its own length times that of all names.
  EXPECT_THAT(MatchTensors("*aaaaaaaaaaaaaaaaaaaaaaaaaa?c", manifest, budget),
              StatusIs(kInvalid, AllOf(HasSubstr("takes too long"), HasSubstr("of 1000 tensors"),
                                       HasSubstr("fewer or shorter patterns"))));
}

}  // namespace
}  // namespace ema
