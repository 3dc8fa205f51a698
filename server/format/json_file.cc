// SPDX-License-Identifier: Apache-2.0
#include "server/format/json_file.h"

#include <span>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "server/base/crc32c.h"
#include "server/format/checkpoint_files.h"

namespace ema {
namespace {

// The text up to the bytes that the checksum covers.
std::string Opening(std::string_view covered) {
  return absl::StrFormat("{\n\"crc32c\": \"%08x\",\n",
                         Crc32c(0, std::as_bytes(std::span(covered))));
}

// Accepts a text without doubled keys and deep nesting; builds nothing. A separate pass: the
// parser's own callback would look at all members of an object for each that ends in it.
class StrictnessChecker final : public nlohmann::json_sax<ParsedJson> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(int64_t) override { return true; }
  bool number_unsigned(uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return Open(); }
  bool key(std::string& value) override {
    if (!keys_.back().insert(value).second) problem_ = absl::StrCat(value, " is there twice");
    return problem_.empty();
  }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return Open(); }
  bool end_array() override { return Close(); }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    problem_ = absl::StrCat("it is not JSON at byte ", position);
    return false;
  }

  const std::string& problem() const { return problem_; }

 private:
  static constexpr size_t kMaxDepth = 8;

  bool Open() {
    keys_.emplace_back();
    if (keys_.size() > kMaxDepth) {
      problem_ = absl::StrCat("it is nested deeper than ", kMaxDepth, " levels");
    }
    return problem_.empty();
  }
  bool Close() {
    keys_.pop_back();
    return true;
  }

  std::vector<absl::flat_hash_set<std::string>> keys_;  // Of what is open; an array has none.
  std::string problem_;
};

}  // namespace

std::string FormatJsonFile(int64_t format_version, const Json& object) {
  std::string covered = absl::StrCat("\"format_version\": ", format_version);
  for (const auto& [key, value] : object.items()) {
    absl::StrAppend(&covered, ",\n\"", key, "\": ", value.dump());
  }
  covered += "\n}\n";
  return Opening(covered) + covered;
}

std::string ParseStrictJson(std::string_view text, ParsedJson& json) {
  // The parser takes a zero byte for the end.
  if (text.find('\0') != std::string_view::npos) return "it has a zero byte";
  StrictnessChecker checker;
  if (!ParsedJson::sax_parse(text.begin(), text.end(), &checker)) return checker.problem();
  json = ParsedJson::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  return "";
}

absl::StatusOr<ParsedJson> ParseJsonFile(std::string_view file_name, int64_t format_version,
                                         std::string_view text) {
  const size_t opening = Opening("").size();
  if (text.size() < opening || text.substr(0, opening) != Opening(text.substr(opening))) {
    return CorruptJsonFile(file_name, "the checksum is wrong, or missing");
  }
  ParsedJson json;
  std::string problem = ParseStrictJson(text, json);
  if (!problem.empty()) return CorruptJsonFile(file_name, problem);
  int64_t found = 0;
  const auto it = json.find("format_version");
  problem = it == json.end() ? " is missing" : ReadJson(*it, found, 1);
  if (!problem.empty()) return CorruptJsonFile(file_name, "format_version" + problem);
  if (found != format_version) {
    return absl::FailedPreconditionError(absl::StrCat(std::string(file_name),
                                                      ": written in format_version ", found,
                                                      "; this build reads only ", format_version));
  }
  json.erase("crc32c");
  json.erase("format_version");
  return json;
}

absl::Status CorruptJsonFile(std::string_view file_name, const std::string& problem) {
  return CorruptCheckpoint(
      absl::StrCat(std::string(file_name), ": ", absl::StripPrefix(problem, ".")));
}

}  // namespace ema
