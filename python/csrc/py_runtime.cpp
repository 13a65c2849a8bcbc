#include "python/csrc/py_runtime.h"

#include "flatshard/core/error.h"
#include "flatshard/device/outside_of_transforms.h"
#include "flatshard/diagnostics/norms.h"
#include "flatshard/nn/linear.h"
#include "flatshard/schedule/simulate.h"
#include "python/csrc/collect_tensors.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace flatshard::python {
namespace {

std::vector<ParameterViews::UnitViews> views_of(
    const std::vector<PyRuntime::TreeUnit>& units) {
  std::vector<ParameterViews::UnitViews> views;
  for (const auto& unit : units) {
    views.push_back({unit.places, unit.grads});
  }
  return views;
}

/// Returns whether a function of torch.func runs. Its tensors wrap the tensors
/// of the caller.
bool in_transform() {
  const c10::DispatchKeySet keys =
      c10::impl::tls_local_dispatch_key_set().included_;
  return keys.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         keys.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

bool has_hooks(const at::Tensor& tensor) {
  return torch::autograd::impl::get_autograd_meta(tensor) != nullptr &&
         !torch::autograd::impl::hooks(tensor).empty();
}

/// Data kept of inputs is dropped together with its purpose.
class ForgetRows : public StepObserver {
 public:
  explicit ForgetRows(std::shared_ptr<SharedRows> rows)
      : rows_(std::move(rows)) {}
  void backward_ended() override { rows_->forget(true); }
  void was_reset() override { rows_->forget(true); }

 private:
  std::shared_ptr<SharedRows> rows_;
};

}  // namespace

std::shared_ptr<py::object> held_with_gil(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

PyRuntime::PyRuntime(
    const std::shared_ptr<Mesh>& mesh,
    const std::vector<TreeUnit>& units,
    Callbacks callbacks,
    const RuntimeOptions& options)
    : views_(std::make_shared<ParameterViews>(
          views_of(units),
          std::move(callbacks.before_forward),
          std::move(callbacks.before_backward),
          std::move(callbacks.whole_written))),
      look_inside_(std::move(callbacks.look_inside)) {
  const OutsideOfTransforms outside;  // of a first forward inside of one
  std::vector<std::unique_ptr<Unit>> list;
  std::vector<UnitId> parents;
  for (const TreeUnit& unit : units) {
    const auto id = static_cast<UnitId>(list.size());
    list.push_back(unit.unit->adopt(id));
    if (list.back()->resident()) {
      views_->set_resident(id);
    }
    parents.push_back(unit.parent);
  }
  std::shared_ptr<Runtime> runtime;
  {
    const py::gil_scoped_release no_gil;
    runtime = Runtime::create(mesh, std::move(list), parents, options);
    add_graphs(runtime);
    runtime->add_observer(views_);
    if (options.graphs.enabled) {
      runtime->graphs().regions()->set_unit_program(
          {.context = sink_,
           .around_capture = [views = views_,
                              rows = rows_](const Unit& unit, bool captures) {
             const py::gil_scoped_acquire gil;
             views->capture(unit.id(), captures);
             rows->forget(true);  // a graph has its own
             if (!captures) {
               // autograd restores an error of Python before it throws it. A
               // capture that fails is not an error.
               PyErr_Clear();
             }
           }});
    }
  }
  for (const TreeUnit& unit : units) {
    unit.unit->keep(runtime);
  }
  sink_->wgrad_sink = runtime;
  float8_weights_ = std::make_unique<Float8Weights>(*runtime, sink_, rows_);
  if (!float8_weights_->empty()) {
    sink_->weight_source = runtime;
    const py::gil_scoped_release no_gil;
    runtime->add_observer(std::make_shared<ForgetRows>(rows_));
  }
  runtime_ = Released<Runtime>(std::move(runtime));
}

std::optional<at::Tensor>
PyRuntime::linear(py::handle x, py::handle weight, py::handle bias) const {
  const bool are_plain =
      THPVariable_CheckExact(x.ptr()) &&
      reinterpret_cast<PyObject*>(Py_TYPE(weight.ptr())) == ParameterClass &&
      (bias.is_none() || THPVariable_Check(bias.ptr()));
  if (!are_plain || !at::GradMode::is_enabled() || in_transform()) {
    return std::nullopt;
  }
  const at::Tensor& input = THPVariable_Unpack(x.ptr());
  const at::Tensor& w = THPVariable_Unpack(weight.ptr());
  if (input.scalar_type() != w.scalar_type() || input.dim() == 0 ||
      has_hooks(w) ||
      at::autocast::is_autocast_enabled(input.device().type())) {
    return std::nullopt;
  }
  const at::Tensor b =
      bias.is_none() ? at::Tensor() : THPVariable_Unpack(bias.ptr());
  const py::gil_scoped_release no_gil;
  return nn::linear(input, w, b, {}, sink_);
}

at::Tensor PyRuntime::main_grad(const at::Tensor& weight) const {
  nn::WgradSink& sink = *runtime_;
  const auto target = sink.begin_wgrad(weight);
  if (!target) {
    return at::empty(weight.sizes(), weight.options());
  }
  if (!target->accumulate) {
    target->grad.zero_();
  }
  sink.end_wgrad(weight);
  return target->grad;
}

void PyRuntime::forward_begin(UnitId unit, py::handle args, py::handle kwargs) {
  nn::TensorList tensors;
  collect_tensors(args, tensors);
  collect_tensors(kwargs, tensors);
  views_->check_no_hook();
  const bool begins_step = !views_->in_forward() &&
                           torch::autograd::get_current_graph_task_id() == -1;
  if (begins_step) {
    views_->end_all_kept();
  }
  {
    const py::gil_scoped_release no_gil;
    if (begins_step && !keeps_trace_) {
      runtime_->clear_trace();
    }
    runtime_->calls().forward_begin(unit, tensors);
  }
  views_->unit_begins(unit);
}

void PyRuntime::forward_end(UnitId unit, py::handle output, bool more_follow) {
  nn::TensorList tensors;
  std::vector<py::object> opaque;
  const bool has_grads = at::GradMode::is_enabled();
  collect_tensors(output, tensors, has_grads ? &opaque : nullptr);
  const auto may_have_backward = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  bool runs_later = false;
  if (!opaque.empty()) {
    const bool shows_backward = std::ranges::any_of(tensors, may_have_backward);
    const auto inside = look_inside_(unit, opaque, shows_backward)
                            .cast<std::pair<nn::TensorList, bool>>();
    tensors.insert(tensors.end(), inside.first.begin(), inside.first.end());
    runs_later = inside.second;
  }
  views_->tell_whole_writes(unit);
  {
    const py::gil_scoped_release no_gil;
    runtime_->calls().forward_end(unit, tensors, more_follow, runs_later);
    rows_->forget(false);
    forget_trace();
  }
  using After = ParameterViews::After;
  After after = more_follow ? After::more_follow : After::sharded;
  if (!more_follow && has_grads &&
      (runs_later || std::ranges::any_of(tensors, may_have_backward))) {
    after = After::may_be_kept;
  }
  views_->unit_ended(unit, after);
}

void PyRuntime::keeps_inner(UnitId unit, py::handle output) {
  nn::TensorList tensors;
  collect_tensors(output, tensors);
  const py::gil_scoped_release no_gil;
  runtime_->calls().keeps_inner(unit, tensors);
}

void PyRuntime::forward_error(UnitId unit) {
  if (views_->captures()) {
    return;  // forward_begin refused
  }
  {
    const py::gil_scoped_release no_gil;
    runtime_->calls().forward_error(unit);
    rows_->forget(false);
  }
  views_->unit_ended(unit);
}

void PyRuntime::unshard(UnitId unit, bool awaits) {
  views_->check_no_hook();
  {
    const py::gil_scoped_release no_gil;
    runtime_->gathers().unshard(unit, awaits);
    forget_trace();
  }
  if (awaits) {
    views_->show(unit, true);
  }
}

PyRuntime::Outcome PyRuntime::graph_forward(
    UnitId unit,
    py::typing::Callable<nn::TensorList(nn::TensorList)> function,
    std::optional<nn::TensorList> inputs,
    nn::TensorList constants,
    std::string reason) {
  RegionGraphs::UnitForward forward{
      .unit = unit,
      .fn =
          [function = held_with_gil(std::move(function))](
              const nn::TensorList& tensors) {
            const py::gil_scoped_acquire gil;
            return (*function)(tensors).cast<nn::TensorList>();
          },
      .constants = std::move(constants)};
  if (inputs) {
    forward.inputs = *std::move(inputs);
    forward.difference = std::move(reason);
  } else {
    forward.obstacle = std::move(reason);
  }
  const py::gil_scoped_release no_gil;
  auto outcome = graphs().run_unit(forward);
  return {std::move(outcome.outputs), outcome.watched};
}

void PyRuntime::graph_ran(
    UnitId unit,
    const nn::TensorList& inputs,
    const nn::TensorList& outputs) const {
  graphs().unit_ran(unit, inputs, outputs);
}

void PyRuntime::reshard(UnitId unit) {
  views_->check_no_hook();
  views_->tell_whole_writes(unit);
  views_->show(unit, false);
  const py::gil_scoped_release no_gil;
  runtime_->gathers().reshard(unit);
}

void PyRuntime::show_shards(UnitId unit) {
  if (views_->captures() || views_->runs_hooks()) {
    return;
  }
  views_->tell_whole_writes(unit);
  views_->show(unit, false);
}

void PyRuntime::forget_trace() {
  if (!keeps_trace_ && !c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    runtime_->clear_trace();
  }
}

std::unique_ptr<PyBackwardPass> PyRuntime::backward_pass() const {
  return std::make_unique<PyBackwardPass>(runtime_.shared(), views_, rows_);
}

std::vector<PyRuntime::Norm> PyRuntime::parameter_norms() {
  std::vector<Norm> norms;
  for (const ParameterNorm& n : flatshard::parameter_norms(runtime())) {
    norms.emplace_back(n.name, n.weight, n.grad);
  }
  return norms;
}

std::vector<PyRuntime::TracedAction> PyRuntime::take_trace() {
  const std::vector<UnitSpec>& units = runtime().scheduler().units();
  std::vector<TracedAction> found;
  for (const Action& a : runtime_->trace().actions) {
    found.emplace_back(
        to_string(a.kind),
        a.unit == kNoUnit ? "" : units[a.unit].name,
        a.plane,
        a.part,
        a.phase == Phase::forward ? "forward" : "backward",
        gathered_nbytes(units, {a}));
  }
  runtime_->clear_trace();
  return found;
}

void PyRuntime::report_nan_in_param_grad(bool enabled) {
  runtime();
  if (!nan_check_ && enabled) {
    nan_check_ = NanCheck::install(runtime_.shared());
  }
  if (nan_check_) {
    nan_check_->set_enabled(enabled);
  }
}

Runtime& PyRuntime::runtime() {
  views_->check_no_hook();
  return *runtime_;
}

RegionGraphs& PyRuntime::graphs() const {
  FLATSHARD_CHECK(
      runtime_->graphs().regions() != nullptr,
      internal,
      "no unit has cuda_graph=True");
  return *runtime_->graphs().regions();
}

}  // namespace flatshard::python
