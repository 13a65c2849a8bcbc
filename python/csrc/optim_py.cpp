#include "python/csrc/bind.h"
#include "python/csrc/py_adamw.h"

#include <tuple>
#include <utility>
#include <vector>

namespace flatshard::python {
namespace {

/// lr, betas, eps and weight_decay of a parameter group.
using Values = std::tuple<double, std::pair<double, double>, double, double>;

}  // namespace

void bind_optim(py::module_& m) {
  py::class_<PyAdamW, std::shared_ptr<PyAdamW>>(
      m,
      "AdamW",
      "The core's AdamW: one kernel per group.")
      .def(
          py::init<
              std::vector<std::shared_ptr<PyUnit>>,
              const std::vector<std::vector<std::int64_t>>&,
              const std::vector<at::ScalarType>&>(),
          py::arg("units"),
          py::arg("group_of_parameters"),
          py::arg("state_dtypes"))
      .def(
          "step",
          [](PyAdamW& self, const std::vector<Values>& groups) {
            std::vector<PyAdamWValues> values;
            values.reserve(groups.size());
            for (const auto& [lr, betas, eps, weight_decay] : groups) {
              values.push_back({lr, betas, eps, weight_decay});
            }
            self.step(values);
          },
          py::arg("groups"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "set_stochastic_rounding",
          &PyAdamW::set_stochastic_rounding,
          py::arg("seed"))
      .def("state", &PyAdamW::state, py::arg("unit"), py::arg("parameter"))
      .def("decoded", &PyAdamW::decoded, py::arg("unit"), py::arg("parameter"))
      .def(
          "encode",
          &PyAdamW::encode,
          py::arg("unit"),
          py::arg("parameter"),
          py::arg("name"),
          py::arg("values"))
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
