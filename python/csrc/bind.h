#pragma once

#include <pybind11/typing.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

// The binding has no logic: it translates types, drops the GIL around
// everything that may wait, and shows the nouns of the core to Python. One
// bind_<folder> per folder of flatshard/ that Python sees.
namespace flatshard::python {

namespace py = pybind11;

void bind_errors(py::module_& m);
void bind_comm(py::module_& m);
/// Called after bind_comm and bind_float8.
void bind_unit(py::module_& m);
/// Called after bind_unit.
void bind_runtime(py::module_& m);
/// Called after bind_runtime.
void bind_backward_pass(py::module_& m);
void bind_optim(py::module_& m);
void bind_checkpoint(py::module_& m);
void bind_weights(py::module_& m);
void bind_float8(py::module_& m);
void bind_machine(py::module_& m);
/// Called after bind_comm.
void bind_moe(py::module_& m);

/// A shared object that may wait for threads of the runtime when it dies: these
/// threads may need the GIL, so it is dropped for that long.
template <class T>
class Released {
 public:
  Released() = default;
  explicit Released(std::shared_ptr<T> object) : object_(std::move(object)) {}
  Released(Released&&) noexcept = default;
  Released& operator=(Released&& other) noexcept {
    reset();
    object_ = std::move(other.object_);
    return *this;
  }
  ~Released() { reset(); }

  void reset() {
    if (object_ && PyGILState_Check()) {
      const py::gil_scoped_release no_gil;
      object_.reset();
    }
    object_.reset();
  }
  T& operator*() const { return *object_; }
  T* operator->() const { return object_.get(); }
  const std::shared_ptr<T>& shared() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  std::shared_ptr<T> object_;
};

}  // namespace flatshard::python
