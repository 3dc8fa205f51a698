// SPDX-License-Identifier: Apache-2.0
//
// Strict reading of a checkpoint's JSON, with errors that name the place. Internal to this folder.
#ifndef EMA_SERVER_FORMAT_JSON_FIELDS_H_
#define EMA_SERVER_FORMAT_JSON_FIELDS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ema {

// With sorted keys: adding a member to an ordered_json searches all members.
using Json = nlohmann::json;

// DATA_LOSS, CHECKPOINT_CORRUPT: "manifest.json: " and `problem`.
absl::Status CorruptManifest(const std::string& problem);

// An object without doubled keys, at most 8 levels deep. nullopt: `text` is anything else.
std::optional<Json> ParseStrictJson(std::string_view text);

// A CRC32C as text: 8 hexadecimal digits, lower case. nullopt: `text` is anything else.
inline constexpr size_t kChecksumDigits = 8;
std::string FormatChecksum(uint32_t crc);
std::optional<uint32_t> ParseChecksum(std::string_view text);

// The text of a JSON object whose first member is "crc32c", the checksum of `covered`, so that a
// changed byte is detected. `covered`: the text of the other members up to the end.
std::string AddChecksum(std::string_view covered);
// True: AddChecksum() has made this text. `text` may be anything.
bool HasRightChecksum(std::string_view text);

// Typed access to one JSON object, which outlives this. A getter fails with CorruptManifest(), with
// the key, if it is missing or of another type.
class Fields {
 public:
  // `where` is put before each key in messages, such as "tracks[0].". Fails if `json` is not an
  // object.
  static absl::StatusOr<Fields> Of(const Json& json, std::string where);

  bool Has(const std::string& key) const { return json_.contains(key); }

  // Never null.
  absl::StatusOr<const Json*> Get(const std::string& key) const;
  absl::StatusOr<Fields> Object(const std::string& key) const;
  absl::StatusOr<const Json*> Array(const std::string& key) const;
  // An integer of `least` to `most`.
  absl::StatusOr<int64_t> Integer(const std::string& key, int64_t least,
                                  int64_t most = INT64_MAX) const;
  absl::StatusOr<double> Number(const std::string& key) const;
  absl::StatusOr<bool> Boolean(const std::string& key) const;
  absl::StatusOr<std::string> String(const std::string& key) const;
  absl::StatusOr<uint32_t> Checksum(const std::string& key) const;
  // An array of texts.
  absl::StatusOr<std::vector<std::string>> Texts(const std::string& key) const;
  // Calls `parse` for each element of an array of objects, until the first error.
  absl::Status ForEachObject(const std::string& key,
                             absl::FunctionRef<absl::Status(const Fields&)> parse) const;

  // CorruptManifest() with `status`, an error of another Parse() or Create() about this object's
  // values.
  absl::Status Bad(const absl::Status& status) const;

 private:
  Fields(const Json& json, std::string where) : json_(json), where_(std::move(where)) {}

  absl::Status IsNot(const std::string& key, const std::string& what) const;

  const Json& json_;
  const std::string where_;
};

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_JSON_FIELDS_H_
