// SPDX-License-Identifier: Apache-2.0
//
// sample_words, write_counts, storage_ends: where tensors lie, and whether somebody has written
// there, all but surely, at little cost.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "client/python/src/bind.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: the only way to "name"_a.

namespace ema::python {
namespace {

struct Place {
  const char* begin = nullptr;
  int64_t size_bytes = 0;
};

// Of 64 words that are spread evenly, the first and the last ones among them: all there are in up
// to 512 bytes.
uint64_t SampleOf(const Place& place) {
  if (place.size_bytes <= 0) return 0;
  constexpr int64_t kWords = 64;
  constexpr int64_t kWordBytes = 8;
  const auto word_bytes = static_cast<size_t>(std::min(kWordBytes, place.size_bytes));
  const int64_t last = std::max<int64_t>(0, place.size_bytes - kWordBytes);
  uint64_t sum = 0;
  for (int64_t i = 0; i < kWords; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, place.begin + last * i / (kWords - 1), word_bytes);
    // Odd, so that no bit is lost.
    sum = (sum ^ word) * 0x9E3779B97F4A7C15U;
    sum ^= sum >> 32U;
  }
  return sum;
}

// Where torch tensors lie.
class Finder {
 public:
  // Of the words of one that is in the host's memory, without gaps, as they are now: share_memory
  // and resize_ give the storage itself other memory, or less.
  Place Words(nb::handle tensor) const {
    if (!nb::cast<bool>(tensor.attr(is_cpu_)) || !IsDense(tensor)) return {};
    const auto size_bytes = nb::cast<int64_t>(tensor.attr(nbytes_));
    const auto first_element = nb::cast<int64_t>(tensor.attr(storage_offset_)());
    const auto element_bytes = nb::cast<int64_t>(tensor.attr(element_size_)());
    const nb::object storage = tensor.attr(untyped_storage_)();
    if (nb::cast<int64_t>(storage.attr(nbytes_)()) < first_element * element_bytes + size_bytes) {
      return {};
    }
    // A wrapper of other tensors, which the parameter has become, has no address.
    const char* const begin = Address(tensor);
    if (begin == nullptr) return {};
    return {begin, size_bytes};
  }

  // Of its storage. Nothing: it is in other memory than a push reads in place, or has none.
  Place Storage(nb::handle tensor, bool reads_cuda) const {
    if (!nb::cast<bool>(tensor.attr(is_cpu_)) &&
        !(reads_cuda && nb::cast<bool>(tensor.attr(is_cuda_)))) {
      return {};
    }
    if (nb::cast<bool>(tensor.attr(is_sparse_)) || nb::cast<bool>(tensor.attr(is_sparse_csr_)) ||
        Address(tensor) == nullptr) {
      return {};
    }
    const nb::object storage = tensor.attr(untyped_storage_)();
    return {Address(storage), nb::cast<int64_t>(storage.attr(nbytes_)())};
  }

 private:
  const char* Address(nb::handle of) const {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): Python has no pointers.
    return reinterpret_cast<const char*>(nb::cast<uintptr_t>(of.attr(data_ptr_)()));
  }

  bool IsDense(nb::handle tensor) const {
    if (nb::cast<bool>(tensor.attr(is_contiguous_)())) return true;
    const auto shape = nb::cast<std::vector<int64_t>>(tensor.attr(shape_));
    const auto strides = nb::cast<std::vector<int64_t>>(tensor.attr(stride_)());
    int64_t last = 0;
    int64_t count = 1;
    for (size_t i = 0; i < shape.size(); ++i) {
      last += (shape[i] - 1) * strides[i];
      count *= shape[i];
    }
    return last == count - 1;
  }

  const nb::object data_ptr_ = InternedName("data_ptr");
  const nb::object element_size_ = InternedName("element_size");
  const nb::object is_contiguous_ = InternedName("is_contiguous");
  const nb::object is_cpu_ = InternedName("is_cpu");
  const nb::object is_cuda_ = InternedName("is_cuda");
  const nb::object is_sparse_ = InternedName("is_sparse");
  const nb::object is_sparse_csr_ = InternedName("is_sparse_csr");
  const nb::object nbytes_ = InternedName("nbytes");  // Of a storage, a method.
  const nb::object shape_ = InternedName("shape");
  const nb::object storage_offset_ = InternedName("storage_offset");
  const nb::object stride_ = InternedName("stride");
  const nb::object untyped_storage_ = InternedName("untyped_storage");
};

std::vector<uint64_t> SampleWords(const nb::list& tensors) {
  const Finder finder;
  std::vector<uint64_t> sums;
  sums.reserve(tensors.size());
  for (const nb::handle tensor : tensors) sums.push_back(SampleOf(finder.Words(tensor)));
  return sums;
}

// Addresses of the first byte of each storage, and of the one behind its last.
std::vector<uintptr_t> StorageEnds(const nb::list& tensors, bool reads_cuda) {
  const Finder finder;
  std::vector<uintptr_t> ends;
  ends.reserve(2 * tensors.size());
  for (const nb::handle tensor : tensors) {
    const Place place = finder.Storage(tensor, reads_cuda);
    if (place.begin == nullptr) continue;
    ends.push_back(reinterpret_cast<uintptr_t>(place.begin));
    ends.push_back(ends.back() + place.size_bytes);
  }
  return ends;
}

// `dtensor`: the type, or None.
nb::list WriteCounts(const nb::list& tensors, nb::handle dtensor) {
  const nb::object version = InternedName("_version");
  const nb::object local = InternedName("_local_tensor");
  nb::list counts;
  for (const nb::handle tensor : tensors) {
    // PyTorch does not count what is written to tensors that are made in inference mode.
    nb::object count = nb::steal(PyObject_GetAttr(tensor.ptr(), version.ptr()));
    if (!count.is_valid()) {
      if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw nb::python_error();
      PyErr_Clear();
      count = nb::none();
    } else if (!dtensor.is_none() && nb::isinstance(tensor, dtensor)) {
      // Each operation counts in one of the two.
      count = count + tensor.attr(local).attr(version);
    }
    counts.append(count);
  }
  return counts;
}

}  // namespace

void BindSample(nb::module_& module) {
  module.def("sample_words", &SampleWords, "tensors"_a);
  module.def("storage_ends", &StorageEnds, "tensors"_a, "reads_cuda"_a);
  module.def("write_counts", &WriteCounts, "tensors"_a, "dtensor"_a.none());
}

}  // namespace ema::python
