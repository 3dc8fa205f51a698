// SPDX-License-Identifier: Apache-2.0
#include "server/format/files_json.h"

#include <optional>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "ema/attached_file.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

Json EncodeSmallFile(const SmallFile& file) {
  return {{"name", file.name},
          {"file_bytes", file.file_bytes},
          {"crc32c", FormatChecksum(file.crc32c)}};
}

absl::StatusOr<SmallFile> ParseSmallFile(const Fields& fields) {
  SmallFile file;
  EMA_ASSIGN_OR_RETURN(file.name, fields.String("name"));
  EMA_ASSIGN_OR_RETURN(file.file_bytes, fields.Integer("file_bytes", 0));
  EMA_ASSIGN_OR_RETURN(file.crc32c, fields.Checksum("crc32c"));
  return file;
}

absl::StatusOr<TensorFile> ParseTensorFile(const Fields& fields) {
  TensorFile file;
  EMA_ASSIGN_OR_RETURN(file.file_bytes, fields.Integer("file_bytes", 0));
  EMA_ASSIGN_OR_RETURN(file.header_crc32c, fields.Checksum("header_crc32c"));
  return file;
}

absl::StatusOr<std::vector<uint32_t>> ParseTensorChecksums(const Fields& fields,
                                                           int64_t tensor_count) {
  EMA_ASSIGN_OR_RETURN(const Json* checksums, fields.Array("tensor_crc32c"));
  if (static_cast<int64_t>(checksums->size()) != tensor_count) {
    return CorruptManifest(absl::StrCat("a track's files have ", checksums->size(),
                                        " checksums for ", tensor_count, " tensors"));
  }
  std::vector<uint32_t> parsed;
  parsed.reserve(checksums->size());
  for (const Json& checksum : *checksums) {
    const std::optional<uint32_t> crc =
        checksum.is_string() ? ParseChecksum(checksum.get_ref<const std::string&>()) : std::nullopt;
    if (!crc.has_value()) return CorruptManifest("an element of tensor_crc32c is not a CRC32C");
    parsed.push_back(*crc);
  }
  return parsed;
}

// Checksums end to end, as one text: a large tensor has thousands.
absl::StatusOr<std::vector<uint32_t>> ParsePieceChecksums(std::string_view text) {
  std::vector<uint32_t> parsed;
  parsed.reserve(text.size() / kChecksumDigits + 1);
  for (size_t at = 0; at < text.size(); at += kChecksumDigits) {
    const std::optional<uint32_t> crc = ParseChecksum(text.substr(at, kChecksumDigits));
    if (!crc.has_value()) return CorruptManifest("a part of piece_crc32c is not a CRC32C");
    parsed.push_back(*crc);
  }
  return parsed;
}

absl::Status ParsePieces(const Fields& fields, const Manifest& manifest, TensorFiles& files) {
  EMA_ASSIGN_OR_RETURN(const Json* pieces, fields.Get("piece_crc32c"));
  if (!pieces->is_object()) return CorruptManifest("piece_crc32c is not an object");
  for (const auto& [name, checksums] : pieces->items()) {
    const std::optional<int64_t> i = manifest.Find(name);
    if (!i.has_value() || !checksums.is_string()) {
      return CorruptManifest("an element of piece_crc32c is not a tensor's checksums");
    }
    EMA_ASSIGN_OR_RETURN(files.piece_crc32c[*i],
                         ParsePieceChecksums(checksums.get_ref<const std::string&>()));
  }
  return absl::OkStatus();
}

}  // namespace

Json EncodeTensorFiles(const TensorFiles& files, const Manifest& manifest) {
  Json names = Json::array();
  for (const TensorFile& file : files.files) {
    names.push_back({{"name", file.name},
                     {"file_bytes", file.file_bytes},
                     {"header_crc32c", FormatChecksum(file.header_crc32c)}});
  }
  Json json = {{"files", std::move(names)}, {"digest", FormatChecksum(files.digest)}};
  if (files.index.has_value()) json["index"] = EncodeSmallFile(*files.index);
  Json checksums = Json::array();
  for (const uint32_t crc : files.tensor_crc32c) checksums.push_back(FormatChecksum(crc));
  json["tensor_crc32c"] = std::move(checksums);
  Json pieces = Json::object();
  for (size_t i = 0; i < files.piece_crc32c.size(); ++i) {
    if (files.piece_crc32c[i].empty()) continue;
    std::string text;
    for (const uint32_t crc : files.piece_crc32c[i]) text += FormatChecksum(crc);
    pieces[manifest.tensor(static_cast<int64_t>(i)).name] = std::move(text);
  }
  json["piece_crc32c"] = std::move(pieces);
  return json;
}

absl::StatusOr<TensorFiles> ParseTensorFiles(const Fields& fields, TensorKind kind,
                                             const Manifest& manifest) {
  TensorFiles files;
  EMA_ASSIGN_OR_RETURN(files.tensor_crc32c, ParseTensorChecksums(fields, manifest.tensor_count()));
  files.piece_crc32c.resize(manifest.tensor_count());
  EMA_RETURN_IF_ERROR(fields.ForEachObject("files", [&](const Fields& file) -> absl::Status {
    EMA_ASSIGN_OR_RETURN(TensorFile parsed, ParseTensorFile(file));
    EMA_ASSIGN_OR_RETURN(parsed.name, file.String("name"));
    files.files.push_back(std::move(parsed));
    return absl::OkStatus();
  }));
  if (files.files.empty()) return CorruptManifest("a track has weights, but no files");
  // No other names: they become paths.
  for (size_t i = 0; i < files.files.size(); ++i) {
    const std::string expected = TensorFileName(kind, i, files.files.size());
    if (files.files[i].name != expected) {
      return CorruptManifest(
          absl::StrCat("file ", i, " of a track is not named \"", expected, "\""));
    }
  }
  EMA_ASSIGN_OR_RETURN(files.digest, fields.Checksum("digest"));
  EMA_RETURN_IF_ERROR(ParsePieces(fields, manifest, files));
  const bool needs_index = kind == TensorKind::kWeights && files.files.size() > 1;
  if (fields.Has("index") != needs_index) {
    return CorruptManifest(absl::StrCat("a track of ", files.files.size(), " files has ",
                                        needs_index ? "no" : "an", " index"));
  }
  if (needs_index) {
    EMA_ASSIGN_OR_RETURN(const Fields index, fields.Object("index"));
    EMA_ASSIGN_OR_RETURN(files.index, ParseSmallFile(index));
    if (files.index->name != kIndexFileName) return CorruptManifest("an index with another name");
  }
  return files;
}

Json EncodeAttachedFiles(const std::vector<SmallFile>& files) {
  Json json = Json::array();
  for (const SmallFile& file : files) json.push_back(EncodeSmallFile(file));
  return json;
}

absl::StatusOr<std::vector<SmallFile>> ParseAttachedFiles(const Fields& fields,
                                                          const std::string& key) {
  std::vector<SmallFile> files;
  absl::flat_hash_set<std::string> names;
  EMA_RETURN_IF_ERROR(fields.ForEachObject(key, [&](const Fields& file) -> absl::Status {
    EMA_ASSIGN_OR_RETURN(SmallFile parsed, ParseSmallFile(file));
    if (const absl::Status status = ValidateAttachedName(parsed.name); !status.ok()) {
      return file.Bad(status);
    }
    if (!names.insert(parsed.name).second) {
      return CorruptManifest(absl::StrCat("file \"", parsed.name, "\" is attached twice"));
    }
    if (parsed.file_bytes > kMaxAttachedFileBytes || files.size() >= kMaxAttachedFiles) {
      return CorruptManifest("too many attached files, or too large ones");
    }
    files.push_back(std::move(parsed));
    return absl::OkStatus();
  }));
  return files;
}

}  // namespace ema
