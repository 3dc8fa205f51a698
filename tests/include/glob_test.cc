// SPDX-License-Identifier: Apache-2.0
#include "include/ema/internal/glob.h"

#include <fnmatch.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace ema {
namespace {

bool Matches(const std::string& pattern, const std::string& name) {
  return Glob(pattern).Matches(name);
}

TEST(GlobTest, MatchesWhatItSays) {
  EXPECT_TRUE(Matches("*.weight", "head.weight"));
  EXPECT_FALSE(Matches("*.weight", "head.weights"));
  EXPECT_TRUE(Matches("layers.?.*.w*", "layers.3.mlp.w1"));
  EXPECT_FALSE(Matches("layers.?.*.w*", "layers.31.mlp.w1"));
  EXPECT_TRUE(Matches("layers.[0-3].[!a]*", "layers.2.mlp"));
  EXPECT_FALSE(Matches("layers.[0-3].[!a]*", "layers.2.attn"));
  EXPECT_TRUE(Matches("\\*", "*"));
  EXPECT_FALSE(Matches("\\*", "a"));
  EXPECT_TRUE(Matches("*ab*ba*", "xabxba"));
  EXPECT_FALSE(Matches("*ab*ba*", "xaba"));
  EXPECT_TRUE(Matches("", ""));
}

TEST(GlobTest, IsThatOfFnmatch) {
  constexpr unsigned kSeed = 7;
  const std::string in_patterns = "aab-*?[]!^\\:.=\x80";
  const std::string in_names = "ab-]:.\\*\x80";
  std::mt19937 random(kSeed);
  const auto text = [&random](const std::string& bytes, size_t max_size) {
    std::string result(random() % (max_size + 1), '\0');
    for (char& byte : result) byte = bytes[random() % bytes.size()];
    return result;
  };
  int matches = 0;
  for (int i = 0; i < 300'000; ++i) {
    std::string pattern = text(in_patterns, 8);
    if (i % 8 == 0) pattern += "[[:alpha:]]*";
    const std::string name = text(in_names, 6);
    const bool expected = fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
    matches += expected ? 1 : 0;
    ASSERT_EQ(Matches(pattern, name), expected) << pattern << " with " << name;
  }
  EXPECT_GT(matches, 1000);
}

TEST(GlobTest, ItsClassesAreThoseOfFnmatch) {
  constexpr unsigned kSeed = 8;
  using Parts = std::vector<std::string>;
  const Parts in_patterns = {"[", "[:", "[=", "[.", ":]", "=]",    ".]", "]",
                             "a", "b",  "z",  "=",  ":",  "alpha", "!"};
  const Parts in_names = {"a", "b", "z", "=", ":", ".", "]"};
  std::mt19937 random(kSeed);
  const auto text = [&random](const Parts& parts, size_t max_count) {
    std::string result;
    for (size_t count = random() % (max_count + 1); count > 0; --count) {
      result += parts[random() % parts.size()];
    }
    return result;
  };
  int matches = 0;
  for (int i = 0; i < 300'000; ++i) {
    const std::string pattern = "[" + text(in_patterns, 8);
    const std::string name = text(in_names, 4);
    const bool expected = fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
    matches += expected ? 1 : 0;
    ASSERT_EQ(Matches(pattern, name), expected) << pattern << " with " << name;
  }
  EXPECT_GT(matches, 1000);
  EXPECT_TRUE(Matches("[[:a]b:]x", "ab:]x"));
  EXPECT_TRUE(Matches("[[=a]b=]]", "ab=]]"));
}

TEST(GlobTest, CountsItsSteps) {
  Glob glob("*" + std::string(500, 'a') + "?c*b");
  std::string text(1000, 'a');
  EXPECT_FALSE(glob.Matches(text));
  EXPECT_LT(glob.steps(), 20);
  text += 'b';
  EXPECT_FALSE(glob.Matches(text));
  EXPECT_GT(glob.steps(), 200'000);
}

}  // namespace
}  // namespace ema
