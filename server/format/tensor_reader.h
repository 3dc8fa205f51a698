// SPDX-License-Identifier: Apache-2.0
//
// The tensors of one track of a checkpoint, read from its safetensors files and verified.
#ifndef EMA_SERVER_FORMAT_TENSOR_READER_H_
#define EMA_SERVER_FORMAT_TENSOR_READER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "server/format/checkpoint_files.h"
#include "server/format/file_system.h"
#include "server/format/manifest_json.h"

namespace ema {

// Called with the bytes [offset, offset + bytes.size()) of one tensor, which are valid during the
// call. An offset is a multiple of kPieceBytes. An error ends the reading.
using TensorVisitor = absl::FunctionRef<absl::Status(int64_t tensor_index, int64_t offset,
                                                     std::span<const std::byte> bytes)>;

// Returns the memory into which these bytes are read. Empty: the reader uses its own memory.
using TensorPlacer = absl::FunctionRef<std::span<std::byte>(int64_t tensor_index, int64_t offset,
                                                            int64_t length_bytes)>;

// Holds its files open, so removing them does not affect it. Thread-safe. Calls block on the disk.
class TensorReader {
 public:
  // Opens the files of `saved` in `track_path` and checks their headers: together they must have
  // each stored tensor of the track's `layout` once, in its dtype. They may have other tensors only
  // if saved.has_other_tensors. REQUIRES: `saved` has passed ReadCheckpointManifest(), or is a
  // result of MergeManifests() or PartOf(). DATA_LOSS, CHECKPOINT_CORRUPT. UNAVAILABLE: the disk
  // failed.
  static absl::StatusOr<std::unique_ptr<TensorReader>> Open(FileSystem& file_system,
                                                            const std::string& track_path,
                                                            const TensorFiles& saved,
                                                            const Manifest& manifest,
                                                            const StorageLayout& layout);

  // The index of a stored tensor's file in TensorFiles::files.
  size_t FileOf(int64_t tensor_index) const { return tensors_[tensor_index].file; }

  // Reads all tensors in the files' order. `visit` gets bytes before the checksum of their tensor
  // is verified: after an error its results must be discarded. DATA_LOSS, CHECKPOINT_CORRUPT: names
  // the tensor. UNAVAILABLE: the disk failed. Of several problems, returns the first.
  absl::Status ReadAll(TensorVisitor visit) const;
  // The same in up to `max_threads` threads, depending on the amount of work: `place` and `visit`
  // are called from all of them, in any order.
  absl::Status ReadAll(TensorPlacer place, TensorVisitor visit, int max_threads) const;

  // Reads and verifies piece number `piece`, of kPieceBytes, of a tensor. Errors as ReadAll().
  // REQUIRES: the piece exists and has bytes.size() bytes.
  absl::Status ReadPiece(int64_t tensor_index, int64_t piece, std::span<std::byte> bytes) const;

 private:
  struct Tensor {
    std::string name;
    size_t file = 0;
    int64_t offset = 0;  // In the file.
    int64_t length_bytes = 0;
    uint32_t crc32c = 0;
    std::vector<uint32_t> piece_crc32c;  // See TensorFiles.
    bool is_there = false;
  };

  TensorReader() = default;

  // Adds one file's tensors to tensors_ and order_.
  absl::Status AddFile(std::unique_ptr<RandomAccessFile> file, const TensorFile& saved,
                       bool has_other_tensors, const Manifest& manifest,
                       const StorageLayout& layout);
  // The bytes of one read.
  struct Part {
    int64_t tensor = 0;
    int64_t offset = 0;
    int64_t length_bytes = 0;
  };
  std::vector<Part> PartsOf(int64_t tensor_index) const;
  // Reads a part, and stores the checksums of its pieces at their places in `tensor_checksums`.
  // `buffer` has room for the longest part.
  absl::Status ReadPart(const Part& part, std::span<std::byte> buffer, TensorPlacer place,
                        TensorVisitor visit, std::span<uint32_t> tensor_checksums) const;
  absl::Status CheckTensor(int64_t tensor_index, std::span<const uint32_t> piece_checksums) const;

  std::vector<std::unique_ptr<RandomAccessFile>> files_;
  std::vector<Tensor> tensors_;  // In the manifest's order.
  std::vector<int64_t> order_;   // Their indices, in the files' order.
};

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_TENSOR_READER_H_
