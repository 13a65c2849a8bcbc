#include "flatshard/core/error.h"
#include "python/csrc/bind.h"
#include "python/csrc/py_optimizer.h"

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::python {
namespace {

StateFormat format_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return StateFormat::float32;
    case at::kBFloat16:
      return StateFormat::bfloat16;
    case at::kChar:
      return StateFormat::int8;
    default:
      FLATSHARD_THROW(
          config,
          "state_dtype: expected torch.float32, torch.bfloat16, or "
          "torch.int8, got {}",
          c10::toString(dtype));
  }
}

ParameterValues adamw_values(
    double lr,
    std::pair<double, double> betas,
    double eps,
    double weight_decay,
    at::ScalarType state_dtype) {
  return {
      .algorithm = Algorithm::adamw,
      .lr_mult = lr,
      .weight_decay = weight_decay,
      .beta1 = betas.first,
      .beta2 = betas.second,
      .eps = eps,
      .state_dtype = format_of(state_dtype)};
}

AdjustLr adjust_lr_of(const std::string& name) {
  if (name == "match_rms_adamw") {
    return AdjustLr::match_rms_adamw;
  }
  return name == "spectral_unclamped" ? AdjustLr::spectral_unclamped
                                      : AdjustLr::original;
}

ParameterValues muon_values(
    double lr,
    double weight_decay,
    double momentum,
    bool nesterov,
    std::array<double, 3> ns_coefficients,
    double eps,
    std::int64_t ns_steps,
    const std::string& adjust_lr_fn) {
  return {
      .algorithm = Algorithm::muon,
      .lr_mult = lr,
      .weight_decay = weight_decay,
      .momentum = momentum,
      .muon = {
          .nesterov = nesterov,
          .newton_schulz =
              {.coefficients = ns_coefficients, .steps = ns_steps, .eps = eps},
          .adjust_lr = adjust_lr_of(adjust_lr_fn)}};
}

}  // namespace

void bind_optim(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<ParameterValues>(
      m,
      "ParameterValues",
      "The algorithm and the options of a parameter group.")
      .def_static(
          "adamw",
          &adamw_values,
          py::kw_only(),
          py::arg("lr"),
          py::arg("betas"),
          py::arg("eps"),
          py::arg("weight_decay"),
          py::arg("state_dtype"))
      .def_static(
          "muon",
          &muon_values,
          py::kw_only(),
          py::arg("lr"),
          py::arg("weight_decay"),
          py::arg("momentum"),
          py::arg("nesterov"),
          py::arg("ns_coefficients"),
          py::arg("eps"),
          py::arg("ns_steps"),
          py::arg("adjust_lr_fn"));

  py::class_<MatrixOptions>(
      m,
      "MatrixOptions",
      "The matrices of parameters, and the ranks that store them together.")
      .def(
          py::init(
              [](std::vector<std::vector<std::int64_t>> split_sizes,
                 std::optional<std::shared_ptr<Mesh>> mesh,
                 std::vector<std::vector<std::vector<std::string>>> cut_axes) {
                return MatrixOptions{
                    .split_sizes = std::move(split_sizes),
                    .mesh = mesh.value_or(nullptr),
                    .cut_axes = std::move(cut_axes)};
              }),
          py::kw_only(),
          py::arg("split_sizes"),
          py::arg("mesh"),
          py::arg("cut_axes"));

  py::class_<PyOptimizer, std::shared_ptr<PyOptimizer>>(
      m,
      "Optimizer",
      "One of the core's optimizers, for the parameters of some units.")
      .def(
          py::init<
              std::vector<std::shared_ptr<PyUnit>>,
              const std::vector<std::vector<std::int64_t>>&,
              const std::vector<ParameterValues>&,
              const MatrixOptions&>(),
          py::arg("units"),
          py::arg("group_of_parameters"),
          py::arg("values"),
          py::arg("matrices"),
          NoGil())
      .def(
          "step",
          &PyOptimizer::step,
          py::arg("values"),
          py::arg("without_gradient"),
          NoGil())
      .def(
          "set_stochastic_rounding",
          &PyOptimizer::set_stochastic_rounding,
          py::arg("seed"))
      .def("state", &PyOptimizer::state, py::arg("unit"), py::arg("parameter"))
      .def(
          "decoded",
          &PyOptimizer::decoded,
          py::arg("unit"),
          py::arg("parameter"))
      .def(
          "encode",
          &PyOptimizer::encode,
          py::arg("unit"),
          py::arg("parameter"),
          py::arg("name"),
          py::arg("values"))
      .def(
          "num_updates",
          &PyOptimizer::num_updates,
          py::arg("unit"),
          py::arg("parameter"))
      .def(
          "set_num_updates",
          &PyOptimizer::set_num_updates,
          py::arg("unit"),
          py::arg("parameter"),
          py::arg("updates"));

  py::class_<SeveralOptimizers, std::shared_ptr<SeveralOptimizers>>(
      m,
      "SeveralOptimizers",
      "Several optimizers of one model, for a checkpoint.")
      .def(py::init<std::vector<std::shared_ptr<PyOptimizer>>>(), py::arg("of"))
      .def("take_updates", &SeveralOptimizers::take_updates)
      .def("give_updates", &SeveralOptimizers::give_updates);
}

}  // namespace flatshard::python
