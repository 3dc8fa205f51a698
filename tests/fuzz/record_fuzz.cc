// SPDX-License-Identifier: Apache-2.0
//
// The JSON of checkpoints and of a group's registry. The first byte says which file or record
// follows. What is accepted is written and read back.
#include <span>
#include <string>

#include "absl/strings/str_format.h"
#include "server/base/crc32c.h"
#include "server/format/label_file.h"
#include "server/format/manifest_json.h"
#include "server/format/verify.h"
#include "server/group/model_record.h"
#include "tests/fuzz/fuzz.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

// The text with the checksum that a file begins with, which the fuzzer would not find.
std::string WithChecksum(std::string_view text) {
  return absl::StrFormat("{\n\"crc32c\": \"%08x\",\n%s",
                         Crc32c(0, std::as_bytes(std::span(text.data(), text.size()))),
                         std::string(text));
}

void CheckManifestFile(const std::string& text) {
  const auto parsed = ParseCheckpointManifest(text);
  CheckMessage(parsed.status());
  if (!parsed.ok()) return;
  const std::string written = EncodeCheckpointManifest(*parsed);
  const auto again = ParseCheckpointManifest(written);
  EMA_FUZZ_CHECK(again.ok() && again->tracks == parsed->tracks);
  EMA_FUZZ_CHECK(EncodeCheckpointManifest(*again) == written);

  FakeFileSystem disk;
  EMA_FUZZ_CHECK(disk.CreateDirectory("/a").ok());
  EMA_FUZZ_CHECK(disk.NewWritableFile("/a/manifest.json").ok());
  disk.FileBytes("/a/manifest.json") = text;
  const auto checkpoint = ReadCheckpointManifest(disk, "/a");
  CheckMessage(checkpoint.status());
  if (!checkpoint.ok()) return;
  for (const CheckpointTrack& track : checkpoint->tracks) {
    EMA_FUZZ_CHECK(checkpoint->FolderBytes(track) >= 0);
  }
}

void CheckLabelsFile(const std::string& text) {
  const absl::StatusOr<LabelMap> labels = ParseLabels(text);
  CheckMessage(labels.status());
  if (labels.ok()) EMA_FUZZ_CHECK(ParseLabels(EncodeLabels(*labels)) == labels);
}

void CheckModelRecord(std::string_view text) {
  const auto record = group::ParseModelRecord("models/a", text);
  CheckMessage(record.status());
  if (!record.ok()) return;
  const absl::StatusOr<std::string> written = group::FormatModelRecord("models/a", *record);
  EMA_FUZZ_CHECK(written.ok() && group::ParseModelRecord("models/a", *written) == record);
  if (const group::GroupCheckpoint* const durable = record->NewestCheckpoint()) {
    EMA_FUZZ_CHECK(record->Find(durable->id) == durable);
  }
}

void CheckMemberRecord(std::string_view text) {
  const auto record = group::ParseMemberRecord("members/a", text);
  CheckMessage(record.status());
  if (!record.ok()) return;
  EMA_FUZZ_CHECK(group::ParseMemberRecord("members/a", group::FormatMemberRecord(*record)) ==
                 record);
}

}  // namespace
}  // namespace ema

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ema::FuzzInput input(data, size);
  switch (input.Byte() % 5) {
    case 0:
      ema::CheckManifestFile(ema::WithChecksum(input.rest()));
      break;
    case 1:
      ema::CheckLabelsFile(ema::WithChecksum(input.rest()));
      break;
    case 2:
      ema::CheckModelRecord(input.rest());
      break;
    case 3:
      ema::CheckMemberRecord(input.rest());
      break;
    default:
      ema::CheckMessage(ema::ParseCheckpointManifest(input.rest()).status());
      ema::CheckMessage(ema::ParseLabels(input.rest()).status());
  }
  return 0;
}
