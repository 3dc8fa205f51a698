// SPDX-License-Identifier: Apache-2.0
//
// The parts of manifest.json that name files and their checksums. Internal to this folder.
// Errors of parsing: CorruptManifest(), with the place.
#ifndef EMA_SERVER_FORMAT_FILES_JSON_H_
#define EMA_SERVER_FORMAT_FILES_JSON_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "server/format/checkpoint_files.h"
#include "server/format/json_fields.h"
#include "server/format/manifest_json.h"

namespace ema {

Json EncodeTensorFiles(const TensorFiles& files, const Manifest& manifest);
absl::StatusOr<TensorFiles> ParseTensorFiles(const Fields& fields, TensorKind kind,
                                             const Manifest& manifest);

Json EncodeAttachedFiles(const std::vector<SmallFile>& files);
absl::StatusOr<std::vector<SmallFile>> ParseAttachedFiles(const Fields& fields,
                                                          const std::string& key);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_FILES_JSON_H_
