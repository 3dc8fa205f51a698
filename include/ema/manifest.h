// SPDX-License-Identifier: Apache-2.0
//
// The ordered tensors of a model, and the layout of their bytes.
#ifndef EMA_MANIFEST_H_
#define EMA_MANIFEST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ema/tensor_spec.h"

namespace ema {

inline constexpr int64_t kMaxTensorCount = 200'000;

// INVALID_ARGUMENT, BAD_NAME: `name` is not [A-Za-z0-9][A-Za-z0-9._-]{0,127}. The message starts
// with `what` ("model", "track").
absl::Status ValidateName(std::string_view what, std::string_view name);

// Ordered tensor specs with unique names. A value; immutable once made; safe to read from any
// thread.
class Manifest {
 public:
  Manifest() = default;

  // INVALID_ARGUMENT, BAD_MANIFEST: no tensors or more than kMaxTensorCount.
  static absl::Status CheckCount(int64_t tensor_count);
  // INVALID_ARGUMENT, BAD_MANIFEST: a count that CheckCount() rejects, a bad spec, a name or alias
  // that occurs twice, or more than 2^62 bytes in total. The message names the tensor.
  static absl::StatusOr<Manifest> Create(std::vector<TensorSpec> tensors);

  absl::Span<const TensorSpec> tensors() const { return tensors_; }
  int64_t tensor_count() const { return static_cast<int64_t>(tensors_.size()); }
  const TensorSpec& tensor(int64_t index) const { return tensors_[index]; }
  std::optional<int64_t> Find(std::string_view name) const;
  // The tensor that has this alias.
  std::optional<int64_t> FindAlias(std::string_view alias) const;

  // Sum of the tensors' bytes in the dtypes that are pushed.
  int64_t total_bytes() const { return total_bytes_; }
  // Approximate size in host memory.
  int64_t memory_bytes() const;
  // CRC32C over, per tensor: name, a zero byte, dtype number (plus 128 for a buffer) and number of
  // dimensions as one byte each, extents as little-endian int64; per alias: a byte 1, name, a zero
  // byte. Equal manifests have equal digests.
  int64_t digest() const { return digest_; }

  // Describes the difference: names that only one of the two has, and tensors that differ; the
  // first five of each kind, and the number of others. Empty if they are equal.
  std::string DifferenceFrom(const Manifest& there) const;

  friend bool operator==(const Manifest& a, const Manifest& b) { return a.tensors_ == b.tensors_; }

 private:
  std::vector<TensorSpec> tensors_;
  absl::flat_hash_map<std::string, int64_t> index_;
  absl::flat_hash_map<std::string, int64_t> alias_index_;
  int64_t total_bytes_ = 0;
  int64_t digest_ = 0;
};

// Tensors with at least this many stored bytes lie in blocks of their own.
inline constexpr int64_t kLargeTensorBytes = int64_t{2} << 20;  // A huge page.

// The offsets of tensors that lie end to end in the dtypes in which they are stored. Each tensor
// starts at the next multiple of its element size; a large one, and the one after it, start at the
// next multiple of 64. Pulled bytes and the storage of tracks have this layout. A pull may omit
// tensors, and parts of a tensor.
class StorageLayout {
 public:
  struct Entry {
    Dtype dtype = Dtype::kFloat32;
    int64_t offset = 0;  // Start in bytes.
    int64_t length_bytes = 0;
    bool is_stored = true;  // False: an ignored tensor, with length 0.
  };

  StorageLayout() = default;
  // Copied tensors have the manifest's dtypes, averaged ones `average_dtype` (TrackConfig::dtype).
  // `actions`: one for each tensor.
  StorageLayout(const Manifest& manifest, absl::Span<const TensorAction> actions,
                Dtype average_dtype);

  // Adds a tensor at the end. REQUIRES: the sum of all bytes does not overflow.
  void Append(Dtype dtype, int64_t length_bytes);

  const Entry& entry(int64_t tensor_index) const { return entries_[tensor_index]; }
  absl::Span<const Entry> entries() const { return entries_; }
  int64_t total_bytes() const { return total_bytes_; }

 private:
  std::vector<Entry> entries_;
  int64_t total_bytes_ = 0;
  bool is_after_large_ = false;
};

}  // namespace ema

#endif  // EMA_MANIFEST_H_
