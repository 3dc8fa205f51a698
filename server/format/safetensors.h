// SPDX-License-Identifier: Apache-2.0
//
// The safetensors format (https://github.com/huggingface/safetensors#format): a little-endian
// uint64 N, N bytes of JSON, then the data section. A strict reader for files from anywhere, and a
// writer.
#ifndef EMA_SERVER_FORMAT_SAFETENSORS_H_
#define EMA_SERVER_FORMAT_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/tensor_spec.h"
#include "server/format/file_system.h"

namespace ema {

// Longest JSON header that is read, as in the reference implementation.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

// The key that holds a file's metadata; no tensor can have this name.
inline constexpr std::string_view kSafetensorsMetadataKey = "__metadata__";

struct SafetensorsTensor {
  TensorSpec spec;
  // Its bytes are [begin, end) of the data section.
  int64_t begin = 0;
  int64_t end = 0;
};

struct SafetensorsHeader {
  // In the order of their bytes in the file: together they are the data section, without gap or
  // overlap. Names are unique, every spec is valid and fits its bytes.
  std::vector<SafetensorsTensor> tensors;
  std::map<std::string, std::string> metadata;
  // File offset of the data section.
  int64_t header_bytes = 0;
};

// Reads the header of a file that has `file_bytes` bytes and begins with `first_bytes`: its first 8
// + N bytes or more. INVALID_ARGUMENT, BAD_REQUEST: anything that the format forbids, a data type
// we do not have (see TensorSpec), more than kMaxDimensions dimensions; the message says what and
// where.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view first_bytes,
                                                         int64_t file_bytes);

// Reads only the header of `file`. Errors as ParseSafetensorsHeader() and file.Read().
// `max_header_bytes` bounds the memory that a hostile file can claim.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(
    const RandomAccessFile& file, int64_t max_header_bytes = kMaxSafetensorsHeaderBytes);

// The first bytes of a file: the data of `tensors` follow, end to end in this order. Padded with
// spaces so that the data begin at a multiple of 64; the data themselves are aligned if the tensors
// are ordered by falling element size. REQUIRES: specs are valid, names unique and none is
// kSafetensorsMetadataKey.
std::string EncodeSafetensorsHeader(absl::Span<const TensorSpec> tensors,
                                    const std::map<std::string, std::string>& metadata);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_SAFETENSORS_H_
