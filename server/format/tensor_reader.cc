// SPDX-License-Identifier: Apache-2.0
#include "server/format/tensor_reader.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/format/safetensors.h"

namespace ema {
namespace {

// Read, verified and used at once; fits in most machines' last cache. Whole pieces.
constexpr int64_t kReadBytes = int64_t{4} << 20;
static_assert(kReadBytes % kPieceBytes == 0);

// So much work is worth a thread.
constexpr size_t kPartsPerThread = 8;

int64_t PieceCount(int64_t length_bytes) { return (length_bytes + kPieceBytes - 1) / kPieceBytes; }

absl::Status InTensor(const absl::Status& status, const std::string& name) {
  return absl::IsDataLoss(status) ? WithPrefix(status, absl::StrCat("tensor \"", name, "\": "))
                                  : status;
}

// A TensorPlacer without a place.
constexpr auto kNowhere = [](int64_t, int64_t, int64_t) { return std::span<std::byte>(); };

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
  if (!header.ok()) return ToCorruptionError(header.status());
  std::string bytes(header->header_bytes, '\0');
  if (const absl::Status status = file.Read(0, std::as_writable_bytes(std::span(bytes)));
      !status.ok()) {
    return ToCorruptionError(status);
  }
  if (Crc32c(0, std::as_bytes(std::span(bytes))) != saved.header_crc32c) {
    return CorruptCheckpoint("the checksum of its header is wrong");
  }
  return header;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TensorReader>> TensorReader::Open(FileSystem& file_system,
                                                                 const std::string& track_path,
                                                                 const TensorFiles& saved,
                                                                 const Manifest& manifest,
                                                                 const StorageLayout& layout) {
  std::unique_ptr<TensorReader> reader(new TensorReader);
  reader->tensors_.resize(manifest.tensor_count());
  for (const TensorFile& file : saved.files) {
    absl::StatusOr<std::unique_ptr<RandomAccessFile>> opened =
        file_system.OpenFile(JoinPath(track_path, file.name));
    if (!opened.ok()) return ToCorruptionError(opened.status());
    const absl::Status status =
        reader->AddFile(*std::move(opened), file, saved.has_other_tensors, manifest, layout);
    if (!status.ok()) return WithPrefix(status, absl::StrCat("file \"", file.name, "\": "));
  }
  const auto expected = absl::c_count_if(
      layout.entries(), [](const StorageLayout::Entry& entry) { return entry.is_stored; });
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

absl::Status TensorReader::AddFile(std::unique_ptr<RandomAccessFile> file, const TensorFile& saved,
                                   bool has_other_tensors, const Manifest& manifest,
                                   const StorageLayout& layout) {
  EMA_ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadHeader(*file, saved));
  for (const SafetensorsTensor& tensor : header.tensors) {
    const std::optional<int64_t> i = manifest.Find(tensor.spec.name);
    if (!i.has_value() && has_other_tensors) continue;
    if (!i.has_value() || tensors_[*i].is_there || !layout.entry(*i).is_stored ||
        tensor.spec.shape != manifest.tensor(*i).shape ||
        tensor.spec.dtype != layout.entry(*i).dtype) {
      return CorruptCheckpoint(absl::StrCat("tensor \"", tensor.spec.name, "\": its type ",
                                            tensor.spec.TypeString(),
                                            " is not that of the manifest, or it is there twice"));
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

std::vector<TensorReader::Part> TensorReader::PartsOf(int64_t tensor_index) const {
  const int64_t length_bytes = tensors_[tensor_index].length_bytes;
  std::vector<Part> parts;
  for (int64_t done = 0; done < length_bytes; done += kReadBytes) {
    parts.push_back({tensor_index, done, std::min(kReadBytes, length_bytes - done)});
  }
  return parts;
}

absl::Status TensorReader::ReadPart(const Part& part, std::span<std::byte> buffer,
                                    TensorPlacer place, TensorVisitor visit,
                                    std::span<uint32_t> tensor_checksums) const {
  const Tensor& tensor = tensors_[part.tensor];
  std::span<std::byte> bytes = place(part.tensor, part.offset, part.length_bytes);
  if (bytes.empty()) bytes = buffer.first(part.length_bytes);
  if (const absl::Status status = files_[tensor.file]->Read(tensor.offset + part.offset, bytes);
      !status.ok()) {
    return ToCorruptionError(status);
  }
  int64_t piece = part.offset / kPieceBytes;
  for (size_t at = 0; at < bytes.size(); at += kPieceBytes, ++piece) {
    const uint32_t crc =
        Crc32c(0, bytes.subspan(at, std::min<size_t>(kPieceBytes, bytes.size() - at)));
    if (!tensor.piece_crc32c.empty() && crc != tensor.piece_crc32c[piece]) return WrongChecksum();
    tensor_checksums[piece] = crc;
  }
  return visit(part.tensor, part.offset, bytes);
}

absl::Status TensorReader::CheckTensor(int64_t tensor_index,
                                       std::span<const uint32_t> piece_checksums) const {
  const Tensor& tensor = tensors_[tensor_index];
  uint32_t crc = 0;
  int64_t left_bytes = tensor.length_bytes;
  for (const uint32_t piece_crc : piece_checksums) {
    crc = Crc32cCombine(crc, piece_crc, std::min<int64_t>(kPieceBytes, left_bytes));
    left_bytes -= kPieceBytes;
  }
  return crc == tensor.crc32c ? absl::OkStatus() : WrongChecksum();
}

absl::Status TensorReader::ReadAll(TensorVisitor visit) const {
  return ReadAll(kNowhere, visit, /*max_threads=*/1);
}

absl::Status TensorReader::ReadAll(TensorPlacer place, TensorVisitor visit, int max_threads) const {
  std::vector<Part> parts;
  std::vector<std::vector<uint32_t>> checksums(tensors_.size());
  int64_t longest_bytes = 0;
  for (const int64_t i : order_) {
    checksums[i].resize(PieceCount(tensors_[i].length_bytes));
    for (const Part& part : PartsOf(i)) parts.push_back(part);
    longest_bytes = std::max(longest_bytes, std::min(kReadBytes, tensors_[i].length_bytes));
  }
  // Each thread takes the part that is next in the files, so that the system can read ahead.
  std::atomic<size_t> next = 0;
  std::atomic<size_t> first_bad = parts.size();
  std::vector<absl::Status> problems(parts.size());
  const auto work = [&] {
    std::vector<std::byte> buffer;
    for (size_t i = next++; i < first_bad; i = next++) {
      problems[i] = CatchExceptions([&] {
        buffer.resize(longest_bytes);
        return ReadPart(parts[i], buffer, place, visit, checksums[parts[i].tensor]);
      });
      for (size_t bad = first_bad; !problems[i].ok() && i < bad;) {
        first_bad.compare_exchange_weak(bad, i);
      }
    }
  };
  {
    const auto work_count = static_cast<int>(parts.size() / kPartsPerThread);
    std::vector<std::jthread> threads;
    for (int i = 1; i < std::min(max_threads, work_count); ++i) threads.emplace_back(work);
    work();
  }
  // A tensor is judged as a whole when all before what was bad has been.
  const int64_t bad_tensor = first_bad < parts.size() ? parts[first_bad].tensor : -1;
  for (const int64_t i : order_) {
    const absl::Status status =
        i == bad_tensor ? problems[first_bad] : CheckTensor(i, checksums[i]);
    EMA_RETURN_IF_ERROR(InTensor(status, tensors_[i].name));
  }
  return absl::OkStatus();
}

absl::Status TensorReader::ReadPiece(int64_t tensor_index, int64_t piece,
                                     std::span<std::byte> bytes) const {
  const Tensor& tensor = tensors_[tensor_index];
  const uint32_t expected =
      tensor.piece_crc32c.empty() ? tensor.crc32c : tensor.piece_crc32c[piece];
  const absl::Status status = files_[tensor.file]->Read(tensor.offset + piece * kPieceBytes, bytes);
  if (!status.ok()) return InTensor(ToCorruptionError(status), tensor.name);
  if (Crc32c(0, bytes) != expected) return InTensor(WrongChecksum(), tensor.name);
  return absl::OkStatus();
}

}  // namespace ema
