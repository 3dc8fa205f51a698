// SPDX-License-Identifier: Apache-2.0
#include "server/ops/config_file.h"

#include <toml++/toml.h>

#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/small_file.h"

namespace ema {
namespace {

// Sets value or problem.
void Convert(const toml::node& node, ConfigEntry& entry) {
  if (const auto* const text = node.as_string()) {
    entry.value = text->get();
  } else if (const auto* const number = node.as_integer()) {
    entry.value = absl::StrCat(number->get());
  } else if (const auto* const truth = node.as_boolean()) {
    entry.value = truth->get() ? "true" : "false";
  } else if (const auto* const array = node.as_array();
             array != nullptr && (array->empty() || array->is_homogeneous<std::string>())) {
    std::vector<std::string> texts;
    for (const toml::node& element : *array) texts.push_back(element.as_string()->get());
    entry.value = absl::StrJoin(texts, ",");
  } else if (node.is_table()) {
    entry.problem = "is a table; expected an option outside of any table, such as max-models = 64";
  } else {
    std::ostringstream kind;
    kind << node.type();
    entry.problem = absl::StrCat("is of the TOML type ", kind.str(),
                                 "; expected text, an integer, true or false, or an array of text");
  }
}

}  // namespace

absl::StatusOr<std::vector<ConfigEntry>> ReadConfigFile(const std::string& path) {
  constexpr int64_t kMaxBytes = 1 << 20;
  const absl::StatusOr<std::string> content = ReadSmallFile(path, kMaxBytes);
  if (!content.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", content.status().message()));
  }
  const toml::parse_result parsed = toml::parse(*content, path);
  if (!parsed) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ":", parsed.error().source().begin.line,
                     ": not TOML: ", std::string(parsed.error().description())));
  }
  std::vector<ConfigEntry> entries;
  for (const auto& [key, node] : parsed.table()) {
    ConfigEntry& entry = entries.emplace_back();
    entry.key = std::string(key.str());
    entry.line = key.source().begin.line;
    Convert(node, entry);
  }
  return entries;
}

std::string TomlString(const std::string& text) {
  std::ostringstream out;
  out << toml::toml_formatter{toml::value<std::string>(text), toml::format_flags::none};
  return out.str();
}

}  // namespace ema
