// SPDX-License-Identifier: Apache-2.0
//
// read_tensors: PyTorch's tensors as arrays, all with one call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "client/python/src/array.h"
#include "client/python/src/bind.h"
#include "client/python/src/dlpack_exchange.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: the only way to "name"_a.

namespace ema::python {
namespace {

using Offsets = std::optional<std::vector<int64_t>>;

// Reads tensors that are nothing but a dtype, a shape and memory, which is contiguous or the
// host's.
class TensorReader {
 public:
  // `are_held`: no other thread can give the tensors other memory.
  TensorReader(const nb::tuple& types, bool are_held) : types_(types), are_held_(are_held) {}

  // nullopt: it is something else, or its name is none.
  std::optional<Array> Read(nb::handle name, nb::handle tensor, Offsets offsets) {
    const nb::handle type = tensor.type();
    if (std::none_of(types_.begin(), types_.end(), [&](nb::handle t) { return type.is(t); })) {
      return std::nullopt;
    }
    Py_ssize_t length = 0;
    const char* text =
        PyUnicode_Check(name.ptr()) != 0 ? PyUnicode_AsUTF8AndSize(name.ptr(), &length) : nullptr;
    if (text == nullptr) {
      PyErr_Clear();
      return std::nullopt;
    }
    const nb::object data = are_held_ ? nb::borrow(tensor) : nb::object(tensor.attr(detach_)());
    if (nb::cast<bool>(data.attr(is_neg_)())) return std::nullopt;
    std::shared_ptr<DlpackTensor> owner(reader_.Read(data));
    if (owner == nullptr) return std::nullopt;
    return Array::FromDlpack(std::string_view(text, length), std::move(owner), std::move(offsets));
  }

 private:
  const nb::tuple types_;
  const bool are_held_;
  const nb::object detach_ = InternedName("detach");
  const nb::object is_neg_ = InternedName("is_neg");
  DlpackReader reader_;
};

// In the place of what arrays.read has to look at: None.
nb::list ReadTensors(const nb::list& names, const nb::list& tensors, std::vector<Offsets> offsets,
                     const nb::tuple& types, bool are_held) {
  TensorReader reader(types, are_held);
  nb::list arrays;
  for (size_t i = 0; i < offsets.size(); ++i) {
    std::optional<Array> array = reader.Read(names[i], tensors[i], std::move(offsets[i]));
    if (array.has_value()) {
      arrays.append(nb::cast(*std::move(array)));
    } else {
      arrays.append(nb::none());
    }
  }
  return arrays;
}

}  // namespace

void BindRead(nb::module_& module) {
  module.def("read_tensors", &ReadTensors, "names"_a, "tensors"_a, "offsets"_a, "types"_a,
             "are_held"_a);
}

}  // namespace ema::python
