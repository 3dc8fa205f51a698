// SPDX-License-Identifier: Apache-2.0
#include "ema/tensor_spec.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/printable.h"
#include "server/base/quoted.h"

namespace ema {
namespace {

struct DtypeInfo {
  std::string_view name;
  int64_t size = 0;
  bool is_float = false;
};

// By Dtype - 1.
constexpr std::array<DtypeInfo, 10> kDtypes = {{{"float32", 4, true},
                                                {"float16", 2, true},
                                                {"bfloat16", 2, true},
                                                {"float64", 8, true},
                                                {"int8", 1, false},
                                                {"int16", 2, false},
                                                {"int32", 4, false},
                                                {"int64", 8, false},
                                                {"uint8", 1, false},
                                                {"bool", 1, false}}};

const DtypeInfo* FindInfo(Dtype dtype) {
  const int number = static_cast<int>(dtype);
  if (number < 1 || number > static_cast<int>(kDtypes.size())) return nullptr;
  return &kDtypes[number - 1];
}

absl::Status BadTensor(const TensorSpec& spec, std::string_view problem) {
  constexpr size_t kMaxCleanBytes = 128;
  const bool is_clean = spec.name.size() <= kMaxCleanBytes && IsPrintableUtf8(spec.name);
  return MakeError(
      absl::StatusCode::kInvalidArgument, ErrorReason::kBadManifest,
      absl::StrCat("tensor ", is_clean ? absl::StrCat("\"", spec.name, "\"") : Quoted(spec.name),
                   ": ", std::string(problem)));
}

absl::Status CheckName(const TensorSpec& spec, const std::string& name) {
  if (name.empty()) return BadTensor(spec, "a name is needed, such as \"layers.0.weight\"");
  if (static_cast<int64_t>(name.size()) > kMaxTensorNameBytes) {
    return BadTensor(spec, absl::StrCat("a name of ", name.size(), " bytes; at most ",
                                        kMaxTensorNameBytes, " are allowed"));
  }
  if (IsPrintableUtf8(name)) return absl::OkStatus();
  return BadTensor(spec,
                   "a name must be UTF-8 without control characters, such as "
                   "\"layers.0.weight\"");
}

}  // namespace

int64_t DtypeSize(Dtype dtype) {
  const DtypeInfo* info = FindInfo(dtype);
  return info == nullptr ? 1 : info->size;
}

bool IsFloat(Dtype dtype) {
  const DtypeInfo* info = FindInfo(dtype);
  return info != nullptr && info->is_float;
}

std::string_view DtypeName(Dtype dtype) {
  const DtypeInfo* info = FindInfo(dtype);
  return info == nullptr ? "unknown" : info->name;
}

absl::StatusOr<Dtype> ParseDtype(std::string_view name) {
  std::string names;
  for (size_t i = 0; i < kDtypes.size(); ++i) {
    if (kDtypes[i].name == name) return static_cast<Dtype>(i + 1);
    absl::StrAppend(&names, i == 0 ? "" : ", ", std::string(kDtypes[i].name));
  }
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadManifest,
                   absl::StrCat("dtype ", Quoted(name), ": must be one of ", names));
}

std::string_view WireDtypeName(WireDtype wire_dtype) {
  return wire_dtype == WireDtype::kBFloat16 ? "bfloat16" : "as pushed";
}

Dtype OnTheWire(Dtype dtype, WireDtype wire_dtype) {
  const bool is_rounded = wire_dtype == WireDtype::kBFloat16 && dtype == Dtype::kFloat32;
  return is_rounded ? Dtype::kBFloat16 : dtype;
}

std::string_view OverflowPolicyName(OverflowPolicy policy) {
  switch (policy) {
    case OverflowPolicy::kSaturate:
      return "saturate";
    case OverflowPolicy::kInfinity:
      return "inf";
    case OverflowPolicy::kError:
      break;
  }
  return "error";
}

absl::StatusOr<OverflowPolicy> ParseOverflowPolicy(std::string_view name) {
  for (const OverflowPolicy policy :
       {OverflowPolicy::kError, OverflowPolicy::kSaturate, OverflowPolicy::kInfinity}) {
    if (name == OverflowPolicyName(policy)) return policy;
  }
  return BadRequest(
      absl::StrCat("overflow: ", Quoted(name), " given, expected error, saturate or inf"));
}

std::string_view TensorActionName(TensorAction action) {
  switch (action) {
    case TensorAction::kAverage:
      return "average";
    case TensorAction::kCopy:
      return "copy";
    case TensorAction::kIgnore:
      return "ignore";
  }
  return "unknown";
}

std::optional<TensorAction> ParseTensorAction(std::string_view name) {
  for (const TensorAction action :
       {TensorAction::kAverage, TensorAction::kCopy, TensorAction::kIgnore}) {
    if (name == TensorActionName(action)) return action;
  }
  return std::nullopt;
}

absl::Status TensorSpec::Validate() const {
  EMA_RETURN_IF_ERROR(CheckName(*this, name));
  // Checkpoints are safetensors files, in whose headers this is no tensor.
  if (name == "__metadata__") return BadTensor(*this, "no tensor can have this name");
  for (const std::string& alias : aliases) EMA_RETURN_IF_ERROR(CheckName(*this, alias));
  if (FindInfo(dtype) == nullptr) {
    return BadTensor(
        *this, absl::StrCat("dtype number ", static_cast<int>(dtype), " is unknown; expected 1 to ",
                            kDtypes.size(), ", such as 1 (float32)"));
  }
  if (shape.size() > kMaxDimensions) {
    return BadTensor(*this, absl::StrCat("a shape of ", shape.size(), " dimensions; at most ",
                                         kMaxDimensions, " are allowed"));
  }
  // Empty dimensions count as 1, so that no product of some of the extents overflows either.
  int64_t bytes = DtypeSize(dtype);
  for (const int64_t extent : shape) {
    if (extent < 0) {
      return BadTensor(
          *this, absl::StrCat("extent ", extent, " in ", TypeString(), "; expected 0 or more"));
    }
    if (extent != 0 && (__builtin_mul_overflow(bytes, extent, &bytes) || bytes >> 62 != 0)) {
      return BadTensor(*this, absl::StrCat(TypeString(), " does not fit in 2^62 bytes"));
    }
  }
  return absl::OkStatus();
}

int64_t TensorSpec::element_count() const {
  int64_t count = 1;
  for (const int64_t extent : shape) {
    if (extent == 0) return 0;
    count *= extent;
  }
  return count;
}

std::string TensorSpec::TypeString() const {
  return absl::StrCat(is_buffer ? "buffer " : "", std::string(DtypeName(dtype)), "[",
                      absl::StrJoin(shape, ", "), "]");
}

}  // namespace ema
