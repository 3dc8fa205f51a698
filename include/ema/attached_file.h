// SPDX-License-Identifier: Apache-2.0
//
// A small file that lies beside a model's weights in its checkpoints: config.json, a tokenizer.
#ifndef EMA_ATTACHED_FILE_H_
#define EMA_ATTACHED_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace ema {

struct AttachedFile {
  std::string name;
  std::string bytes;

  friend bool operator==(const AttachedFile&, const AttachedFile&) = default;
};

// Limits on the number of files of a model and on their size. A tokenizer has up to 40 MB.
inline constexpr size_t kMaxAttachedFiles = 64;
inline constexpr int64_t kMaxAttachedFileBytes = int64_t{64} << 20;
// INVALID_ARGUMENT, BAD_NAME: the name is not [A-Za-z0-9][A-Za-z0-9._-]{0,127}, or ends like that
// of a weight file, in ".safetensors" or ".safetensors.index.json".
absl::Status ValidateAttachedName(std::string_view name);

}  // namespace ema

#endif  // EMA_ATTACHED_FILE_H_
