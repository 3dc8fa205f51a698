// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_name.h"

#include <charconv>
#include <span>

#include "absl/strings/str_format.h"
#include "server/base/crc32c.h"

namespace ema {
namespace {

// Takes `prefix` and then a number off the front of `text`.
std::optional<int64_t> TakeNumber(std::string_view prefix, std::string_view& text) {
  if (text.substr(0, prefix.size()) != prefix) return std::nullopt;
  text.remove_prefix(prefix.size());
  int64_t value = 0;
  const std::from_chars_result result =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc()) return std::nullopt;
  text.remove_prefix(result.ptr - text.data());
  return value;
}

}  // namespace

CheckpointId IdOf(const VersionRecord& record) {
  return {record.incarnation, record.version, record.step};
}

std::string CheckpointName(const CheckpointId& id) {
  return absl::StrFormat("step-%012d-version-%d-%d", id.step, id.incarnation, id.version);
}

std::optional<CheckpointId> ParseCheckpointName(std::string_view name) {
  std::string_view rest = name;
  const std::optional<int64_t> step = TakeNumber("step-", rest);
  if (!step.has_value()) return std::nullopt;
  const std::optional<int64_t> incarnation = TakeNumber("-version-", rest);
  if (!incarnation.has_value()) return std::nullopt;
  const std::optional<int64_t> version = TakeNumber("-", rest);
  if (!version.has_value()) return std::nullopt;
  const CheckpointId id{*incarnation, *version, *step};
  // Refuses other spellings of the same numbers, and what follows them.
  if (CheckpointName(id) != name) return std::nullopt;
  return id;
}

std::string EncodeLatest(const std::string& name) {
  return absl::StrFormat("%s %08x\n", name, Crc32c(0, std::as_bytes(std::span(name))));
}

std::optional<std::string> ParseLatest(std::string_view text) {
  const std::string name(text.substr(0, text.find(' ')));
  if (!ParseCheckpointName(name).has_value() || EncodeLatest(name) != text) return std::nullopt;
  return name;
}

}  // namespace ema
