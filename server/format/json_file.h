// SPDX-License-Identifier: Apache-2.0
//
// The form of a checkpoint's JSON files: an object whose first members are "crc32c", the checksum
// of all bytes after it, and "format_version".
#ifndef EMA_SERVER_FORMAT_JSON_FILE_H_
#define EMA_SERVER_FORMAT_JSON_FILE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/format/record_json.h"

namespace ema {

// The text of a file with the members of `object`, one a line. Numbers are written so that they are
// read back exactly.
std::string FormatJsonFile(int64_t format_version, const Json& object);

// The members of a file; `text` may be anything. FAILED_PRECONDITION: another format_version; the
// message names both. DATA_LOSS, CHECKPOINT_CORRUPT: the checksum is wrong, or the text is not
// JSON, has a key twice or is nested too deep. Messages begin with `file_name`.
absl::StatusOr<ParsedJson> ParseJsonFile(std::string_view file_name, int64_t format_version,
                                         std::string_view text);

// Parses a text that may be anything. Returns the problem, such as "it is not JSON at byte 7"; a
// key that an object has twice and deep nesting are problems, too. Empty: there is none. Never
// throws.
std::string ParseStrictJson(std::string_view text, ParsedJson& json);

// The error DATA_LOSS, CHECKPOINT_CORRUPT, for a problem of ReadJson() in this file.
absl::Status CorruptJsonFile(std::string_view file_name, const std::string& problem);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_JSON_FILE_H_
