// SPDX-License-Identifier: Apache-2.0
#include "server/format/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"

namespace ema {
namespace {

constexpr int64_t kLengthBytes = 8;  // Of the number before the JSON.
constexpr int64_t kDataAlignment = 64;

struct FormatDtype {
  std::string_view name;
  Dtype dtype;
};
constexpr std::array<FormatDtype, 10> kFormatDtypes = {{{"F32", Dtype::kFloat32},
                                                        {"F16", Dtype::kFloat16},
                                                        {"BF16", Dtype::kBFloat16},
                                                        {"F64", Dtype::kFloat64},
                                                        {"I8", Dtype::kInt8},
                                                        {"I16", Dtype::kInt16},
                                                        {"I32", Dtype::kInt32},
                                                        {"I64", Dtype::kInt64},
                                                        {"U8", Dtype::kUInt8},
                                                        {"BOOL", Dtype::kBool}}};

std::optional<Dtype> FindDtype(std::string_view name) {
  for (const FormatDtype& entry : kFormatDtypes) {
    if (entry.name == name) return entry.dtype;
  }
  return std::nullopt;
}

std::string_view FormatName(Dtype dtype) {
  for (const FormatDtype& entry : kFormatDtypes) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "?";  // Not reached: specs are valid.
}

absl::Status BadFile(const std::string& problem) {
  return BadRequest(absl::StrCat("not a safetensors file that we read: ", problem));
}

// Fills a SafetensorsHeader from the parser's events, so that a hostile header costs no more memory
// than its tensors. Stops at the first problem. The format's JSON is never deeper than an array in
// an object in an object.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<SafetensorsTensor> tensors;
  std::map<std::string, std::string> metadata;
  std::string problem;

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool number_float(double, const std::string& text) override {
    return Unexpected(absl::StrCat("the number ", text.substr(0, 32)));
  }
  bool number_integer(int64_t value) override {  // Called for negative ones only.
    return Unexpected(absl::StrCat("the number ", value));
  }

  bool number_unsigned(uint64_t value) override {
    if (place_ != Place::kShape && place_ != Place::kOffsets) return Unexpected("a number");
    if (value > INT64_MAX) return Unexpected(absl::StrCat("the number ", value));
    if (place_ == Place::kShape) {
      // The spec is checked as a whole later; this only bounds the memory.
      if (tensors.back().spec.shape.size() >= kMaxDimensions) {
        return Fail(absl::StrCat("more than ", kMaxDimensions, " dimensions"));
      }
      tensors.back().spec.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (offset_count_ >= 2) return Fail("more than two data_offsets");
    (offset_count_ == 0 ? tensors.back().begin : tensors.back().end) = static_cast<int64_t>(value);
    ++offset_count_;
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::kMetadata) {
      metadata[key_] = std::move(value);
      return true;
    }
    if (place_ != Place::kTensor || key_ != "dtype") return Unexpected("a string");
    const std::optional<Dtype> dtype = FindDtype(value);
    if (!dtype.has_value()) {
      const std::string names =
          absl::StrJoin(kFormatDtypes, ", ", [](std::string* out, const FormatDtype& entry) {
            absl::StrAppend(out, std::string(entry.name));
          });
      return Fail(absl::StrCat("dtype ", Quoted(value), " is not one of ", names));
    }
    tensors.back().spec.dtype = *dtype;
    return true;
  }

  bool start_object(size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kRoot;
    } else if (place_ == Place::kRoot && key_ == kSafetensorsMetadataKey) {
      place_ = Place::kMetadata;
    } else if (place_ == Place::kRoot) {
      place_ = Place::kTensor;
      tensors.emplace_back().spec.name = key_;
      offset_count_ = 0;
    } else {
      return Unexpected("an object");
    }
    if (place_ != Place::kRoot) inner_keys_.clear();
    return true;
  }

  bool key(std::string& value) override {
    auto& keys = place_ == Place::kRoot ? root_keys_ : inner_keys_;
    if (!keys.insert(value).second) return Fail(absl::StrCat("key ", Quoted(value), " twice"));
    if (place_ == Place::kTensor && value != "dtype" && value != "shape" &&
        value != "data_offsets") {
      return Fail(absl::StrCat("unknown key ", Quoted(value)));
    }
    key_ = std::move(value);
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      for (const char* needed : {"dtype", "shape", "data_offsets"}) {
        if (!inner_keys_.contains(needed)) return Fail(absl::StrCat("no ", needed));
      }
    }
    place_ = place_ == Place::kRoot ? Place::kEnd : Place::kRoot;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ == Place::kTensor && key_ == "shape") {
      place_ = Place::kShape;
    } else if (place_ == Place::kTensor && key_ == "data_offsets") {
      place_ = Place::kOffsets;
    } else {
      return Unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::kOffsets && offset_count_ != 2) {
      return Fail(absl::StrCat(offset_count_, " data_offsets, expected 2"));
    }
    place_ = Place::kTensor;
    return true;
  }

  bool binary(binary_t&) override { return Unexpected("binary data"); }  // Never in JSON.

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    problem = absl::StrCat("the header is not JSON, at its byte ", position);
    return false;
  }

 private:
  enum class Place { kStart, kRoot, kMetadata, kTensor, kShape, kOffsets, kEnd };

  bool Unexpected(const std::string& what) {
    if (place_ == Place::kStart) return Fail(absl::StrCat("the header is ", what));
    return Fail(absl::StrCat(what, " at ", Quoted(key_)));
  }

  bool Fail(const std::string& what) {
    const bool in_tensor =
        place_ == Place::kTensor || place_ == Place::kShape || place_ == Place::kOffsets;
    problem = place_ == Place::kMetadata ? absl::StrCat("__metadata__: ", what)
              : in_tensor ? absl::StrCat("tensor ", Quoted(tensors.back().spec.name), ": ", what)
                          : what;
    return false;
  }

  Place place_ = Place::kStart;
  std::string key_;  // Seen last.
  absl::flat_hash_set<std::string> root_keys_;
  absl::flat_hash_set<std::string> inner_keys_;  // Of the object in the root that is open.
  int offset_count_ = 0;                         // Seen of the open data_offsets.
};

// Checks what tensors say of their bytes, and that these fill the data section exactly.
absl::Status CheckTensors(std::vector<SafetensorsTensor>& tensors, int64_t data_bytes) {
  for (const SafetensorsTensor& tensor : tensors) {
    if (const absl::Status status = tensor.spec.Validate(); !status.ok()) {
      return BadFile(std::string(status.message()));
    }
    if (tensor.begin > tensor.end || tensor.end - tensor.begin != tensor.spec.byte_count()) {
      return BadFile(absl::StrCat("tensor ", Quoted(tensor.spec.name), ": ",
                                  tensor.spec.TypeString(), " takes ", tensor.spec.byte_count(),
                                  " bytes, but data_offsets are ", tensor.begin, " and ",
                                  tensor.end));
    }
  }
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  int64_t next = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    if (tensor.begin != next) {
      return BadFile(absl::StrCat("tensor ", Quoted(tensor.spec.name), " begins at ", tensor.begin,
                                  ", but the data before it end at ", next));
    }
    next = tensor.end;
  }
  if (next != data_bytes) {
    return BadFile(
        absl::StrCat("the data section has ", data_bytes, " bytes, but the tensors ", next));
  }
  return absl::OkStatus();
}

// Checked N of a file that begins with `length` (8 bytes).
absl::StatusOr<int64_t> JsonBytes(const char* length, int64_t file_bytes,
                                  int64_t max_header_bytes) {
  uint64_t n = 0;
  for (int i = 0; i < kLengthBytes; ++i) {
    n |= uint64_t{static_cast<unsigned char>(length[i])} << (8 * i);
  }
  if (n > static_cast<uint64_t>(max_header_bytes)) {
    return BadFile(
        absl::StrCat("a header of ", n, " bytes, at most ", max_header_bytes, " are allowed"));
  }
  if (static_cast<int64_t>(n) > file_bytes - kLengthBytes) {
    return BadFile(absl::StrCat("a header of ", n, " bytes in a file of ", file_bytes));
  }
  return static_cast<int64_t>(n);
}

absl::Status TooShort(int64_t file_bytes) {
  return BadFile(absl::StrCat("it has ", file_bytes, " bytes, fewer than ", kLengthBytes));
}

std::string JsonString(const std::string& text) {
  // Bytes that are not UTF-8 (which valid specs do not have) are replaced: dump() would throw.
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view first_bytes,
                                                         int64_t file_bytes) {
  if (file_bytes < kLengthBytes || first_bytes.size() < kLengthBytes) return TooShort(file_bytes);
  EMA_ASSIGN_OR_RETURN(const int64_t json_bytes,
                       JsonBytes(first_bytes.data(), file_bytes, kMaxSafetensorsHeaderBytes));
  const std::string_view json = first_bytes.substr(kLengthBytes, json_bytes);
  if (static_cast<int64_t>(json.size()) < json_bytes) {
    return BadFile(
        absl::StrCat("a header of ", json_bytes, " bytes is cut off after ", json.size()));
  }
  // The parser would skip a byte order mark, and take a zero byte for the end.
  if (const size_t begin = json.find_first_not_of(" \t\r\n");
      begin == std::string_view::npos || json[begin] != '{') {
    return BadFile("the header does not begin with {");
  }
  if (const size_t zero = json.find('\0'); zero != std::string_view::npos) {
    return BadFile(absl::StrCat("the header is not JSON, at its byte ", zero + 1));
  }
  HeaderReader reader;
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &reader)) {
    return BadFile(reader.problem);
  }
  SafetensorsHeader header;
  header.header_bytes = kLengthBytes + json_bytes;
  header.tensors = std::move(reader.tensors);
  header.metadata = std::move(reader.metadata);
  EMA_RETURN_IF_ERROR(CheckTensors(header.tensors, file_bytes - header.header_bytes));
  return header;
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const RandomAccessFile& file,
                                                        int64_t max_header_bytes) {
  if (file.size_bytes() < kLengthBytes) return TooShort(file.size_bytes());
  std::string bytes(kLengthBytes, '\0');
  EMA_RETURN_IF_ERROR(file.Read(0, std::as_writable_bytes(std::span(bytes))));
  EMA_ASSIGN_OR_RETURN(const int64_t json_bytes,
                       JsonBytes(bytes.data(), file.size_bytes(),
                                 std::min(max_header_bytes, kMaxSafetensorsHeaderBytes)));
  bytes.resize(kLengthBytes + json_bytes);
  EMA_RETURN_IF_ERROR(
      file.Read(kLengthBytes, std::as_writable_bytes(std::span(bytes)).subspan(kLengthBytes)));
  return ParseSafetensorsHeader(bytes, file.size_bytes());
}

std::string EncodeSafetensorsHeader(absl::Span<const TensorSpec> tensors,
                                    const std::map<std::string, std::string>& metadata) {
  std::string json = "{";
  if (!metadata.empty()) {
    absl::StrAppend(&json, "\"", std::string(kSafetensorsMetadataKey), "\":{");
    for (const auto& [key, value] : metadata) {
      absl::StrAppend(&json, json.back() == '{' ? "" : ",", JsonString(key), ":",
                      JsonString(value));
    }
    json += '}';
  }
  int64_t offset = 0;
  for (const TensorSpec& spec : tensors) {
    const int64_t end = offset + spec.byte_count();
    absl::StrAppend(&json, json.size() == 1 ? "" : ",", JsonString(spec.name), ":{\"dtype\":\"",
                    std::string(FormatName(spec.dtype)), "\",\"shape\":[",
                    absl::StrJoin(spec.shape, ","), "],\"data_offsets\":[", offset, ",", end, "]}");
    offset = end;
  }
  json += '}';
  const int64_t used = (kLengthBytes + static_cast<int64_t>(json.size())) % kDataAlignment;
  if (used != 0) json.append(kDataAlignment - used, ' ');

  std::string header(kLengthBytes, '\0');
  for (int i = 0; i < kLengthBytes; ++i) header[i] = static_cast<char>(json.size() >> (8 * i));
  return header + json;
}

}  // namespace ema
