// SPDX-License-Identifier: Apache-2.0
//
// The C half of DLPack: types that offer it (PyTorch's, since 2.10) give their arrays in a tenth of
// a microsecond, where a call of __dlpack__() takes several. The layouts are DLPack's, version 1.
#ifndef EMA_CLIENT_PYTHON_SRC_DLPACK_EXCHANGE_H_
#define EMA_CLIENT_PYTHON_SRC_DLPACK_EXCHANGE_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>

namespace ema::python {

struct DlpackVersion {
  uint32_t major;
  uint32_t minor;
};

// DLManagedTensorVersioned
struct DlpackTensor {
  static constexpr uint64_t kReadOnly = 1;

  DlpackVersion version;
  void* manager_context;
  void (*deleter)(DlpackTensor* self);
  uint64_t flags;
  nanobind::dlpack::dltensor tensor;
};

// DLPackExchangeAPI
struct DlpackExchange {
  DlpackVersion version;
  const DlpackExchange* older;
  void* allocate;
  int (*from_object)(void* object, DlpackTensor** out);
  void* to_object;
  void* from_object_unowned;
  void* current_stream;
};

// Keeps an array's memory. To be destroyed with the GIL held.
struct DlpackDeleter {
  void operator()(DlpackTensor* tensor) const {
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
  }
};
using OwnedDlpackTensor = std::unique_ptr<DlpackTensor, DlpackDeleter>;

// Reads arrays, and remembers how for the type it saw last. Needs the GIL.
class DlpackReader {
 public:
  // Null if the type of `object` has no such interface, or its array cannot be given.
  OwnedDlpackTensor Read(nanobind::handle object) {
    const nanobind::handle type = object.type();
    if (!type.is(type_)) {
      exchange_ = ExchangeOf(type);
      type_ = nanobind::borrow(type);
    }
    if (exchange_ == nullptr) return nullptr;
    DlpackTensor* tensor = nullptr;
    if (exchange_->from_object(object.ptr(), &tensor) != 0) {
      PyErr_Clear();
      return nullptr;
    }
    return OwnedDlpackTensor(tensor);
  }

 private:
  static const DlpackExchange* ExchangeOf(nanobind::handle type) {
    const nanobind::object capsule =
        nanobind::steal(PyObject_GetAttrString(type.ptr(), "__dlpack_c_exchange_api__"));
    const void* exchange = nullptr;
    if (capsule.is_valid()) {
      exchange = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    }
    PyErr_Clear();
    const auto* result = static_cast<const DlpackExchange*>(exchange);
    while (result != nullptr && result->version.major != 1) result = result->older;
    return result;
  }

  nanobind::object type_;
  const DlpackExchange* exchange_ = nullptr;  // The type's; null if it has none.
};

}  // namespace ema::python

#endif  // EMA_CLIENT_PYTHON_SRC_DLPACK_EXCHANGE_H_
