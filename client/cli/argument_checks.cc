// SPDX-License-Identifier: Apache-2.0
#include "client/cli/argument_checks.h"

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cli/checkpoint_commands.h"
#include "client/cli/track_option.h"

namespace ema::cli {
namespace {

template <typename Parsed>
std::string ErrorOf(const absl::StatusOr<Parsed>& parsed) {
  return parsed.ok() ? "" : std::string(parsed.status().message());
}

std::string CheckAtLeast(int64_t least, const std::string& text) {
  int64_t count = 0;
  if (absl::SimpleAtoi(text, &count) && count >= least && text == absl::StrCat(count)) return "";
  return absl::StrCat(text, " given, expected a whole number, ", least, " or more");
}

}  // namespace

std::string CheckCount(const std::string& text) { return CheckAtLeast(0, text); }

std::string CheckPositive(const std::string& text) { return CheckAtLeast(1, text); }

std::string CheckVersion(const std::string& text) {
  const std::string problem = CheckPositive(text);
  return problem.empty() ? ""
                         : absl::StrCat(problem,
                                        "; emactl label list MODEL shows the versions that have "
                                        "labels");
}

std::string CheckTrack(const std::string& text) { return ErrorOf(ParseTrackOption(text)); }

std::string CheckDtype(const std::string& text) {
  for (const char* dtype : {"float32", "float16", "bfloat16"}) {
    if (text == dtype) return "";
  }
  return absl::StrCat(text, " given, expected float32, float16 or bfloat16");
}

std::string CheckOverflow(const std::string& text) { return ErrorOf(ParseOverflowPolicy(text)); }

std::string CheckNonFinite(const std::string& text) {
  return ParseNonFinitePolicy(text).has_value()
             ? ""
             : absl::StrCat(text, " given, expected reject, skip or allow");
}

std::string CheckVersionOrLabel(const std::string& text) {
  return ErrorOf(ParseVersionOrLabel(text));
}

std::string CheckLabel(const std::string& text) {
  const auto parsed = ParseVersionOrLabel(text);
  return parsed.ok() && parsed->label.empty()
             ? "must not be a number: --version would read it as a version number"
             : ErrorOf(parsed);
}

std::string CheckDuration(const std::string& text) {
  absl::Duration duration;
  return absl::ParseDuration(text, &duration) && duration > absl::ZeroDuration()
             ? ""
             : absl::StrCat(text, " given, expected a time above 0, such as 500ms, 60s or 5m");
}

}  // namespace ema::cli
