// SPDX-License-Identifier: Apache-2.0
//
// The operands of the kernels: runs of elements, and what is to be done with them.
#ifndef EMA_SERVER_KERNEL_FOLD_OP_H_
#define EMA_SERVER_KERNEL_FOLD_OP_H_

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
  // Device memory; aligned to the stored element. `next` may be `current`, and `next_low`
  // `current_low`: then the average is updated in place.
  const std::byte* current = nullptr;
  std::byte* next = nullptr;
  // The low parts; only for the compensated kinds.
  const std::byte* current_low = nullptr;
  std::byte* next_low = nullptr;

  // Bytes of a stored element whose source element has `source_bytes`.
  int64_t StoredBytes(int64_t source_bytes) const {
    return kind == Kind::kCopy ? source_bytes : int64_t{sizeof(float)};
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
};

// One run of an average's elements, and the raw values to compare it with; in device memory,
// aligned to their elements.
struct SumRun {
  const std::byte* average = nullptr;  // float32s.
  int64_t element_count = 0;           // 0 or more.
  const std::byte* raw = nullptr;      // Null: there are none.
  Dtype raw_dtype = Dtype::kFloat32;   // Any float.
};

}  // namespace ema

#endif  // EMA_SERVER_KERNEL_FOLD_OP_H_
