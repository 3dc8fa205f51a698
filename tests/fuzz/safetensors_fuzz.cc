// SPDX-License-Identifier: Apache-2.0
//
// Headers of safetensors files. The input is the number of data bytes and the JSON, to which the
// length is added, or a file as it is. What is accepted is written and read back.
#include <string>
#include <vector>

#include "server/format/safetensors.h"
#include "tests/fuzz/fuzz.h"

namespace ema {
namespace {

void CheckHeader(const SafetensorsHeader& header, int64_t file_bytes) {
  std::vector<TensorSpec> specs;
  int64_t next = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    EMA_FUZZ_CHECK(tensor.begin == next && tensor.spec.Validate().ok());
    EMA_FUZZ_CHECK(tensor.end - tensor.begin == tensor.spec.byte_count());
    next = tensor.end;
    specs.push_back(tensor.spec);
  }
  EMA_FUZZ_CHECK(header.header_bytes + next == file_bytes);
  const std::string written = EncodeSafetensorsHeader(specs, header.metadata);
  const int64_t header_bytes = static_cast<int64_t>(written.size());
  const auto again = ParseSafetensorsHeader(written, header_bytes + next);
  EMA_FUZZ_CHECK(again.ok() && again->header_bytes == header_bytes);
  EMA_FUZZ_CHECK(again->metadata == header.metadata);
  EMA_FUZZ_CHECK(again->tensors.size() == specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    EMA_FUZZ_CHECK(again->tensors[i].spec == specs[i]);
    EMA_FUZZ_CHECK(again->tensors[i].begin == header.tensors[i].begin);
  }
}

void CheckFile(std::string_view first_bytes, int64_t file_bytes) {
  const auto header = ParseSafetensorsHeader(first_bytes, file_bytes);
  CheckMessage(header.status());
  if (header.ok()) CheckHeader(*header, file_bytes);
}

}  // namespace
}  // namespace ema

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ema::FuzzInput input(data, size);
  ema::CheckFile(input.rest(), static_cast<int64_t>(size));
  const int64_t data_bytes = input.Number(2);
  const std::string_view json = input.rest();
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[i] = static_cast<char>(uint64_t{json.size()} >> (8 * i));
  file += json;
  ema::CheckFile(file, static_cast<int64_t>(file.size()) + data_bytes);
  return 0;
}
