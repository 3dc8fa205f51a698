// SPDX-License-Identifier: Apache-2.0
//
// The operands of the kernels: runs of elements, and what is to be done with them.
#ifndef EMA_SERVER_KERNEL_FOLD_OP_H_
#define EMA_SERVER_KERNEL_FOLD_OP_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ema/tensor_spec.h"
#include "server/kernel/fold_element.h"

namespace ema {

// What one run of pushed elements does to one track.
struct FoldTarget {
  using Kind = FoldKind;  // fold_element.h says what each does.
  Kind kind = Kind::kCopy;
  double update_weight = 1;
  // Device memory; aligned to the stored element. `next` may be `current`: then the average is
  // updated in place.
  const std::byte* current = nullptr;
  std::byte* next = nullptr;

  // Bytes of a stored element whose source element has `source_bytes`.
  int64_t StoredBytes(int64_t source_bytes) const {
    if (kind == Kind::kCopy) return source_bytes;
    return IsFloat64(kind) ? int64_t{sizeof(double)} : int64_t{sizeof(float)};
  }
};

// One run of pushed elements and everything to be done with it, in one read of the source.
struct FoldOp {
  Dtype source_dtype = Dtype::kFloat32;
  const std::byte* source = nullptr;  // Host memory, any alignment.
  int64_t element_count = 0;          // 0 or more.
  std::span<const FoldTarget>
      targets;  // May be empty: then only the check for finite values is done.
  // The source's name in Synchronize(): what its elements belong to (such as a tensor), and the
  // number of the first one there.
  int64_t source_id = 0;
  int64_t first_element = 0;

  // True: the check for finite values covers the source's values rounded to float32.
  bool rounds_to_float32() const {
    return std::any_of(targets.begin(), targets.end(),
                       [](const FoldTarget& target) { return IsFloat32(target.kind); });
  }
};

// One run of an average's elements, and the raw values to compare it with; in device memory,
// aligned to their elements.
struct SumRun {
  const std::byte* average = nullptr;
  int64_t element_count = 0;              // 0 or more.
  const std::byte* raw = nullptr;         // Null: there are none.
  Dtype raw_dtype = Dtype::kFloat32;      // Any float.
  Dtype average_dtype = Dtype::kFloat32;  // Or kFloat64.
};

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_FOLD_OP_H_
