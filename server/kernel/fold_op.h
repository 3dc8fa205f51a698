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

// What one run of pushed elements does to one track. A mean of n weights has n - 1 targets of the
// same kind, one after the other, whose `current` are the earlier weights, the oldest first. Only
// the first of them has `next`.
struct FoldTarget {
  using Kind = FoldKind;  // fold_element.h says what each does.
  Kind kind = Kind::kCopy;
  double update_weight = 1;
  // Device memory; aligned to the stored element. `next` may be `current`: then the average is
  // updated in place.
  const std::byte* current = nullptr;
  std::byte* next = nullptr;

  // Whether it only adds an earlier weight to the mean of a target before it.
  bool is_earlier_weight() const { return next == nullptr; }
  // Bytes of a stored element whose source element has `source_bytes`.
  int64_t StoredBytes(int64_t source_bytes) const {
    if (kind == Kind::kCopy) return source_bytes;
    return IsFloat64(kind) ? int64_t{sizeof(double)} : int64_t{sizeof(float)};
  }
};

// The targets of the mean that `targets` begin with.
inline std::span<const FoldTarget> TargetsOfMean(std::span<const FoldTarget> targets) {
  const auto end = std::find_if(targets.begin() + 1, targets.end(), [](const FoldTarget& target) {
    return !target.is_earlier_weight();
  });
  return targets.first(static_cast<size_t>(end - targets.begin()));
}

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
