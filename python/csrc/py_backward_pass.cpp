#include "python/csrc/py_backward_pass.h"

#include "flatshard/core/error.h"
#include "flatshard/runtime/runtime.h"
#include "flatshard/schedule/overlap_plan.h"
#include "python/csrc/py_runtime.h"

#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace flatshard::python {

PyBackwardPass::PyBackwardPass(
    const std::shared_ptr<Runtime>& runtime,
    std::shared_ptr<ParameterViews> views,
    std::shared_ptr<SharedRows> rows)
    : views_(std::move(views)),
      rows_(std::move(rows)),
      pass_(std::make_shared<BackwardPass>(runtime)) {
}

BackwardPass& PyBackwardPass::pass() const {
  FLATSHARD_CHECK(
      bool(pass_),
      usage,
      "a backward pass: expected one that is not given up");
  return *pass_;
}

void PyBackwardPass::without_gil(
    const std::function<void(BackwardPass&)>& call) const {
  views_->check_no_hook();
  BackwardPass& held = pass();
  const py::gil_scoped_release no_gil;
  call(held);
}

void PyBackwardPass::forward_begin(UnitId unit) {
  without_gil([&](BackwardPass& p) { p.forward_begin(unit); });
  views_->unit_begins(unit);
}

void PyBackwardPass::forward_end(UnitId unit) {
  without_gil([&](BackwardPass& p) {
    p.forward_end(unit);
    rows_->forget(false);
  });
  views_->unit_ended(unit);
}

void PyBackwardPass::open_backward(bool is_last, bool interleaved) {
  const bool goes_on = interleaved && !is_last;
  if (goes_on) {
    views_->check_may_go_on();
  }
  without_gil([&](BackwardPass& p) {
    p.open_backward({.is_last = is_last, .interleaved = interleaved});
  });
  if (goes_on) {
    views_->backward_goes_on();
  }
}

void PyBackwardPass::backward_begin(UnitId unit) {
  without_gil([&](BackwardPass& p) { p.backward_begin(unit); });
}

void PyBackwardPass::backward_end(UnitId unit) {
  without_gil([&](BackwardPass& p) { p.backward_end(unit); });
}

void PyBackwardPass::recompute_begin(UnitId unit) {
  without_gil([&](BackwardPass& p) { p.recompute_begin(unit); });
  views_->unit_begins(unit);
}

void PyBackwardPass::recompute_end(UnitId unit) {
  without_gil([&](BackwardPass& p) { p.recompute_end(unit); });
  views_->unit_ended(unit);
}

void PyBackwardPass::set_delay_wgrad(bool delays, int node) {
  pass().set_delay_wgrad(delays, node);
}

void PyBackwardPass::run_wgrads(UnitId unit, int node) {
  without_gil([&](BackwardPass& p) { p.run_wgrads(unit, node); });
}

void PyBackwardPass::close_backward() {
  without_gil([](BackwardPass& p) { p.close_backward(); });
}

std::size_t PyBackwardPass::num_late() {
  return pass().num_late();
}

// -- binding -----------------------------------------------------------------

namespace {

/// "F" | "B" | "W", microbatch, layer or -1, node.
using Step = std::tuple<std::string, int, int, std::string>;

std::vector<Step> overlap_steps(
    int layers,
    int microbatches,
    bool delay_wgrad,
    std::vector<bool> dense) {
  std::vector<Step> steps;
  const OverlapPlanOptions options{
      .delay_wgrad = delay_wgrad,
      .dense = std::move(dense)};
  const auto plan = overlap_plan(layers, microbatches, options);
  check_plan(plan, layers, microbatches, options);
  for (const PlanStep& step : plan) {
    steps.emplace_back(
        to_string(step).substr(0, 1),
        step.microbatch,
        step.layer,
        to_string(step.node));
  }
  return steps;
}

}  // namespace

void bind_backward_pass(py::module_& m) {
  py::class_<PyBackwardPass>(
      m,
      "BackwardPass",
      "Forward and backward of one microbatch whose units run in pieces.")
      .def(
          py::init(
              [](const PyRuntime& runtime) { return runtime.backward_pass(); }),
          py::arg("runtime"))
      .def("forward_begin", &PyBackwardPass::forward_begin, py::arg("unit"))
      .def("forward_end", &PyBackwardPass::forward_end, py::arg("unit"))
      .def(
          "open_backward",
          &PyBackwardPass::open_backward,
          py::arg("is_last"),
          py::arg("interleaved"))
      .def("backward_begin", &PyBackwardPass::backward_begin, py::arg("unit"))
      .def("backward_end", &PyBackwardPass::backward_end, py::arg("unit"))
      .def("recompute_begin", &PyBackwardPass::recompute_begin, py::arg("unit"))
      .def("recompute_end", &PyBackwardPass::recompute_end, py::arg("unit"))
      .def(
          "set_delay_wgrad",
          &PyBackwardPass::set_delay_wgrad,
          py::arg("delays"),
          py::arg("node"))
      .def(
          "run_wgrads",
          &PyBackwardPass::run_wgrads,
          py::arg("unit"),
          py::arg("node"))
      .def("close_backward", &PyBackwardPass::close_backward)
      .def_property_readonly("num_late", &PyBackwardPass::num_late)
      .def("give_up", &PyBackwardPass::give_up);
  m.def(
      "overlap_plan",
      &overlap_steps,
      py::arg("layers"),
      py::arg("microbatches"),
      py::arg("delay_wgrad"),
      py::arg("dense"),
      "Steps of an OverlapPlan in launch order: pass, microbatch, layer, "
      "node.");
}

}  // namespace flatshard::python
