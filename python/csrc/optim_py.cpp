#include "python/csrc/bind.h"
#include "python/csrc/py_adamw.h"

namespace flatshard::python {

void bind_optim(py::module_& m) {
  py::class_<PyAdamW, std::shared_ptr<PyAdamW>>(
      m,
      "AdamW",
      "The core's AdamW: one kernel per group.")
      .def(py::init<std::vector<std::shared_ptr<PyUnit>>>(), py::arg("units"))
      .def(
          "set_weight_decay",
          &PyAdamW::set_weight_decay,
          py::arg("unit"),
          py::arg("of_parameters"))
      .def(
          "step",
          &PyAdamW::step,
          py::arg("lr"),
          py::arg("betas"),
          py::arg("eps"),
          py::call_guard<py::gil_scoped_release>())
      .def("state", &PyAdamW::state, py::arg("unit"), py::arg("parameter"))
      .def(
          "num_updates",
          &PyAdamW::num_updates,
          py::arg("unit"),
          py::arg("parameter"))
      .def(
          "set_num_updates",
          &PyAdamW::set_num_updates,
          py::arg("unit"),
          py::arg("parameter"),
          py::arg("updates"));
}

}  // namespace flatshard::python
