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
// INVALID_ARGUMENT, BAD_MANIFEST: no such name; the message lists the valid ones.
absl::StatusOr<Dtype> ParseDtype(std::string_view name);

// The dtype in which a trainer's floats are sent. Numbers are those of ema.v1.WireDtype.
enum class WireDtype : int {
  kAsPushed = 0,  // Their own dtype.
  kBFloat16 = 1,  // float32 is rounded to bfloat16, half the bytes; others are unchanged.
};
// "as pushed", "bfloat16".
std::string_view WireDtypeName(WireDtype wire_dtype);
// The dtype in which a tensor of `dtype` is sent.
Dtype OnTheWire(Dtype dtype, WireDtype wire_dtype);

// What a reader gets for a finite value that is too large for the dtype to which it is cast.
// Numbers are those of ema.v1.OverflowPolicy.
enum class OverflowPolicy : int {
  kError = 0,     // The pull fails.
  kSaturate = 1,  // The largest finite value of the dtype, with the value's sign.
  kInfinity = 2,
};
// "error", "saturate", "inf".
std::string_view OverflowPolicyName(OverflowPolicy policy);
// INVALID_ARGUMENT, BAD_REQUEST: no such name; the message lists the valid ones.
absl::StatusOr<OverflowPolicy> ParseOverflowPolicy(std::string_view name);

// What a track does with a tensor.
enum class TensorAction {
  kAverage,  // Kept in the track's dtype. Only for floats.
  kCopy,     // The latest weights, in the dtype that was pushed.
  kIgnore,   // The track has no such tensor.
};
// "average", "copy", "ignore".
std::string_view TensorActionName(TensorAction action);
// The action of that name; absent: there is none.
std::optional<TensorAction> ParseTensorAction(std::string_view name);

inline constexpr int kMaxDimensions = 8;
inline constexpr int64_t kMaxTensorNameBytes = 1024;

// One named array, row-major. A scalar has an empty shape; an extent may be 0.
struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kFloat32;
  std::vector<int64_t> shape;
  // A value that training keeps beside the parameters, such as BatchNorm's statistics; a track has
  // its own action for buffers (TrackConfig::buffers).
  bool is_buffer = false;
  // Other names of the same array (tied weights): it is pushed and kept once, and a client may
  // return it under all of its names.
  std::vector<std::string> aliases;

  // INVALID_ARGUMENT, BAD_MANIFEST: a name or alias that is empty, too long, not UTF-8 or has a
  // control character; the name "__metadata__"; more than kMaxDimensions dimensions; a negative
  // extent; or a size in bytes that does not fit in 62 bits.
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
