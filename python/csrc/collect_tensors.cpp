#include "python/csrc/collect_tensors.h"

#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/TensorWrapper.h>
#include <torch/csrc/autograd/python_variable.h>

namespace flatshard::python {
namespace {

bool is_plain(py::handle object) {
  PyObject* p = object.ptr();
  return p == Py_None || PyBool_Check(p) || PyLong_Check(p) ||
         PyFloat_Check(p) || PyUnicode_Check(p) || PyBytes_Check(p);
}

// Imported once; never freed, since the interpreter may be gone by then.
const py::object& pytree() {
  static const auto* module =
      new py::object(py::module_::import("torch.utils._pytree"));
  return *module;
}

// Inside a transform of torch.func a tensor wraps another. The other one has
// the graph of what is outside.
void add_tensor(const at::Tensor& tensor, nn::TensorList& out) {
  out.push_back(tensor);
  if (auto* const wrapper = at::functorch::maybeGetTensorWrapper(tensor)) {
    add_tensor(wrapper->value(), out);
  } else if (auto* const batched = at::functorch::maybeGetBatchedImpl(tensor)) {
    add_tensor(batched->value(), out);
  }
}

}  // namespace

void collect_tensors(
    py::handle object,
    nn::TensorList& out,
    std::vector<py::object>* opaque) {
  PyObject* p = object.ptr();
  if (THPVariable_Check(p)) {
    add_tensor(THPVariable_Unpack(p), out);
    return;
  }
  if (is_plain(object)) {
    return;
  }
  if (PyTuple_Check(p) || PyList_Check(p)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(p);
    for (Py_ssize_t i = 0; i < size; ++i) {
      collect_tensors(PySequence_Fast_GET_ITEM(p, i), out, opaque);
    }
    return;
  }
  if (PyDict_Check(p)) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(p, &position, &key, &value)) {
      collect_tensors(value, out, opaque);
    }
    return;
  }
  const py::handle type = py::type::handle_of(object);
  if (py::hasattr(type, "__dataclass_fields__")) {
    for (const py::handle& name : type.attr("__dataclass_fields__")) {
      if (py::hasattr(object, name)) {
        collect_tensors(object.attr(name), out, opaque);
      }
    }
    return;
  }
  if (pytree().attr("SUPPORTED_NODES").contains(type)) {
    for (const py::handle& leaf : pytree().attr("tree_leaves")(object)) {
      collect_tensors(leaf, out, opaque);
    }
    return;
  }
  if (opaque != nullptr) {
    opaque->push_back(py::reinterpret_borrow<py::object>(object));
  }
}

}  // namespace flatshard::python
