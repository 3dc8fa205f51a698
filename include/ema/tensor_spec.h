// SPDX-License-Identifier: Apache-2.0
//
// Element types, and the description of one tensor.
#ifndef EMA_TENSOR_SPEC_H_
#define EMA_TENSOR_SPEC_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace ema {

// Numbers are those of ema.v1.Dtype.
enum class Dtype : int {
  kFloat32 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kFloat64 = 4,
  kInt8 = 5,
  kInt16 = 6,
  kInt32 = 7,
  kInt64 = 8,
  kUInt8 = 9,
  kBool = 10,
};

// Bytes of one element: 1, 2, 4 or 8.
int64_t DtypeSize(Dtype dtype);
// Floats are averaged, all others copied.
bool IsFloat(Dtype dtype);
// "float32", "bfloat16", "bool", ...: PyTorch's and NumPy's names.
std::string_view DtypeName(Dtype dtype);
// INVALID_ARGUMENT, BAD_MANIFEST: no such name; the message lists the right ones.
absl::StatusOr<Dtype> ParseDtype(std::string_view name);
// The dtype that an average of `pushed` is kept in: float32 for floats, else the same.
Dtype AverageDtype(Dtype pushed);

// In which dtype a trainer's floats travel. Numbers are those of ema.v1.WireDtype.
enum class WireDtype : int {
  kAsPushed = 0,  // In their own.
  kBFloat16 = 1,  // float32 rounded to bfloat16, half the bytes; others in their own.
};
// "as pushed", "bfloat16".
std::string_view WireDtypeName(WireDtype wire_dtype);
// The dtype in which a tensor of `dtype` travels.
Dtype OnTheWire(Dtype dtype, WireDtype wire_dtype);

// What a track does with a tensor.
enum class TensorAction {
  kAverage,  // Kept as float32. Only for floats.
  kCopy,     // The latest weights, in the dtype that was pushed.
  kIgnore,   // The track has no such tensor.
};
// "average", "copy", "ignore".
std::string_view TensorActionName(TensorAction action);
// The one of that name; absent: there is none.
std::optional<TensorAction> ParseTensorAction(std::string_view name);

inline constexpr int kMaxRank = 8;
inline constexpr int64_t kMaxTensorNameBytes = 1024;

// One named array, row-major. A scalar has an empty shape; an extent may be 0.
struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kFloat32;
  std::vector<int64_t> shape;
  // Something that training keeps beside the parameters, such as BatchNorm's statistics: tracks may
  // treat buffers in a way of their own.
  bool is_buffer = false;
  // Other names of the same array (tied weights): it is pushed and kept once, and clients that read
  // it may give it under all of them.
  std::vector<std::string> aliases;

  // INVALID_ARGUMENT, BAD_MANIFEST: empty or long name or alias, invalid UTF-8 or a control
  // character in it, rank above kMaxRank, a negative extent, or a size in bytes that does not fit
  // in 62 bits.
  absl::Status Validate() const;

  // REQUIRES: Validate() is OK (then these cannot overflow).
  int64_t element_count() const;
  int64_t byte_count() const { return element_count() * DtypeSize(dtype); }

  // Such as "float32[64, 3, 3]"; "buffer float32[64]".
  std::string TypeString() const;

  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

}  // namespace ema

#endif  // EMA_TENSOR_SPEC_H_
