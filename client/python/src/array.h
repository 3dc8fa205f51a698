// SPDX-License-Identifier: Apache-2.0
//
// Arrays from Python, read in place.
#ifndef EMA_CLIENT_PYTHON_SRC_ARRAY_H_
#define EMA_CLIENT_PYTHON_SRC_ARRAY_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/python/src/dlpack_exchange.h"
#include "ema/client.h"
#include "ema/manifest.h"
#include "ema/shard.h"
#include "ema/tensor_spec.h"

namespace ema::python {

// A named array, and the reference that keeps its memory.
// To be copied and destroyed with the GIL held.
struct Array {
  TensorSpec spec;  // Of the array itself.
  // The array's position in its tensor, if given. A single offset, for a tensor of several
  // dimensions: the array is a range of the tensor's row-major elements, and this is the index of
  // the first one. An array of one dimension with more offsets is a range of a box of the tensor:
  // the index of the first element in the box, then the box's offsets, then its extents.
  std::optional<std::vector<int64_t>> offsets;
  std::span<const std::byte> bytes;
  Strides strides;  // As for Run::StartPush().
  // The index of the GPU in whose memory the bytes are; negative: they are in the host's.
  int gpu = -1;
  std::shared_ptr<const void> owner;

  // Reads an object that supports DLPack or the buffer protocol; nothing is copied. `dtype`, if not
  // empty: the elements' dtype, for frameworks that cannot name it (bfloat16 as uint16).
  // `may_have_strides`: in host memory the array need not be row-major and contiguous.
  // INVALID_ARGUMENT: another object; an array without memory, or in other memory than the host's
  // and that of CUDA's GPUs; not contiguous; a dtype that the server does not keep; or not as many
  // dimensions as `offsets`. The message names the array.
  static absl::StatusOr<Array> Read(std::string_view name, nanobind::handle object,
                                    std::string_view dtype,
                                    std::optional<std::vector<int64_t>> offsets = std::nullopt,
                                    bool may_have_strides = false);
  // The result of Read() for this tensor. nullopt: only Read() can convert or reject it.
  static std::optional<Array> FromDlpack(std::string_view name,
                                         std::shared_ptr<const DlpackTensor> tensor,
                                         std::optional<std::vector<int64_t>> offsets);
  // INVALID_ARGUMENT: it is in a GPU's memory.
  absl::Status CheckOnHost() const;
};

// nullopt: none of the server's.
std::optional<Dtype> DtypeOf(nanobind::dlpack::dtype type);

// Whether elements lie one behind the other in row-major order.
bool IsContiguous(absl::Span<const int64_t> shape, absl::Span<const int64_t> strides);

struct FoundShards {
  std::vector<std::span<const std::byte>> bytes;
  std::vector<int> gpus;         // As Array::gpu.
  std::vector<Strides> strides;  // As Array::strides.
};

// The bytes of a rank's shards [begin, end), found in `arrays` by name, in the layout's order. An
// array is the whole tensor, the box or range of it that the rank holds, if it says where that lies
// (a shard is then a contiguous piece of it), or just the one shard that the rank pushes.
// INVALID_ARGUMENT, BAD_LAYOUT: lists every missing and unexpected name, every wrong dtype and
// shape; frozen shards may be missing, and are empty then. Arrays of tensors that the rank does not
// push are checked and left alone.
absl::StatusOr<FoundShards> FindShards(const Manifest& manifest, const RankLayout& layout,
                                       const std::vector<const Array*>& arrays, size_t begin,
                                       size_t end);

}  // namespace ema::python

#endif  // EMA_CLIENT_PYTHON_SRC_ARRAY_H_
