// SPDX-License-Identifier: Apache-2.0
#include "server/format/json_fields.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/format/checkpoint_files.h"

namespace ema {
namespace {

// The text before a checksum, and between it and the bytes that it covers.
constexpr std::string_view kOpening = "{\n\"crc32c\": \"";
constexpr std::string_view kAfterChecksum = "\",\n";

// Takes what ParseStrictJson() takes; builds nothing.
class StrictnessChecker final : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(int64_t) override { return true; }
  bool number_unsigned(uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return Open(); }
  bool key(std::string& value) override { return keys_.back().insert(value).second; }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return Open(); }
  bool end_array() override { return Close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  static constexpr size_t kMaxDepth = 8;

  bool Open() {
    keys_.emplace_back();
    return keys_.size() <= kMaxDepth;
  }
  bool Close() {
    keys_.pop_back();
    return true;
  }

  std::vector<absl::flat_hash_set<std::string>> keys_;  // Of what is open; an array has none.
};

}  // namespace

absl::Status CorruptManifest(const std::string& problem) {
  return CorruptCheckpoint(absl::StrCat("manifest.json: ", problem));
}

std::optional<Json> ParseStrictJson(std::string_view text) {
  // The parser takes a zero byte for the end.
  if (text.find('\0') != std::string_view::npos) return std::nullopt;
  // First, and not by a callback of the parser, which looks at all members of an object for each
  // that ends in it.
  StrictnessChecker checker;
  if (!Json::sax_parse(text.begin(), text.end(), &checker)) return std::nullopt;
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  return json;
}

std::string FormatChecksum(uint32_t crc) { return absl::StrFormat("%08x", crc); }

std::optional<uint32_t> ParseChecksum(std::string_view text) {
  uint32_t value = 0;
  if (text.size() != kChecksumDigits) return std::nullopt;
  // SimpleHexAtoi() would allow signs, spaces, capitals and "0x": two texts of one checksum.
  if (text.find_first_not_of("0123456789abcdef") != std::string_view::npos) return std::nullopt;
  if (!absl::SimpleHexAtoi(absl::string_view(text.data(), text.size()), &value)) {
    return std::nullopt;
  }
  return value;
}

std::string AddChecksum(std::string_view covered) {
  return absl::StrCat(std::string(kOpening),
                      FormatChecksum(Crc32c(0, std::as_bytes(std::span(covered)))),
                      std::string(kAfterChecksum), std::string(covered));
}

bool HasRightChecksum(std::string_view text) {
  if (!text.starts_with(kOpening)) return false;
  text.remove_prefix(kOpening.size());
  const std::optional<uint32_t> crc = ParseChecksum(text.substr(0, kChecksumDigits));
  text.remove_prefix(std::min(kChecksumDigits, text.size()));
  if (!text.starts_with(kAfterChecksum)) return false;
  text.remove_prefix(kAfterChecksum.size());
  return crc == Crc32c(0, std::as_bytes(std::span(text)));
}

absl::StatusOr<Fields> Fields::Of(const Json& json, std::string where) {
  if (!json.is_object()) return CorruptManifest(absl::StrCat(where, " is not an object"));
  return Fields(json, std::move(where));
}

absl::StatusOr<const Json*> Fields::Get(const std::string& key) const {
  const auto it = json_.find(key);
  if (it == json_.end()) return CorruptManifest(absl::StrCat(where_, key, " is missing"));
  return &*it;
}

absl::StatusOr<Fields> Fields::Object(const std::string& key) const {
  EMA_ASSIGN_OR_RETURN(const Json* json, Get(key));
  return Of(*json, absl::StrCat(where_, key, "."));
}

absl::StatusOr<const Json*> Fields::Array(const std::string& key) const {
  EMA_ASSIGN_OR_RETURN(const Json* json, Get(key));
  if (!json->is_array()) return IsNot(key, "an array");
  return json;
}

absl::StatusOr<int64_t> Fields::Integer(const std::string& key, int64_t least, int64_t most) const {
  EMA_ASSIGN_OR_RETURN(const Json* json, Get(key));
  const bool fits = json->is_number_integer() &&
                    !(json->is_number_unsigned() && json->get<uint64_t>() > INT64_MAX);
  if (!fits || json->get<int64_t>() < least || json->get<int64_t>() > most) {
    const std::string bound = most == INT64_MAX ? " or more" : absl::StrCat(" to ", most);
    return IsNot(key, absl::StrCat("an integer of ", least, bound));
  }
  return json->get<int64_t>();
}

absl::StatusOr<double> Fields::Number(const std::string& key) const {
  EMA_ASSIGN_OR_RETURN(const Json* json, Get(key));
  if (!json->is_number()) return IsNot(key, "a number");
  return json->get<double>();
}

absl::StatusOr<bool> Fields::Boolean(const std::string& key) const {
  EMA_ASSIGN_OR_RETURN(const Json* json, Get(key));
  if (!json->is_boolean()) return IsNot(key, "a boolean");
  return json->get<bool>();
}

absl::StatusOr<std::string> Fields::String(const std::string& key) const {
  EMA_ASSIGN_OR_RETURN(const Json* json, Get(key));
  if (!json->is_string()) return IsNot(key, "a string");
  return json->get<std::string>();
}

absl::StatusOr<uint32_t> Fields::Checksum(const std::string& key) const {
  EMA_ASSIGN_OR_RETURN(const std::string text, String(key));
  if (const std::optional<uint32_t> crc = ParseChecksum(text)) return *crc;
  return IsNot(key, "a CRC32C");
}

absl::StatusOr<std::vector<std::string>> Fields::Texts(const std::string& key) const {
  EMA_ASSIGN_OR_RETURN(const Json* elements, Array(key));
  std::vector<std::string> texts;
  for (const Json& element : *elements) {
    if (!element.is_string()) {
      return CorruptManifest(absl::StrCat("one of ", key, " is not a string"));
    }
    texts.push_back(element.get<std::string>());
  }
  return texts;
}

absl::Status Fields::ForEachObject(const std::string& key,
                                   absl::FunctionRef<absl::Status(const Fields&)> parse) const {
  EMA_ASSIGN_OR_RETURN(const Json* elements, Array(key));
  for (size_t i = 0; i < elements->size(); ++i) {
    EMA_ASSIGN_OR_RETURN(const Fields element, Of((*elements)[i], absl::StrCat(key, "[", i, "].")));
    EMA_RETURN_IF_ERROR(parse(element));
  }
  return absl::OkStatus();
}

absl::Status Fields::Bad(const absl::Status& status) const {
  return CorruptManifest(absl::StrCat(where_, " ", status.message()));
}

absl::Status Fields::IsNot(const std::string& key, const std::string& what) const {
  return CorruptManifest(absl::StrCat(where_, key, " is not ", what));
}

}  // namespace ema
