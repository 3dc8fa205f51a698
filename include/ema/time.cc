// SPDX-License-Identifier: Apache-2.0
#include "ema/time.h"

#include <charconv>
#include <cmath>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "server/base/quoted.h"

namespace ema {
namespace {

// Above this a double does not hold every count.
constexpr double kMaxCount = 9007199254740992.0;  // 2^53

struct UnitNames {
  std::string_view suffix;
  std::string_view field;
};

// By TimeUnit.
constexpr std::array<UnitNames, kTimeUnitCount> kUnits = {{{"ba", "batch"},
                                                           {"ep", "epoch"},
                                                           {"sp", "sample"},
                                                           {"tok", "token"},
                                                           {"iter", "iteration"},
                                                           {"dur", "progress"},
                                                           {"sec", "seconds"}}};

// As Python reads numbers: "1_000ba" is "1000ba".
std::string WithoutUnderscores(std::string text) {
  for (size_t i = 1; i + 1 < text.size(); ++i) {
    if (text[i] == '_' && absl::ascii_isdigit(text[i - 1]) && absl::ascii_isdigit(text[i + 1])) {
      text.erase(i, 1);
    }
  }
  return text;
}

bool IsWhole(double value) { return value == std::floor(value); }

std::optional<TimeUnit> FindUnit(std::string_view suffix) {
  for (int i = 0; i < kTimeUnitCount; ++i) {
    if (kUnits[i].suffix == suffix) return static_cast<TimeUnit>(i);
  }
  return std::nullopt;
}

// Whole numbers below `plain_limit` in digits; others as short as they can be read back.
std::string FormatNumber(double value, double plain_limit) {
  if (IsWhole(value) && std::abs(value) < plain_limit) {
    return absl::StrCat(static_cast<int64_t>(value));
  }
  char buffer[32];
  const std::to_chars_result result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  std::string text(buffer, result.ptr);
  // "3e+09" is "3e9" to everyone else.
  if (const size_t e = text.find('e'); e != std::string::npos) {
    if (text[e + 1] == '+') text.erase(e + 1, 1);
    const size_t digits = text[e + 1] == '-' ? e + 2 : e + 1;
    while (text[digits] == '0' && digits + 1 < text.size()) text.erase(digits, 1);
  }
  return text;
}

absl::Status BadDuration(std::string_view text, std::string_view problem) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadSchedule,
                   absl::StrCat(Quoted(text), ": ", std::string(problem)));
}

absl::Status BadTime(std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadTime, message);
}

// Seconds in "1h30m15s", "90m", ...: whole numbers, each part at most once, in this order.
std::optional<double> ParseClock(std::string_view text) {
  constexpr std::array<std::pair<char, double>, 3> kParts = {{{'h', 3600}, {'m', 60}, {'s', 1}}};
  if (text.empty()) return std::nullopt;
  double seconds = 0;
  for (const auto& [letter, factor] : kParts) {
    int64_t count = 0;
    const char* const end = text.data() + text.size();
    const std::from_chars_result result = std::from_chars(text.data(), end, count);
    if (result.ec != std::errc() || count < 0 || result.ptr == end || *result.ptr != letter) {
      continue;
    }
    seconds += static_cast<double>(count) * factor;
    text.remove_prefix(result.ptr + 1 - text.data());
  }
  if (!text.empty()) return std::nullopt;
  return seconds;
}

// What the writer of a number without a unit may have meant. Below 1 that is rather a decay than a
// share of the training, which as a half-life would average nearly all of it.
std::string GuessUnit(std::string_view number, double value) {
  const std::string given(number);
  if (IsWhole(value) && value > 0 && value <= kMaxCount) return absl::StrCat("\"", given, "ba\"");
  if (!(value > 0 && value < 1)) return "\"1000ba\"";
  return absl::StrCat("\"1000ba\"; a decay is smoothing=", given,
                      ", a share of the whole training \"", given, "dur\"");
}

}  // namespace

std::string_view TimeUnitSuffix(TimeUnit unit) { return kUnits[static_cast<int>(unit)].suffix; }
std::string_view TimeUnitField(TimeUnit unit) { return kUnits[static_cast<int>(unit)].field; }

absl::StatusOr<TrainingDuration> TrainingDuration::Parse(std::string_view text) {
  const absl::string_view stripped =
      absl::StripAsciiWhitespace(absl::string_view(text.data(), text.size()));
  const std::string lower = WithoutUnderscores(absl::AsciiStrToLower(stripped));
  if (lower.empty()) return BadDuration(text, "a time is needed, such as \"1000ba\"");
  if (lower[0] == '-') {
    return BadDuration(text, "a time must not be negative; a right one is \"1000ba\"");
  }
  if (!absl::ascii_isdigit(lower[0]) && lower[0] != '.') {
    return BadDuration(text,
                       "a time is a finite number and a unit, without a sign, such as \"1000ba\"");
  }

  double value = 0;
  const char* const end = lower.data() + lower.size();
  const std::from_chars_result result = std::from_chars(lower.data(), end, value);
  if (result.ec == std::errc::result_out_of_range) {
    return BadDuration(text, "the number is out of range; a right one is \"1000ba\"");
  }
  if (result.ec != std::errc()) {
    return BadDuration(text, "a time begins with a number, such as \"1000ba\"");
  }
  const std::string_view number(lower.data(), result.ptr - lower.data());
  const std::string_view suffix(result.ptr, end - result.ptr);
  if (suffix.empty()) {
    return BadDuration(text,
                       absl::StrCat("a time needs a unit, such as ", GuessUnit(number, value)));
  }

  const std::optional<TimeUnit> unit = FindUnit(suffix);
  if (!unit.has_value()) {
    const std::optional<double> seconds = ParseClock(lower);
    if (seconds.has_value()) return TrainingDuration{*seconds, TimeUnit::kSecond};
    return BadDuration(text,
                       "unknown unit; use ba, ep, sp, tok, iter, dur or sec, such as \"1000ba\", "
                       "or hours, minutes and seconds, such as \"1h30m\"");
  }
  if (IsCounted(*unit) && !IsWhole(value)) {
    const std::string suffix_text(suffix);
    return BadDuration(text, absl::StrCat("must be a whole number of ", suffix_text, ", such as \"",
                                          value < 1 ? "1" : "2", suffix_text, "\""));
  }
  if (IsCounted(*unit) && value > kMaxCount) {
    return BadDuration(text, "must be at most 2^53; a right one is \"1000ba\"");
  }
  if (*unit == TimeUnit::kProgress && value > 1) {
    return BadDuration(text, "dur is a share of the whole training, at most 1, such as \"0.1dur\"");
  }
  return TrainingDuration{value, *unit};
}

std::string TrainingDuration::ToString() const {
  return FormatNumber(value, /*plain_limit=*/1e7) + std::string(TimeUnitSuffix(unit));
}

absl::Status TrainingTime::Validate() const {
  for (int i = 0; i < kTimeUnitCount; ++i) {
    if (!values_[i].has_value()) continue;
    const double value = *values_[i];
    const TimeUnit unit = static_cast<TimeUnit>(i);
    const char* problem = nullptr;
    if (!std::isfinite(value) || value < 0) {
      problem = "must be a finite number, 0 or more";
    } else if (IsCounted(unit) && (!IsWhole(value) || value > kMaxCount)) {
      problem = "must be a whole number up to 2^53, such as 40";
    } else if (unit == TimeUnit::kProgress && value > 1) {
      problem = "must be a share of the whole training, 0 to 1, such as 0.25";
    }
    if (problem != nullptr) {
      return BadTime(absl::StrCat("training time ", std::string(kUnits[i].field), " ",
                                  FormatNumber(value, kMaxCount), ": ", problem));
    }
  }
  return absl::OkStatus();
}

absl::Status TrainingTime::CheckNotBefore(const TrainingTime& earlier) const {
  for (int i = 0; i < kTimeUnitCount; ++i) {
    if (!earlier.values_[i].has_value()) continue;
    const std::string field(kUnits[i].field);
    const std::string before = FormatNumber(*earlier.values_[i], kMaxCount);
    if (!values_[i].has_value()) {
      return BadTime(absl::StrCat("training time lacks ", field, ", which was ", before,
                                  " before: report the same units at every step"));
    }
    if (*values_[i] < *earlier.values_[i]) {
      return BadTime(absl::StrCat("training time ", field, " ",
                                  FormatNumber(*values_[i], kMaxCount), " is before ", before,
                                  ": it must not go back"));
    }
  }
  return absl::OkStatus();
}

std::string TrainingTime::ToString() const {
  std::string text;
  for (int i = 0; i < kTimeUnitCount; ++i) {
    if (!values_[i].has_value()) continue;
    absl::StrAppend(&text, text.empty() ? "" : ", ", std::string(kUnits[i].field), " ",
                    FormatNumber(*values_[i], kMaxCount));
  }
  return text.empty() ? "none" : text;
}

}  // namespace ema
