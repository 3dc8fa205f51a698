// SPDX-License-Identifier: Apache-2.0
#include "server/base/log_event.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace ema {
namespace {

bool NeedsQuotes(const std::string& text) {
  return text.empty() || std::any_of(text.begin(), text.end(), [](char c) {
           return c <= ' ' || c > '~' || c == '"' || c == '=' || c == '\\';
         });
}

std::string ToText(const LogField& field) {
  if (const auto* const text = std::get_if<std::string>(&field.value)) {
    if (!NeedsQuotes(*text)) return *text;
    // An apostrophe ends nothing here.
    return absl::StrCat("\"", absl::StrReplaceAll(absl::CHexEscape(*text), {{"\\'", "'"}}), "\"");
  }
  if (const auto* const number = std::get_if<int64_t>(&field.value)) return absl::StrCat(*number);
  if (const auto* const real = std::get_if<double>(&field.value)) return absl::StrCat(*real);
  return std::get<bool>(field.value) ? "true" : "false";
}

}  // namespace

std::string ToText(const LogEvent& event) {
  std::string line = event.name;
  for (const LogField& field : event.fields) {
    absl::StrAppend(&line, " ", field.key, "=", ToText(field));
  }
  return line;
}

}  // namespace ema
