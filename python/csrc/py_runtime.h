#pragma once

#include "flatshard/diagnostics/nan_check.h"
#include "flatshard/graphs/model_graphs.h"
#include "flatshard/runtime/runtime.h"
#include "python/csrc/bind.h"
#include "python/csrc/float8_linear.h"
#include "python/csrc/parameter_views.h"
#include "python/csrc/py_backward_pass.h"
#include "python/csrc/py_unit.h"

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace flatshard::python {

/// Returns an object that a thread without the GIL may free.
std::shared_ptr<py::object> held_with_gil(py::object object);

/// The Runtime and what Python sees of its parameters.
class PyRuntime {
 public:
  /// A unit in the tree of a model, parents before children.
  struct TreeUnit {
    std::shared_ptr<PyUnit> unit;
    UnitId parent = kNoUnit;
    std::vector<ParameterViews::Place> places;
    std::shared_ptr<GradViews> grads;
  };
  /// The callbacks of the root.
  struct Callbacks {
    py::object before_forward;
    py::object before_backward;
    py::object whole_written;
    /// look_inside(unit, objects, shows_backward): called when a forward with
    /// gradients returns objects of types unfamiliar to collect_tensors.
    /// Returns the tensors in them and runs_later of UnitCalls::forward_end.
    /// `shows_backward`: a tensor next to them has a backward.
    py::object look_inside;
  };
  PyRuntime(
      const std::shared_ptr<Mesh>& mesh,
      const std::vector<TreeUnit>& units,
      Callbacks callbacks,
      const RuntimeOptions& options);

  /// With the GIL. Absent: use torch's operation, since something other than
  /// autograd would see it, there is something to cast, or the weight is not an
  /// unsharded parameter. In C++, since each layer asks in each forward.
  std::optional<at::Tensor>
  linear(py::handle x, py::handle weight, py::handle bias) const;

  /// Returns where the gradient of an unsharded parameter is reduced, zeroed if
  /// nothing was added yet; what a backward does not ask for is discarded. In a
  /// backward.
  at::Tensor main_grad(const at::Tensor& weight) const;

  const nn::ModuleContextPtr& sink() const { return sink_; }

  void forward_begin(UnitId unit, py::handle args, py::handle kwargs);
  void forward_end(UnitId unit, py::handle output, bool more_follow);
  void forward_error(UnitId unit);
  /// UnitCalls::keeps_inner of the tensors inside `output`.
  void keeps_inner(UnitId unit, py::handle output);
  void unshard(UnitId unit, bool awaits);
  /// A replay's outputs, if it was one, and whether the caller should report
  /// the forward that it runs.
  using Outcome = std::pair<std::optional<nn::TensorList>, bool>;
  /// @param inputs  none: the forward cannot be part of a graph now.
  /// @param reason  without inputs UnitForward::obstacle, otherwise
  ///   UnitForward::difference.
  Outcome graph_forward(
      UnitId unit,
      py::typing::Callable<nn::TensorList(nn::TensorList)> function,
      std::optional<nn::TensorList> inputs,
      nn::TensorList constants,
      std::string reason);
  void graph_ran(
      UnitId unit,
      const nn::TensorList& inputs,
      const nn::TensorList& outputs) const;
  GraphStats graph_stats() const { return runtime_->graphs().stats(); }
  bool shows_others() const { return views_->shows_others(); }
  bool trains_others() const { return views_->trains_others(); }
  void reshard(UnitId unit);
  /// See ParameterViews::set_keeps.
  void set_keeps(UnitId unit, bool keeps) { views_->set_keeps(unit, keeps); }
  /// Makes modules show the shards of `unit` outside its forward and backward.
  /// Its unsharded parameters stay where they are. Not a collective.
  void show_shards(UnitId unit);
  /// Returns UnitCalls::backward_pass.
  std::unique_ptr<PyBackwardPass> backward_pass() const;
  /// Name, 2-norm of the weight, and of the gradient if there is one.
  using Norm = std::tuple<std::string, double, std::optional<double>>;
  std::vector<Norm> parameter_norms();
  /// Kind, unit, plane, part (-1: all), "forward" or "backward", bytes of an
  /// all-gather. Returns the actions since the last call.
  using TracedAction =
      std::tuple<std::string, std::string, int, int, std::string, std::int64_t>;
  std::vector<TracedAction> take_trace();
  /// Keeps the actions until take_trace. Otherwise they are kept until the
  /// forward or unshard that ran them returns, or the next one starts, unless a
  /// TorchDispatchMode is active.
  void set_keeps_trace(bool keeps) { keeps_trace_ = keeps; }
  /// SharedRows::counts.
  std::pair<std::int64_t, std::int64_t> float8_inputs() const {
    return rows_->counts();
  }
  void report_nan_in_param_grad(bool enabled);
  Runtime& runtime();

 private:
  RegionGraphs& graphs() const;
  void forget_trace();

  std::shared_ptr<ParameterViews> views_;
  py::object look_inside_;
  nn::ModuleContextPtr sink_ = c10::make_intrusive<nn::ModuleContext>();
  std::shared_ptr<NanCheck> nan_check_;
  std::shared_ptr<SharedRows> rows_ = std::make_shared<SharedRows>();
  std::unique_ptr<Float8Weights> float8_weights_;
  Released<Runtime> runtime_;
  bool keeps_trace_ = false;
};

}  // namespace flatshard::python
