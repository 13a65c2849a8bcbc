#include "flatshard/nn/loss.h"
#include "python/csrc/bind.h"
#include "python/csrc/py_runtime.h"

#include <optional>
#include <string>
#include <vector>

namespace flatshard::python {
namespace {

// runtime: reduces the weight's gradient in place.
at::Tensor linear_cross_entropy(
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& target,
    const nn::LossOptions& options,
    std::optional<const PyRuntime*> runtime) {
  return nn::linear_cross_entropy(
      input,
      weight,
      target,
      options,
      runtime ? (*runtime)->sink() : nn::ModuleContextPtr());
}

// Threads of a CPU's streams may need the GIL for what they have queued.
void delete_without_gil(CommStreams* streams) {
  if (PyGILState_Check() != 0) {
    const py::gil_scoped_release no_gil;
    delete streams;
  } else {
    delete streams;
  }
}

}  // namespace

void bind_runtime(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<GraphOptions>(m, "GraphOptions")
      .def(
          py::init([](bool enabled,
                      int warmup_steps,
                      bool audit,
                      bool emulate_on_cpu) {
            return GraphOptions{
                .enabled = enabled,
                .warmup_steps = warmup_steps,
                .audit = audit,
                .emulate_on_cpu = emulate_on_cpu};
          }),
          py::kw_only(),
          py::arg("enabled"),
          py::arg("warmup_steps"),
          py::arg("audit"),
          py::arg("emulate_on_cpu"));
  // Python's optimizers write weights and report that afterwards, and
  // parameters without a gradient have none, as in torch.
  py::class_<CommStreams, std::shared_ptr<CommStreams>>(
      m,
      "CommStreams",
      "Streams that Runtimes of one mesh, or of several, share.")
      .def(
          py::init([](const Mesh& mesh) {
            return std::shared_ptr<CommStreams>(
                new CommStreams(mesh.device(), {}, /*has_outer=*/true),
                delete_without_gil);
          }),
          py::arg("mesh"));
  py::class_<RuntimeOptions>(m, "RuntimeOptions")
      .def(
          py::init([](int prefetch,
                      bool copy_engines,
                      bool slots_on_demand,
                      bool trace,
                      const GraphOptions& graphs,
                      std::shared_ptr<CommStreams> shared_streams) {
            return RuntimeOptions{
                .prefetch = prefetch,
                .copy_engines =
                    copy_engines ? CopyEngines::all() : CopyEngines{},
                .foreign_writes = true,
                .slots_on_demand = slots_on_demand,
                .unused_grads_stay_undefined = true,
                .trace = trace,
                .graphs = graphs,
                .shared_streams = std::move(shared_streams)};
          }),
          py::kw_only(),
          py::arg("prefetch"),
          py::arg("copy_engines"),
          py::arg("slots_on_demand"),
          py::arg("trace"),
          py::arg("graphs"),
          py::arg("shared_streams"));
  py::class_<UnitPolicy>(m, "UnitPolicy", "A program's choices for one unit.")
      .def(
          py::init([](bool reshard_after_forward,
                      bool reshard_after_backward,
                      bool unshard_in_backward,
                      std::optional<std::vector<UnitId>> forward_prefetch,
                      std::optional<std::vector<UnitId>> backward_prefetch,
                      bool keep_backward_planes,
                      bool keep_post_forward,
                      bool sync_gradients,
                      bool all_reduce) {
            return UnitPolicy{
                .reshard_after_forward = reshard_after_forward,
                .reshard_after_backward = reshard_after_backward,
                .unshard_in_backward = unshard_in_backward,
                .forward_prefetch = std::move(forward_prefetch),
                .backward_prefetch = std::move(backward_prefetch),
                .keep_backward_planes = keep_backward_planes,
                .keep_post_forward = keep_post_forward,
                .sync_gradients = sync_gradients,
                .all_reduce = all_reduce};
          }),
          py::kw_only(),
          py::arg("reshard_after_forward"),
          py::arg("reshard_after_backward"),
          py::arg("unshard_in_backward"),
          py::arg("forward_prefetch"),
          py::arg("backward_prefetch"),
          py::arg("keep_backward_planes"),
          py::arg("keep_post_forward"),
          py::arg("sync_gradients"),
          py::arg("all_reduce"));
  py::class_<PyRuntime::TreeUnit>(
      m,
      "TreeUnit",
      "A unit in the tree of a model. `parent` is the number of the unit "
      "around it, -1 for none.")
      .def(
          py::init([](std::shared_ptr<PyUnit> unit,
                      UnitId parent,
                      std::vector<ParameterViews::Place> places,
                      std::shared_ptr<GradViews> grads) {
            return PyRuntime::TreeUnit{
                std::move(unit),
                parent,
                std::move(places),
                std::move(grads)};
          }),
          py::arg("unit"),
          py::arg("parent"),
          py::arg("places"),
          py::arg("grads"));
  py::class_<PyRuntime::Callbacks>(m, "Callbacks", "Calls of the root.")
      .def(
          py::init([](py::typing::Callable<void()> before_forward,
                      py::typing::Callable<void()> before_backward,
                      py::typing::Callable<void(UnitId, nn::TensorList)>
                          whole_written,
                      py::typing::Callable<std::pair<nn::TensorList, bool>(
                          UnitId,
                          py::typing::List<py::object>,
                          bool)> look_inside) {
            return PyRuntime::Callbacks{
                std::move(before_forward),
                std::move(before_backward),
                std::move(whole_written),
                std::move(look_inside)};
          }),
          py::kw_only(),
          py::arg("before_forward"),
          py::arg("before_backward"),
          py::arg("whole_written"),
          py::arg("look_inside"));

  py::class_<PyRuntime>(m, "Runtime", "All-gathers, reshards and reduces.")
      .def(
          py::init<
              const std::shared_ptr<Mesh>&,
              const std::vector<PyRuntime::TreeUnit>&,
              PyRuntime::Callbacks,
              const RuntimeOptions&>(),
          py::arg("mesh"),
          py::arg("units"),
          py::arg("callbacks"),
          py::arg("options"))
      .def(
          "linear",
          &PyRuntime::linear,
          "torch.nn.functional.linear whose backward writes the gradients of "
          "weight and bias into the memory that is reduced. Both are unsharded "
          "parameters of this runtime's units. None: run torch's function.",
          py::arg("input"),
          py::arg("weight"),
          py::arg("bias"))
      .def(
          "forward_begin",
          &PyRuntime::forward_begin,
          py::arg("unit"),
          py::arg("args"),
          py::arg("kwargs"))
      .def(
          "forward_end",
          &PyRuntime::forward_end,
          py::arg("unit"),
          py::arg("output"),
          py::arg("more_follow"))
      .def("forward_error", &PyRuntime::forward_error, py::arg("unit"))
      .def(
          "keeps_inner",
          &PyRuntime::keeps_inner,
          py::arg("unit"),
          py::arg("output"))
      .def(
          "graph_forward",
          &PyRuntime::graph_forward,
          py::arg("unit"),
          py::kw_only(),
          py::arg("function"),
          py::arg("inputs"),
          py::arg("constants"),
          py::arg("reason"),
          "RegionGraphs::run_unit: outputs of a replay or None, and whether "
          "graph_ran is to follow the forward. `function` accepts a list of "
          "tensors and returns one, is kept, and must not keep the model. "
          "Without inputs the forward cannot be part of a graph: `reason` is "
          "the obstacle. With them `reason` is the difference from the last "
          "watched forward, if any.")
      .def(
          "graph_ran",
          &PyRuntime::graph_ran,
          py::arg("unit"),
          py::arg("inputs"),
          py::arg("outputs"),
          NoGil())
      .def(
          "graph_stats",
          [](const PyRuntime& self) {
            const GraphStats stats = self.graph_stats();
            py::dict found;
            found["captures"] = stats.captures;
            found["forward_replays"] = stats.forward_replays;
            found["backward_replays"] = stats.backward_replays;
            found["fallbacks"] = stats.fallbacks;
            found["nbytes"] = stats.nbytes;
            found["audited_addresses"] = stats.audited_addresses;
            found["audit_findings"] = stats.audit_findings;
            return found;
          })
      .def(
          "reset_graphs",
          [](PyRuntime& self) { self.runtime().graphs().reset(); },
          NoGil())
      .def(
          "shows_others",
          &PyRuntime::shows_others,
          "Some module shows another tensor than the one put there last.")
      .def(
          "trains_others",
          &PyRuntime::trains_others,
          "requires_grad of some parameter is not what it was at first.")
      .def(
          "in_forward",
          [](PyRuntime& self) { return self.runtime().calls().in_forward(); },
          NoGil())
      .def(
          "weights_written",
          [](PyRuntime& self, UnitId unit) {
            self.runtime().calls().weights_written(unit);
          },
          py::arg("unit"),
          NoGil())
      .def(
          "gathered_written",
          [](PyRuntime& self, UnitId unit) {
            self.runtime().calls().gathered_written(unit);
          },
          py::arg("unit"),
          NoGil())
      .def("unshard", &PyRuntime::unshard, py::arg("unit"), py::arg("awaits"))
      .def("reshard", &PyRuntime::reshard, py::arg("unit"))
      .def(
          "set_keeps",
          &PyRuntime::set_keeps,
          py::arg("unit"),
          py::arg("keeps"))
      .def("show_shards", &PyRuntime::show_shards, py::arg("unit"))
      .def(
          "set_policy",
          [](PyRuntime& self, UnitId unit, const UnitPolicy& policy) {
            self.runtime().gathers().set_policy(unit, policy);
          },
          py::arg("unit"),
          py::arg("policy"),
          NoGil())
      .def(
          "set_max_grad_slots",
          [](PyRuntime& self, int max_grad_slots) {
            self.runtime().set_max_grad_slots(max_grad_slots);
          },
          py::arg("max_grad_slots"),
          NoGil())
      .def("parameter_norms", &PyRuntime::parameter_norms, NoGil())
      .def("main_grad", &PyRuntime::main_grad, py::arg("weight"), NoGil())
      .def(
          "float8_inputs",
          &PyRuntime::float8_inputs,
          "Returns the number of inputs of layers with FP8 weights, and the "
          "number of calls that found their input quantized.")
      .def("take_trace", &PyRuntime::take_trace, NoGil())
      .def("set_keeps_trace", &PyRuntime::set_keeps_trace, py::arg("keeps"))
      .def(
          "report_nan_in_param_grad",
          &PyRuntime::report_nan_in_param_grad,
          py::arg("reports"),
          NoGil())
      .def(
          "reset",
          [](PyRuntime& self) { self.runtime().reset(); },
          NoGil())
      .def(
          "set_is_last_microbatch",
          [](PyRuntime& self, bool last) {
            self.runtime().set_is_last_microbatch(last);
          },
          py::arg("last"),
          NoGil());

  py::class_<nn::LossOptions>(m, "LossOptions")
      .def(
          py::init([](bool mean,
                      std::int64_t ignore_index,
                      std::int64_t chunk_tokens) {
            return nn::LossOptions{
                .reduction =
                    mean ? nn::LossReduction::mean : nn::LossReduction::sum,
                .ignore_index = ignore_index,
                .chunk_tokens = chunk_tokens};
          }),
          py::kw_only(),
          py::arg("mean"),
          py::arg("ignore_index"),
          py::arg("chunk_tokens"));
  m.def(
      "linear_cross_entropy",
      &linear_cross_entropy,
      py::arg("input"),
      py::arg("weight"),
      py::arg("target"),
      py::arg("options"),
      py::arg("runtime"),
      NoGil());
}

}  // namespace flatshard::python
