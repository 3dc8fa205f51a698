// SPDX-License-Identifier: Apache-2.0
//
// structure_of, has_structure: whether a module is made of the same parts as before.
#include <nanobind/nanobind.h>

#include <vector>

#include "absl/functional/function_ref.h"
#include "client/python/src/bind.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: the only way to "name"_a.

namespace ema::python {
namespace {

// Visits the objects of which torch modules are made: the modules and their types, names,
// parameters and buffers, what says that a buffer is not kept, and whatever may change
// state_dict(): of its hooks only which they are, not what makes them answer otherwise. Runs no
// Python code. To be used with the GIL held.
class ModuleWalk {
 public:
  // False: stop.
  using Visit = absl::FunctionRef<bool(nb::handle)>;

  // False: it was stopped, or met a module that holds its parts in another way than nn.Module.
  bool Run(nb::handle root, Visit visit) const {
    std::vector<nb::handle> waiting = {root};
    while (!waiting.empty()) {
      const nb::handle module = waiting.back();
      waiting.pop_back();
      const nb::object fields = nb::steal(PyObject_GenericGetDict(module.ptr(), nullptr));
      if (!fields.is_valid()) PyErr_Clear();
      if (!fields.is_valid() || !visit(module) || !visit(module.type()) ||
          !VisitFields(fields, visit) || !VisitModules(Find(fields, modules_), visit, waiting)) {
        return false;
      }
    }
    return true;
  }

 private:
  static nb::handle Find(nb::handle fields, const nb::object& name) {
    return PyDict_GetItemWithError(fields.ptr(), name.ptr());
  }

  bool IsPlainDict(nb::handle dict) const {
    return dict.is_valid() && (dict.type().is(plain_) || dict.type().is(ordered_));
  }

  bool VisitFields(nb::handle fields, Visit visit) const {
    const nb::handle own_state = Find(fields, state_dict_);
    if (own_state.is_valid() && !visit(own_state)) return false;
    const nb::handle not_kept = Find(fields, not_kept_);
    if (!not_kept.is_valid() || !PyAnySet_Check(not_kept.ptr())) return false;
    return VisitDict(Find(fields, state_hooks_), nb::handle(), visit) &&
           VisitDict(Find(fields, state_pre_hooks_), nb::handle(), visit) &&
           VisitDict(Find(fields, parameters_), nb::handle(), visit) &&
           VisitDict(Find(fields, buffers_), not_kept, visit);
  }

  // `not_kept`: names that are told from others.
  bool VisitDict(nb::handle dict, nb::handle not_kept, Visit visit) const {
    if (!IsPlainDict(dict)) return false;
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t place = 0; PyDict_Next(dict.ptr(), &place, &name, &value) != 0;) {
      if (!visit(name) || !visit(value)) return false;
      if (not_kept.is_valid() && PySet_Contains(not_kept.ptr(), name) == 1 && !visit(not_kept)) {
        return false;
      }
    }
    // Where one dict ends and the next begins.
    return visit(nb::none());
  }

  bool VisitModules(nb::handle dict, Visit visit, std::vector<nb::handle>& waiting) const {
    if (!VisitDict(dict, nb::handle(), visit)) return false;
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t place = 0; PyDict_Next(dict.ptr(), &place, &name, &value) != 0;) {
      if (value != Py_None) waiting.emplace_back(value);
    }
    return true;
  }

  const nb::object plain_ = nb::borrow(reinterpret_cast<PyObject*>(&PyDict_Type));
  const nb::object ordered_ = nb::module_::import_("collections").attr("OrderedDict");
  const nb::object parameters_ = InternedName("_parameters");
  const nb::object buffers_ = InternedName("_buffers");
  const nb::object modules_ = InternedName("_modules");
  const nb::object not_kept_ = InternedName("_non_persistent_buffers_set");
  const nb::object state_dict_ = InternedName("state_dict");
  const nb::object state_hooks_ = InternedName("_state_dict_hooks");
  const nb::object state_pre_hooks_ = InternedName("_state_dict_pre_hooks");
};

// None: it has a module that holds its parts in a way of its own.
nb::object StructureOf(nb::handle module) {
  nb::list parts;
  const bool is_whole = ModuleWalk().Run(module, [&](nb::handle part) {
    parts.append(part);
    return true;
  });
  if (!is_whole) return nb::none();
  return parts;
}

bool HasStructure(nb::handle module, const nb::list& parts) {
  Py_ssize_t next = 0;
  const Py_ssize_t count = PyList_Size(parts.ptr());
  const bool is_same = ModuleWalk().Run(module, [&](nb::handle part) {
    return next < count && part.is(PyList_GetItem(parts.ptr(), next++));
  });
  return is_same && next == count;
}

}  // namespace

void BindStructure(nb::module_& module) {
  // The list keeps the parts, or another one might take the place of one that is gone.
  module.def("structure_of", &StructureOf, "module"_a);
  module.def("has_structure", &HasStructure, "module"_a, "structure"_a);
}

}  // namespace ema::python
