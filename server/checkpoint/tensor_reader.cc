// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/tensor_reader.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/checkpoint/safetensors.h"

namespace ema {
namespace {

// Read, verified and used at once; fits in most machines' last cache. Whole pieces.
constexpr int64_t kReadBytes = int64_t{4} << 20;
static_assert(kReadBytes % kPieceBytes == 0);

absl::Status InTensor(const absl::Status& status, const std::string& name) {
  return absl::IsDataLoss(status) ? WithPlace(status, absl::StrCat("tensor \"", name, "\": "))
                                  : status;
}

absl::Status WrongChecksum() { return CorruptCheckpoint("its checksum is wrong"); }

// The header of a file, whose bytes are as they were written.
absl::StatusOr<SafetensorsHeader> ReadHeader(const RandomAccessFile& file,
                                             const TensorFile& saved) {
  if (file.size_bytes() != saved.file_bytes) {
    return CorruptCheckpoint(
        absl::StrCat("it has ", file.size_bytes(), " bytes, expected ", saved.file_bytes));
  }
  absl::StatusOr<SafetensorsHeader> header = ReadSafetensorsHeader(file);
  if (absl::IsInvalidArgument(header.status())) {
    return CorruptCheckpoint(std::string(header.status().message()));
  }
  if (!header.ok()) return BlameCheckpoint(header.status());
  std::string bytes(header->header_bytes, '\0');
  if (const absl::Status status = file.Read(0, std::as_writable_bytes(std::span(bytes)));
      !status.ok()) {
    return BlameCheckpoint(status);
  }
  if (Crc32c(0, std::as_bytes(std::span(bytes))) != saved.header_crc32c) {
    return CorruptCheckpoint("the checksum of its header is wrong");
  }
  return header;
}

}  // namespace

bool HasTensors(TensorKind kind, TensorAction action) {
  return kind == TensorKind::kWeights ? action != TensorAction::kIgnore
                                      : action == TensorAction::kAverage;
}

absl::StatusOr<std::unique_ptr<TensorReader>> TensorReader::Open(
    FileSystem& file_system, const std::string& track_path, TensorKind kind,
    const TensorFiles& saved, const Manifest& manifest, absl::Span<const TensorAction> actions,
    const StorageLayout& layout) {
  std::unique_ptr<TensorReader> reader(new TensorReader);
  reader->tensors_.resize(manifest.tensor_count());
  for (const TensorFile& file : saved.files) {
    absl::StatusOr<std::unique_ptr<RandomAccessFile>> opened =
        file_system.OpenFile(JoinPath(track_path, file.name));
    if (!opened.ok()) return BlameCheckpoint(opened.status());
    const absl::Status status =
        reader->AddFile(*std::move(opened), kind, file, manifest, actions, layout);
    if (!status.ok()) return WithPlace(status, absl::StrCat("file \"", file.name, "\": "));
  }
  const auto expected = std::count_if(actions.begin(), actions.end(), [kind](TensorAction action) {
    return HasTensors(kind, action);
  });
  if (static_cast<int64_t>(reader->order_.size()) != expected) {
    return CorruptCheckpoint(
        absl::StrCat("its files have ", reader->order_.size(), " tensors, expected ", expected));
  }
  for (const int64_t i : reader->order_) {
    reader->tensors_[i].crc32c = saved.tensor_crc32c[i];
    reader->tensors_[i].piece_crc32c = saved.piece_crc32c[i];
  }
  return reader;
}

absl::Status TensorReader::AddFile(std::unique_ptr<RandomAccessFile> file, TensorKind kind,
                                   const TensorFile& saved, const Manifest& manifest,
                                   absl::Span<const TensorAction> actions,
                                   const StorageLayout& layout) {
  EMA_ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadHeader(*file, saved));
  for (const SafetensorsTensor& tensor : header.tensors) {
    const std::optional<int64_t> i = manifest.Find(tensor.spec.name);
    if (!i.has_value() || tensors_[*i].is_there || !HasTensors(kind, actions[*i]) ||
        tensor.spec.shape != manifest.tensor(*i).shape ||
        tensor.spec.dtype != layout.entry(*i).dtype) {
      return CorruptCheckpoint(absl::StrCat("tensor \"", tensor.spec.name, "\": it has ",
                                            tensor.spec.TypeString(),
                                            ", which is not the manifest's, or has it twice"));
    }
    tensors_[*i] = {.name = tensor.spec.name,
                    .file = files_.size(),
                    .offset = header.header_bytes + tensor.begin,
                    .length_bytes = tensor.end - tensor.begin,
                    .is_there = true};
    order_.push_back(*i);
  }
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

absl::Status TensorReader::ReadTensor(int64_t tensor_index, std::span<std::byte> buffer,
                                      TensorVisitor visit) const {
  const Tensor& tensor = tensors_[tensor_index];
  uint32_t crc = 0;
  for (int64_t done = 0; done < tensor.length_bytes; done += kReadBytes) {
    const std::span<std::byte> bytes =
        buffer.first(std::min(kReadBytes, tensor.length_bytes - done));
    if (const absl::Status status = files_[tensor.file]->Read(tensor.offset + done, bytes);
        !status.ok()) {
      return BlameCheckpoint(status);
    }
    for (size_t at = 0; at < bytes.size(); at += kPieceBytes) {
      const auto piece = bytes.subspan(at, std::min<size_t>(kPieceBytes, bytes.size() - at));
      const uint32_t piece_crc = Crc32c(0, piece);
      if (!tensor.piece_crc32c.empty() &&
          piece_crc != tensor.piece_crc32c[(done + at) / kPieceBytes]) {
        return WrongChecksum();
      }
      crc = Crc32cCombine(crc, piece_crc, static_cast<int64_t>(piece.size()));
    }
    EMA_RETURN_IF_ERROR(visit(tensor_index, done, bytes));
  }
  return crc == tensor.crc32c ? absl::OkStatus() : WrongChecksum();
}

absl::Status TensorReader::ReadAll(TensorVisitor visit) const {
  int64_t longest_bytes = 0;
  for (const Tensor& tensor : tensors_) {
    longest_bytes = std::max(longest_bytes, tensor.length_bytes);
  }
  std::vector<std::byte> buffer(std::min(kReadBytes, longest_bytes));
  for (const int64_t i : order_) {
    EMA_RETURN_IF_ERROR(InTensor(ReadTensor(i, buffer, visit), tensors_[i].name));
  }
  return absl::OkStatus();
}

absl::Status TensorReader::ReadPiece(int64_t tensor_index, int64_t piece, uint32_t expected_crc32c,
                                     std::span<std::byte> bytes) const {
  const Tensor& tensor = tensors_[tensor_index];
  const absl::Status status = files_[tensor.file]->Read(tensor.offset + piece * kPieceBytes, bytes);
  if (!status.ok()) return InTensor(BlameCheckpoint(status), tensor.name);
  if (Crc32c(0, bytes) != expected_crc32c) return InTensor(WrongChecksum(), tensor.name);
  return absl::OkStatus();
}

std::optional<uint32_t> TensorReader::PieceChecksum(int64_t tensor_index, int64_t piece) const {
  const Tensor& tensor = tensors_[tensor_index];
  if (tensor.length_bytes <= kPieceBytes) return tensor.crc32c;
  if (tensor.piece_crc32c.empty()) return std::nullopt;
  return tensor.piece_crc32c[piece];
}

absl::StatusOr<std::vector<uint32_t>> TensorReader::ComputePieceChecksums(
    int64_t tensor_index) const {
  const Tensor& tensor = tensors_[tensor_index];
  std::vector<uint32_t> checksums;
  std::vector<std::byte> buffer(std::min(kReadBytes, tensor.length_bytes));
  const auto take = [&checksums](int64_t, int64_t, std::span<const std::byte> bytes) {
    for (; !bytes.empty(); bytes = bytes.subspan(std::min<size_t>(kPieceBytes, bytes.size()))) {
      checksums.push_back(Crc32c(0, bytes.first(std::min<size_t>(kPieceBytes, bytes.size()))));
    }
    return absl::OkStatus();
  };
  EMA_RETURN_IF_ERROR(InTensor(ReadTensor(tensor_index, buffer, take), tensor.name));
  return checksums;
}

}  // namespace ema
