// SPDX-License-Identifier: Apache-2.0
//
// Names: of models, labels, attached files and dtypes, of the entries of a data directory, and the
// text of a LATEST file. A name that is accepted is the one that is written.
#include <google/protobuf/stubs/common.h>

#include <optional>

#include "ema/attached_file.h"
#include "ema/manifest.h"
#include "server/format/checkpoint_name.h"
#include "server/format/label_file.h"
#include "tests/fuzz/fuzz.h"

namespace ema {
namespace {

constexpr std::string_view kNameBytes =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";

void CheckNames(std::string_view text) {
  const absl::Status name = ValidateName("model", text);
  EMA_FUZZ_CHECK(name.ok() == (!text.empty() && text.size() <= 128 &&
                               kNameBytes.substr(0, 62).find(text[0]) != kNameBytes.npos &&
                               text.find_first_not_of(kNameBytes) == text.npos));
  const absl::Status label = ValidateNewLabel(text);
  const absl::Status attached = ValidateAttachedName(text);
  EMA_FUZZ_CHECK(name.ok() || (!label.ok() && !attached.ok()));
  const absl::StatusOr<Dtype> dtype = ParseDtype(text);
  EMA_FUZZ_CHECK(!dtype.ok() || DtypeName(*dtype) == text);
  for (const absl::Status& status : {name, label, attached, dtype.status()}) CheckMessage(status);
}

void CheckPrintable(std::string_view text) {
  bool is_printable = google::protobuf::internal::IsStructurallyValidUTF8(
      text.data(), static_cast<int>(text.size()));
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const std::string_view next = text.substr(i + 1, 1);
    const bool is_c1 = byte == 0xc2 && !next.empty() && static_cast<unsigned char>(next[0]) < 0xa0;
    is_printable = is_printable && byte >= 0x20 && byte != 0x7f && !is_c1;
  }
  EMA_FUZZ_CHECK(IsPrintableUtf8(text) == is_printable);
  const std::string escaped = EscapeUnprintable(text);
  EMA_FUZZ_CHECK(IsPrintableUtf8(escaped));
  EMA_FUZZ_CHECK((escaped == text) == is_printable);
}

void CheckStoredNames(std::string_view text) {
  const std::optional<CheckpointId> id = ParseCheckpointName(text);
  if (id.has_value()) {
    EMA_FUZZ_CHECK(id->step >= 0 && id->incarnation >= 0 && id->version >= 0);
    EMA_FUZZ_CHECK(CheckpointName(*id) == text);
    EMA_FUZZ_CHECK(ParseStoredName(text) == (StoredName{*id, /*is_partial=*/false}));
  }
  const std::optional<StoredName> stored = ParseStoredName(text);
  if (stored.has_value()) {
    EMA_FUZZ_CHECK(text.starts_with(CheckpointName(stored->id)));
    EMA_FUZZ_CHECK(ParseSetAsideName(std::string(kCorruptPrefix).append(text)) == stored);
  }
  const std::optional<StoredName> set_aside = ParseSetAsideName(text);
  EMA_FUZZ_CHECK(!set_aside.has_value() || text.find(CheckpointName(set_aside->id)) != text.npos);
  EMA_FUZZ_CHECK(text.ends_with(DeletedModelName(text)));
  const std::optional<std::string> latest = ParseLatest(text);
  EMA_FUZZ_CHECK(!latest.has_value() || EncodeLatest(*latest) == text);
  // The fuzzer does not guess a checksum.
  if (id.has_value()) EMA_FUZZ_CHECK(ParseLatest(EncodeLatest(std::string(text))) == text);
}

}  // namespace
}  // namespace ema

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = ema::FuzzInput(data, size).rest();
  ema::CheckNames(text);
  ema::CheckPrintable(text);
  ema::CheckStoredNames(text);
  return 0;
}
