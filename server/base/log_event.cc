// SPDX-License-Identifier: Apache-2.0
#include "server/base/log_event.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace ema {
namespace {

thread_local const LogCaller* thread_caller = nullptr;

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

LogCallerScope::LogCallerScope(const LogCaller* caller)
    : outer_(std::exchange(thread_caller, caller)) {}

LogCallerScope::~LogCallerScope() { thread_caller = outer_; }

void AddCaller(LogEvent& event) {
  if (thread_caller == nullptr) return;
  const auto add = [&event](std::string_view key, const std::string& value) {
    const bool is_there = std::any_of(event.fields.begin(), event.fields.end(),
                                      [key](const LogField& field) { return field.key == key; });
    if (!value.empty() && !is_there) event.fields.emplace_back(key, value);
  };
  add("peer", thread_caller->peer);
  add("role", thread_caller->role);
}

std::string ToText(const LogEvent& event) {
  std::string line = event.name;
  for (const LogField& field : event.fields) {
    absl::StrAppend(&line, " ", field.key, "=", ToText(field));
  }
  return line;
}

}  // namespace ema
