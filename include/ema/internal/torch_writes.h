// SPDX-License-Identifier: Apache-2.0
//
// Detects writes to tensors, for ema/torch.h.
#ifndef EMA_INTERNAL_TORCH_WRITES_H_
#define EMA_INTERNAL_TORCH_WRITES_H_

#include <torch/types.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace ema::torch_internal {

// Records LibTorch's write counters of some tensors, and the places of their memory. LibTorch
// counts no writes through data_ptr(), and none to inference tensors. For one thread.
class WriteMarks {
 public:
  // True if one of `tensors` was written, or got other memory, since the last call. Every call must
  // pass as many tensors, in the same order. False in the first call.
  bool HaveChanged(const std::vector<at::Tensor>& tensors) {
    std::vector<Mark> marks;
    marks.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) {
      marks.push_back({tensor.storage().getWeakStorageImpl(), tensor.const_data_ptr(),
                       tensor.strides().vec(), tensor.is_inference() ? 0 : tensor._version()});
    }
    const bool have_changed = !marks_.empty() && marks != marks_;
    marks_ = std::move(marks);
    return have_changed;
  }

 private:
  struct Mark {
    // Weak, so that the memory can be freed; another storage can never equal it.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    std::vector<int64_t> strides;
    int64_t writes;

    bool operator==(const Mark& other) const {
      return storage == other.storage && data == other.data && strides == other.strides &&
             writes == other.writes;
    }
  };

  std::vector<Mark> marks_;
};

}  // namespace ema::torch_internal

#endif  // EMA_INTERNAL_TORCH_WRITES_H_
