// SPDX-License-Identifier: Apache-2.0
//
// Checksums of tensors, for ema/torch.h: whether they have other values than before.
#ifndef EMA_INTERNAL_TORCH_SUMS_H_
#define EMA_INTERNAL_TORCH_SUMS_H_

#include <torch/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace ema::torch_internal {

// The sum of a tensor's words, wrapping, each times an odd weight by its place: other values,
// another sum, all but surely. An int64 where the tensor is, for which nothing waits.
inline at::Tensor WeightedSum(const at::Tensor& tensor) {
  constexpr int64_t kWords = int64_t{1} << 20;
  at::Tensor bytes = tensor.contiguous().flatten().view(at::kByte);
  if (bytes.storage_offset() % 8 != 0) bytes = bytes.clone();
  const int64_t count = bytes.numel() / 8;
  const at::Tensor words = bytes.narrow(0, 0, count * 8).view(at::kLong);
  const at::Tensor places =
      at::arange(std::min(count, kWords), at::TensorOptions(at::kLong).device(tensor.device()));
  const at::Tensor weights = (2 * places + 1) * int64_t{0x9E3779B97F4A7C1};
  at::Tensor total = bytes.narrow(0, count * 8, bytes.numel() - count * 8).sum(at::kLong);
  for (int64_t begin = 0; begin < count; begin += kWords) {
    const int64_t length = std::min(kWords, count - begin);
    total = total * 3 + (words.narrow(0, begin, length) * weights.narrow(0, 0, length)).sum();
  }
  return total;
}

// The sums of tensors that are seldom written. For one thread.
class KnownSums {
 public:
  // Of the values now, by the tensors' numbers. Reads those in which LibTorch has counted a write
  // since the last call, which have other memory, or which are new; waits for each device once.
  // Throws c10::Error.
  std::map<int64_t, uint64_t> Of(const std::map<int64_t, at::Tensor>& tensors) {
    std::map<c10::Device, std::vector<int64_t>, Before> unknown;
    std::map<int64_t, std::optional<Mark>> marks;
    std::map<int64_t, uint64_t> sums;
    for (const auto& [i, tensor] : tensors) {
      std::optional<Mark> mark = Mark::Of(tensor);
      const auto known = known_.find(i);
      if (known != known_.end() && mark.has_value() && known->second.mark == *mark) {
        sums[i] = known->second.sum;
      } else {
        unknown[tensor.device()].push_back(i);
        marks[i] = std::move(mark);
      }
    }
    for (const auto& [device, numbers] : unknown) {
      std::vector<at::Tensor> queued;
      queued.reserve(numbers.size());
      for (const int64_t i : numbers) queued.push_back(WeightedSum(tensors.at(i).detach()));
      const at::Tensor values = at::stack(queued).cpu();
      for (size_t k = 0; k < numbers.size(); ++k) {
        const int64_t i = numbers[k];
        sums[i] = static_cast<uint64_t>(values.const_data_ptr<int64_t>()[k]);
        known_.erase(i);
        if (marks[i].has_value()) known_.emplace(i, Known{*std::move(marks[i]), sums[i]});
      }
    }
    return sums;
  }

 private:
  // Is another one when the tensor has been written, or has other memory.
  struct Mark {
    // Does not keep the memory, but keeps another one from looking the same.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    std::vector<int64_t> strides;
    int64_t writes;

    // Absent: LibTorch does not count its writes.
    static std::optional<Mark> Of(const at::Tensor& tensor) {
      if (tensor.is_inference()) return std::nullopt;
      return Mark{tensor.storage().getWeakStorageImpl(), tensor.const_data_ptr(),
                  tensor.strides().vec(), tensor._version()};
    }
    bool operator==(const Mark& other) const {
      return storage == other.storage && data == other.data && strides == other.strides &&
             writes == other.writes;
    }
  };
  struct Known {
    Mark mark;
    uint64_t sum;
  };
  struct Before {
    bool operator()(c10::Device a, c10::Device b) const {
      return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
    }
  };

  std::map<int64_t, Known> known_;
};

}  // namespace ema::torch_internal

#endif  // EMA_INTERNAL_TORCH_SUMS_H_
