// SPDX-License-Identifier: Apache-2.0
//
// Floats from one dtype to another, in host memory.
#ifndef EMA_SERVER_KERNEL_CAST_H_
#define EMA_SERVER_KERNEL_CAST_H_

#include <cstddef>
#include <cstdint>

#include "ema/tensor_spec.h"
#include "server/kernel/cast_element.h"

namespace ema {

// True: CastOnCpu() can cast to `dtype`.
inline bool IsCastTarget(Dtype dtype) {
  return dtype == Dtype::kFloat32 || dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16;
}

// Casts `element_count` floats, with the widest instructions the processor has; float64 by way of
// float32. Neither side need be aligned, and they do not overlap. The same dtype is a copy.
// REQUIRES: IsFloat(from_dtype), IsCastTarget(to_dtype).
void CastOnCpu(Dtype from_dtype, const std::byte* from, Dtype to_dtype, std::byte* to,
               int64_t element_count);

// True: a finite value of `from_dtype` may be too large for `to_dtype`, and becomes infinite.
bool CanOverflow(Dtype from_dtype, Dtype to_dtype);
// The first element from `begin` on that is infinite; `element_count`: there is none. REQUIRES:
// IsCastTarget(dtype).
int64_t FindInfinity(Dtype dtype, const std::byte* elements, int64_t begin, int64_t element_count);
// The largest finite value. REQUIRES: IsCastTarget(dtype).
double LargestValue(Dtype dtype);
// Element `i`, exactly. REQUIRES: IsFloat(dtype).
double ValueAt(Dtype dtype, const std::byte* elements, int64_t i);

// CastOnCpu(), one element at a time by the definitions: the reference for tests.
void CastScalar(Dtype from_dtype, const std::byte* from, Dtype to_dtype, std::byte* to,
                int64_t element_count);

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_CAST_H_
