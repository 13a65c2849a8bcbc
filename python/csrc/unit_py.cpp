#include "flatshard/core/error.h"
#include "flatshard/diagnostics/nan_check.h"
#include "flatshard/diagnostics/norms.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/loss.h"
#include "flatshard/unit/runtime.h"
#include "python/csrc/bind.h"
#include "python/csrc/collect_tensors.h"
#include "python/csrc/grad_views.h"
#include "python/csrc/parameter_views.h"
#include "python/csrc/py_unit.h"

#include <optional>
#include <string>
#include <vector>

namespace flatshard::python {
namespace {

std::vector<ParameterViews::UnitViews> views_of(
    const std::vector<std::vector<ParameterViews::Place>>& places,
    const std::vector<std::shared_ptr<GradViews>>& grads) {
  std::vector<ParameterViews::UnitViews> views;
  for (std::size_t unit = 0; unit < places.size(); ++unit) {
    views.push_back({places[unit], grads.at(unit)});
  }
  return views;
}

// What may be freed by a thread without the GIL.
std::shared_ptr<py::object> held_with_gil(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

/// The Runtime and what Python sees of its parameters.
class PyRuntime {
 public:
  PyRuntime(
      const std::shared_ptr<Mesh>& mesh,
      const std::vector<std::shared_ptr<PyUnit>>& units,
      std::vector<UnitId> parents,
      const std::vector<std::vector<ParameterViews::Place>>& places,
      const std::vector<std::shared_ptr<GradViews>>& grads,
      py::object before_forward,
      py::object before_backward,
      int prefetch,
      bool copy_engines,
      bool slots_on_demand,
      bool cuda_graphs,
      int graph_warmup_steps,
      bool audit_graphs,
      bool emulate_graphs)
      : views_(std::make_shared<ParameterViews>(
            views_of(places, grads),
            std::move(before_forward),
            std::move(before_backward))) {
    std::vector<std::unique_ptr<Unit>> list;
    for (const auto& unit : units) {
      list.push_back(unit->adopt(static_cast<UnitId>(list.size())));
    }
    std::shared_ptr<Runtime> runtime;
    {
      const py::gil_scoped_release no_gil;
      runtime = Runtime::create(
          mesh,
          std::move(list),
          std::move(parents),
          {.prefetch = prefetch,
           .copy_engines = copy_engines ? CopyEngines::all() : CopyEngines{},
           .foreign_writes = true,
           .slots_on_demand = slots_on_demand,
           .unused_grads_stay_undefined = true,
           .graphs = {
               .enabled = cuda_graphs,
               .warmup_steps = graph_warmup_steps,
               .audit = audit_graphs,
               .emulate_on_cpu = emulate_graphs}});
      runtime->add_observer(views_);
      if (cuda_graphs) {
        runtime->region_graphs()->set_unit_program(
            {.context = sink_,
             .around_capture = [views =
                                    views_](const Unit& unit, bool captures) {
               const py::gil_scoped_acquire gil;
               views->capture(unit.id(), captures);
               if (!captures) {
                 // autograd restores an error of Python before it throws it;
                 // a capture that fails is no error.
                 PyErr_Clear();
               }
             }});
      }
    }
    for (const auto& unit : units) {
      unit->keep(runtime);
    }
    sink_->wgrad_sink = runtime;
    runtime_ = Released<Runtime>(std::move(runtime));
  }

  at::Tensor linear(
      const at::Tensor& x,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias) const {
    return nn::linear(x, weight, bias.value_or(at::Tensor()), {}, sink_);
  }

  const nn::ModuleContextPtr& sink() const { return sink_; }

  void forward_begin(UnitId unit, py::handle args, py::handle kwargs) {
    nn::TensorList tensors;
    collect_tensors(args, tensors);
    collect_tensors(kwargs, tensors);
    views_->check_no_hook();
    {
      const py::gil_scoped_release no_gil;
      runtime_->forward_begin(unit, tensors);
    }
    views_->unit_begins(unit);
  }
  void forward_end(UnitId unit, py::handle output, bool more_follow) {
    nn::TensorList tensors;
    collect_tensors(output, tensors);
    {
      const py::gil_scoped_release no_gil;
      runtime_->forward_end(unit, tensors, more_follow);
    }
    views_->unit_ended(unit, more_follow);
  }
  void forward_error(UnitId unit) {
    if (views_->captures()) {
      return;  // forward_begin refused
    }
    {
      const py::gil_scoped_release no_gil;
      runtime_->forward_error(unit);
    }
    views_->unit_ended(unit);
  }
  void unshard(UnitId unit, bool awaits) {
    views_->check_no_hook();
    {
      const py::gil_scoped_release no_gil;
      runtime_->unshard(unit, awaits);
    }
    if (awaits) {
      views_->show(unit, true);
    }
  }
  /// A replay's outputs, if it was one, and whether the caller is to tell of
  /// the forward that it runs.
  using Outcome = std::pair<std::optional<nn::TensorList>, bool>;
  Outcome graph_forward(
      UnitId unit,
      py::object function,
      nn::TensorList inputs,
      nn::TensorList constants,
      std::string obstacle,
      std::string difference) {
    const RegionGraphs::UnitForward forward{
        .unit = unit,
        .fn =
            [function = held_with_gil(std::move(function))](
                const nn::TensorList& tensors) {
              const py::gil_scoped_acquire gil;
              return (*function)(tensors).cast<nn::TensorList>();
            },
        .inputs = std::move(inputs),
        .constants = std::move(constants),
        .obstacle = std::move(obstacle),
        .difference = std::move(difference)};
    const py::gil_scoped_release no_gil;
    auto outcome = graphs().run_unit(forward);
    return {std::move(outcome.outputs), outcome.watched};
  }
  void graph_ran(
      UnitId unit,
      const nn::TensorList& inputs,
      const nn::TensorList& outputs) const {
    graphs().unit_ran(unit, inputs, outputs);
  }
  GraphStats graph_stats() const { return runtime_->graph_stats(); }
  bool shows_others() const { return views_->shows_others(); }
  void reshard(UnitId unit) {
    views_->check_no_hook();
    views_->show(unit, false);
    const py::gil_scoped_release no_gil;
    runtime_->reshard(unit);
  }
  /// Name, 2-norm of the weight, and of the gradient if there is one.
  using Norm = std::tuple<std::string, double, std::optional<double>>;
  std::vector<Norm> parameter_norms() {
    std::vector<Norm> norms;
    for (const ParameterNorm& n : flatshard::parameter_norms(runtime())) {
      norms.emplace_back(n.name, n.weight, n.grad);
    }
    return norms;
  }
  void report_nan_in_param_grad(bool enabled) {
    runtime();
    if (!nan_check_ && enabled) {
      nan_check_ = NanCheck::install(runtime_.shared());
    }
    if (nan_check_) {
      nan_check_->set_enabled(enabled);
    }
  }
  Runtime& runtime() {
    views_->check_no_hook();
    return *runtime_;
  }

 private:
  RegionGraphs& graphs() const {
    FLATSHARD_CHECK(
        runtime_->region_graphs() != nullptr,
        internal,
        "no unit has cuda_graph=True");
    return *runtime_->region_graphs();
  }

  std::shared_ptr<ParameterViews> views_;
  nn::ModuleContextPtr sink_ = c10::make_intrusive<nn::ModuleContext>();
  std::shared_ptr<NanCheck> nan_check_;
  Released<Runtime> runtime_;
};

// runtime: takes the weight's gradient where it is reduced; may be null.
at::Tensor linear_cross_entropy(
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& target,
    bool mean,
    std::int64_t ignore_index,
    std::int64_t chunk_tokens,
    const PyRuntime* runtime) {
  return nn::linear_cross_entropy(
      input,
      weight,
      target,
      {.reduction = mean ? nn::LossReduction::mean : nn::LossReduction::sum,
       .ignore_index = ignore_index,
       .chunk_tokens = chunk_tokens},
      runtime != nullptr ? runtime->sink() : nn::ModuleContextPtr());
}

// The reductions' thread calls it, and may be its last owner.
GradientPipeline::Hook reduced_hook(py::object hook) {
  if (hook.is_none()) {
    return {};
  }
  return [held = held_with_gil(std::move(hook))](const at::Tensor& reduced) {
    const py::gil_scoped_acquire gil;
    (*held)(reduced);
  };
}

}  // namespace

void bind_unit(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<ParameterViews::Place>(m, "Place")
      .def(
          py::init([](py::dict parameters,
                      py::str name,
                      py::object whole,
                      py::object shard) {
            return ParameterViews::Place{
                std::move(parameters),
                std::move(name),
                std::move(whole),
                std::move(shard)};
          }),
          py::arg("parameters"),
          py::arg("name"),
          py::arg("whole"),
          py::arg("shard"));

  py::class_<PyUnit::Options>(m, "UnitOptions", "How a unit is sharded.")
      .def(
          py::init([](std::string strategy,
                      const std::string& granularity,
                      const py::object& compute_dtype,
                      double max_padding,
                      bool offload,
                      bool pin_memory,
                      bool grads_in_place,
                      bool copy_engines) {
            PyUnit::Options options{
                .strategy = std::move(strategy),
                .granularity = Granularity::parse(granularity),
                .group =
                    {.offload = offload,
                     .pin_memory = pin_memory,
                     .layout = {.max_padding = max_padding}},
                .grads_in_place = grads_in_place,
                .copy_engines = copy_engines};
            if (!compute_dtype.is_none()) {
              options.compute_dtype = dtype_of(compute_dtype);
            }
            return options;
          }),
          py::kw_only(),
          py::arg("strategy"),
          py::arg("granularity"),
          py::arg("compute_dtype"),
          py::arg("max_padding"),
          py::arg("offload"),
          py::arg("pin_memory"),
          py::arg("grads_in_place"),
          py::arg("copy_engines"));

  py::class_<PyUnit, std::shared_ptr<PyUnit>>(
      m,
      "Unit",
      "The sharded parameters of one unit.")
      .def(
          py::init<
              const std::vector<PyUnit::Member>&,
              const std::shared_ptr<Mesh>&,
              PyUnit::Options>(),
          py::arg("members"),
          py::arg("mesh"),
          py::arg("options"))
      .def_property_readonly("num_parameters", &PyUnit::num_parameters)
      .def_property_readonly("num_groups", &PyUnit::num_groups)
      .def_property_readonly(
          "offloads",
          [](const PyUnit& self) {
            for (std::size_t g = 0; g < self.num_groups(); ++g) {
              if (self.group_at(g).options().offload) {
                return true;
              }
            }
            return false;
          })
      .def("write_grads_in_place", &PyUnit::write_grads_in_place)
      .def("whole", &PyUnit::whole)
      .def("shard", &PyUnit::shard)
      .def("grad", &PyUnit::grad)
      .def("cuts", &PyUnit::cuts)
      .def("shard_of_ranks", &PyUnit::shard_of_ranks)
      .def("trainable", &PyUnit::trainable)
      .def(
          "mark_written",
          [](PyUnit& self) {
            for (std::size_t g = 0; g < self.num_groups(); ++g) {
              self.group_at(g).weights().mark_foreign_write();
            }
          },
          "Somebody else may have written the shards.")
      .def(
          "set_divisor",
          [](PyUnit& self, double divisor) {
            for (std::size_t g = 0; g < self.num_groups(); ++g) {
              self.group_at(g).set_divisor(divisor);
            }
          })
      .def(
          "set_reduced_hook",
          [](PyUnit& self, py::object hook) {
            const auto call = reduced_hook(std::move(hook));
            for (std::size_t g = 0; g < self.num_groups(); ++g) {
              self.group_at(g).gradients().set_hook(call);
            }
          },
          "None for none.")
      .def(
          "set_attribute",
          [](PyUnit& self,
             std::size_t i,
             const std::string& key,
             const std::string& value) {
            self.group_at(self.group_index(i))
                .set_attribute(self.index_in_group(i), key, value);
          })
      .def(
          "drop",
          [](PyUnit& self, std::size_t i) {
            self.group_at(self.group_index(i)).drop(self.index_in_group(i));
          },
          "Checkpoints leave parameter i out from now on.")
      .def("set_names", &PyUnit::set_names);

  py::class_<GradViews, std::shared_ptr<GradViews>>(
      m,
      "GradViews",
      "The gradients of a unit as `.grad`s of its shards.")
      .def(
          py::init<
              std::shared_ptr<PyUnit>,
              std::vector<at::Tensor>,
              py::object,
              py::object>(),
          py::arg("unit"),
          py::arg("shards"),
          py::arg("beside"),
          py::arg("rows_of"))
      .def("take", &GradViews::take)
      .def("release", &GradViews::release);

  py::class_<PyRuntime>(m, "Runtime", "Gathers, releases and reduces.")
      .def(
          py::init<
              const std::shared_ptr<Mesh>&,
              const std::vector<std::shared_ptr<PyUnit>>&,
              std::vector<UnitId>,
              const std::vector<std::vector<ParameterViews::Place>>&,
              const std::vector<std::shared_ptr<GradViews>>&,
              py::object,
              py::object,
              int,
              bool,
              bool,
              bool,
              int,
              bool,
              bool>(),
          py::arg("mesh"),
          py::arg("units"),
          py::arg("parents"),
          py::arg("places"),
          py::arg("grads"),
          py::arg("before_forward"),
          py::arg("before_backward"),
          py::arg("prefetch"),
          py::arg("copy_engines"),
          py::arg("slots_on_demand"),
          py::arg("cuda_graphs"),
          py::arg("graph_warmup_steps"),
          py::arg("audit_graphs"),
          py::arg("emulate_graphs"))
      .def(
          "linear",
          &PyRuntime::linear,
          "torch.nn.functional.linear whose backward writes the gradients of "
          "weight and bias into the memory that is reduced. Both are whole "
          "parameters of this runtime's units.",
          py::arg("input"),
          py::arg("weight"),
          py::arg("bias"),
          NoGil())
      .def("forward_begin", &PyRuntime::forward_begin)
      .def("forward_end", &PyRuntime::forward_end)
      .def("forward_error", &PyRuntime::forward_error)
      .def(
          "graph_forward",
          &PyRuntime::graph_forward,
          py::arg("unit"),
          py::kw_only(),
          py::arg("function"),
          py::arg("inputs"),
          py::arg("constants"),
          py::arg("obstacle"),
          py::arg("difference"),
          "RegionGraphs::run_unit: outputs of a replay or None, and whether "
          "graph_ran is to follow the forward. `function` takes a list of "
          "tensors and returns one, is kept, and must not keep the model.")
      .def("graph_ran", &PyRuntime::graph_ran, NoGil())
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
          [](PyRuntime& self) { self.runtime().reset_graphs(); },
          NoGil())
      .def(
          "shows_others",
          &PyRuntime::shows_others,
          "Some module shows another tensor than the one put there last.")
      .def("unshard", &PyRuntime::unshard)
      .def("reshard", &PyRuntime::reshard)
      .def(
          "set_policy",
          [](PyRuntime& self,
             UnitId unit,
             bool reshard_after_forward,
             bool reshard_after_backward,
             bool unshard_in_backward,
             std::optional<std::vector<UnitId>> forward_prefetch,
             std::optional<std::vector<UnitId>> backward_prefetch) {
            self.runtime().set_policy(
                unit,
                {reshard_after_forward,
                 reshard_after_backward,
                 unshard_in_backward,
                 std::move(forward_prefetch),
                 std::move(backward_prefetch)});
          },
          py::arg("unit"),
          py::kw_only(),
          py::arg("reshard_after_forward"),
          py::arg("reshard_after_backward"),
          py::arg("unshard_in_backward"),
          py::arg("forward_prefetch"),
          py::arg("backward_prefetch"),
          NoGil())
      .def(
          "set_sync_gradients",
          [](PyRuntime& self, bool sync) {
            self.runtime().set_sync_gradients(sync);
          },
          NoGil())
      .def(
          "set_max_grad_slots",
          [](PyRuntime& self, int max_grad_slots) {
            self.runtime().set_max_grad_slots(max_grad_slots);
          },
          NoGil())
      .def("parameter_norms", &PyRuntime::parameter_norms, NoGil())
      .def(
          "report_nan_in_param_grad",
          &PyRuntime::report_nan_in_param_grad,
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
          NoGil());

  m.def(
      "linear_cross_entropy",
      &linear_cross_entropy,
      py::arg("input"),
      py::arg("weight"),
      py::arg("target"),
      py::arg("mean"),
      py::arg("ignore_index"),
      py::arg("chunk_tokens"),
      py::arg("runtime").none(true),
      NoGil());
}

}  // namespace flatshard::python
