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
#include "absl/types/span.h"
#include "ema/manifest.h"
#include "server/format/checkpoint_files.h"
#include "server/format/file_system.h"
#include "server/format/manifest_json.h"

namespace ema {

// True if the files of `kind` have the tensors with which a track does this.
bool HasTensors(TensorKind kind, TensorAction action);

// Told of the bytes [offset, offset + bytes.size()) of one tensor; the memory is used again after.
// An offset is a multiple of kPieceBytes. An error ends the reading.
using TensorVisitor = absl::FunctionRef<absl::Status(int64_t tensor_index, int64_t offset,
                                                     std::span<const std::byte> bytes)>;

// Says where such bytes are to be read to. Empty: into memory of the reader's own.
using TensorPlacer = absl::FunctionRef<std::span<std::byte>(int64_t tensor_index, int64_t offset,
                                                            int64_t length_bytes)>;

// Holds its files open: removing them does not hinder it. Thread-safe. Calls block on the disk.
class TensorReader {
 public:
  // Opens the files of `saved` in `track_path` and checks their headers: together they have every
  // tensor that they should, once, in the track's dtypes. `actions`, `layout`: of the track.
  // REQUIRES: `saved` has passed ReadCheckpointManifest(). DATA_LOSS, CHECKPOINT_CORRUPT.
  // UNAVAILABLE: the disk failed.
  static absl::StatusOr<std::unique_ptr<TensorReader>> Open(
      FileSystem& file_system, const std::string& track_path, TensorKind kind,
      const TensorFiles& saved, const Manifest& manifest, absl::Span<const TensorAction> actions,
      const StorageLayout& layout);

  // All tensors, as they lie in the files. `visit` sees bytes before the checksum of their tensor
  // is known: what it made of them is to be given up after an error. DATA_LOSS, CHECKPOINT_CORRUPT:
  // names the tensor. UNAVAILABLE: the disk failed. Of several problems it is the first.
  absl::Status ReadAll(TensorVisitor visit) const;
  // The same in up to `max_threads` threads, as many as there is work for: `place` and `visit` are
  // called from all of them, in any order.
  absl::Status ReadAll(TensorPlacer place, TensorVisitor visit, int max_threads) const;

  // The `piece`-th kPieceBytes of a tensor, verified. Errors as ReadAll(). REQUIRES: the piece is
  // there, and `bytes` is as long as it.
  absl::Status ReadPiece(int64_t tensor_index, int64_t piece, std::span<std::byte> bytes) const;

 private:
  struct Tensor {
    std::string name;
    size_t file = 0;
    int64_t offset = 0;  // In the file.
    int64_t length_bytes = 0;
    uint32_t crc32c = 0;
    std::vector<uint32_t> piece_crc32c;  // As in TensorFiles.
    bool is_there = false;
  };

  TensorReader() = default;

  // Takes one file's tensors into tensors_ and order_.
  absl::Status AddFile(std::unique_ptr<RandomAccessFile> file, TensorKind kind,
                       const TensorFile& saved, const Manifest& manifest,
                       absl::Span<const TensorAction> actions, const StorageLayout& layout);
  // What is read at once.
  struct Part {
    int64_t tensor = 0;
    int64_t offset = 0;
    int64_t length_bytes = 0;
  };
  std::vector<Part> PartsOf(int64_t tensor_index) const;
  // Puts the checksums of the part's pieces in their places among the tensor's. `buffer`: as long
  // as a part may be.
  absl::Status ReadPart(const Part& part, std::span<std::byte> buffer, TensorPlacer place,
                        TensorVisitor visit, std::span<uint32_t> tensor_checksums) const;
  absl::Status CheckTensor(int64_t tensor_index, std::span<const uint32_t> piece_checksums) const;

  std::vector<std::unique_ptr<RandomAccessFile>> files_;
  std::vector<Tensor> tensors_;  // As the manifest's.
  std::vector<int64_t> order_;   // Indices, as they lie in the files.
};

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_TENSOR_READER_H_
