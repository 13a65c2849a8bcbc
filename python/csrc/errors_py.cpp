#include "flatshard/core/error.h"
#include "python/csrc/bind.h"

namespace flatshard::python {
namespace {

// These exist as long as the interpreter.
PyObject* error_type = nullptr;
PyObject* value_error_type = nullptr;

PyObject* new_type(
    py::module_& m,
    const char* name,
    const char* doc,
    const py::object& bases) {
  const std::string full = std::string("flatshard.") + name;
  PyObject* type =
      PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), nullptr);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  m.attr(name) = py::reinterpret_borrow<py::object>(type);
  return type;
}

void raise(const Error& error) {
  const bool bad_value =
      error.code() == ErrorCode::config || error.code() == ErrorCode::usage;
  PyObject* type = bad_value ? value_error_type : error_type;
  const py::object exception =
      py::reinterpret_borrow<py::object>(type)(error.what());
  exception.attr("code") = std::string(to_string(error.code()));
  PyErr_SetObject(type, exception.ptr());
}

}  // namespace

void bind_errors(py::module_& m) {
  error_type = new_type(
      m,
      "Error",
      "An error of the runtime. `code` is one of config, usage, comm, "
      "timeout, cuda, io, format, memory, internal.",
      py::reinterpret_borrow<py::object>(PyExc_RuntimeError));
  value_error_type = new_type(
      m,
      "ConfigError",
      "An Error of code config or usage: an argument or a call that cannot "
      "work.",
      py::make_tuple(
          py::reinterpret_borrow<py::object>(error_type),
          py::reinterpret_borrow<py::object>(PyExc_ValueError)));
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) {
        std::rethrow_exception(pointer);
      }
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace flatshard::python
