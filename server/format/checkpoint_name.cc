// SPDX-License-Identifier: Apache-2.0
#include "server/format/checkpoint_name.h"

#include <algorithm>
#include <charconv>
#include <span>

#include "absl/strings/str_format.h"
#include "server/base/crc32c.h"

namespace ema {
namespace {

constexpr std::string_view kPartialInfix = "-part-";

// Takes `prefix` and then a number, 0 or more, off the front of `text`.
std::optional<int64_t> TakeNumber(std::string_view prefix, std::string_view& text) {
  if (text.substr(0, prefix.size()) != prefix) return std::nullopt;
  text.remove_prefix(prefix.size());
  int64_t value = 0;
  const std::from_chars_result result =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc() || value < 0) return std::nullopt;
  text.remove_prefix(result.ptr - text.data());
  return value;
}

}  // namespace

CheckpointId IdOf(const Version& record) {
  return {record.incarnation, record.number, record.step};
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

std::string PartialCheckpointName(const CheckpointId& id, std::vector<std::string> tracks) {
  std::sort(tracks.begin(), tracks.end());
  uint32_t crc = 0;
  for (const std::string& track : tracks) {
    const std::string line = track + "\n";
    crc = Crc32c(crc, std::as_bytes(std::span(line)));
  }
  return absl::StrFormat("%s%s%08x", CheckpointName(id), std::string(kPartialInfix), crc);
}

std::optional<StoredName> ParseStoredName(std::string_view name) {
  const size_t infix = name.find(kPartialInfix);
  const std::optional<CheckpointId> id = ParseCheckpointName(name.substr(0, infix));
  if (!id.has_value()) return std::nullopt;
  if (infix == std::string_view::npos) return StoredName{*id, /*is_partial=*/false};
  const std::string_view digits = name.substr(infix + kPartialInfix.size());
  if (digits.size() != 8 || digits.find_first_not_of("0123456789abcdef") != digits.npos) {
    return std::nullopt;
  }
  return StoredName{*id, /*is_partial=*/true};
}

std::optional<StoredName> ParseSetAsideName(std::string_view name) {
  const std::string_view prefix =
      name.starts_with(kCorruptPrefix) ? kCorruptPrefix : kAbandonedPrefix;
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  if (const auto parsed = ParseStoredName(name)) return parsed;
  return ParseStoredName(name.substr(0, name.rfind('-')));
}

bool IsSetAsideLabelFile(std::string_view name) {
  if (!name.starts_with(kCorruptPrefix)) return false;
  return name.substr(kCorruptPrefix.size()).starts_with(kLabelsFileName);
}

std::string DeletedName(int64_t incarnation, int64_t count, std::string_view model) {
  return absl::StrFormat("%s%d-%d-%s", std::string(kDeletedPrefix), incarnation, count,
                         std::string(model));
}

std::string_view DeletedModelName(std::string_view name) {
  if (!TakeNumber(kDeletedPrefix, name).has_value() || !TakeNumber("-", name).has_value() ||
      !name.starts_with('-')) {
    return "";
  }
  return name.substr(1);
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
