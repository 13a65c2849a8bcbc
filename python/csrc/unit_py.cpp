#include "flatshard/layout/padding.h"
#include "flatshard/unit/parameter_storage.h"
#include "python/csrc/bind.h"
#include "python/csrc/grad_views.h"
#include "python/csrc/parameter_views.h"
#include "python/csrc/py_runtime.h"
#include "python/csrc/py_unit.h"

#include <optional>
#include <string>
#include <vector>

namespace flatshard::python {
namespace {

using ReducedHook = py::typing::Callable<void(at::Tensor)>;
using MakeTensor = py::typing::Callable<at::Tensor(at::Tensor, at::Tensor)>;

// The reductions' thread calls it, and may be its last owner.
GradientPipeline::Hook reduced_hook(std::optional<ReducedHook> hook) {
  if (!hook) {
    return {};
  }
  return [held = held_with_gil(*std::move(hook))](const at::Tensor& reduced) {
    const py::gil_scoped_acquire gil;
    (*held)(reduced);
  };
}

}  // namespace

void bind_unit(py::module_& m) {
  py::class_<ParameterViews::Place>(m, "Place")
      .def(
          py::init([](py::dict parameters,
                      py::str name,
                      py::object whole,
                      py::object shard,
                      py::object shown) {
            return ParameterViews::Place{
                std::move(parameters),
                std::move(name),
                std::move(whole),
                std::move(shard),
                std::move(shown)};
          }),
          py::arg("parameters"),
          py::arg("name"),
          py::arg("whole"),
          py::arg("shard"),
          py::arg("shown") = py::none());

  py::class_<PyUnit::Member>(m, "Member", "One parameter to shard.")
      .def(
          py::init([](std::string name,
                      at::Tensor whole,
                      at::Tensor values,
                      std::optional<at::ScalarType> compute_dtype,
                      at::ScalarType reduce_dtype,
                      bool float8,
                      bool trainable,
                      std::int64_t apart,
                      bool has_weights,
                      const std::string& granularity,
                      bool float32_states) {
            return PyUnit::Member{
                .name = std::move(name),
                .whole = std::move(whole),
                .values = std::move(values),
                .compute_dtype = compute_dtype,
                .reduce_dtype = reduce_dtype,
                .float8 = float8,
                .trainable = trainable,
                .apart = apart,
                .has_weights = has_weights,
                .float32_states = float32_states,
                .granularity = Granularity::parse(granularity)};
          }),
          py::kw_only(),
          py::arg("name"),
          py::arg("whole"),
          py::arg("values"),
          py::arg("compute_dtype"),
          py::arg("reduce_dtype"),
          py::arg("float8"),
          py::arg("trainable"),
          py::arg("apart"),
          py::arg("has_weights"),
          py::arg("granularity"),
          py::arg("float32_states") = false);

  py::class_<PyUnit::Options>(m, "UnitOptions", "Sharding options of a unit.")
      .def(
          py::init([](std::string strategy,
                      bool offload,
                      bool pin_memory,
                      bool grads_in_place,
                      bool peers_read,
                      std::optional<Float8Format> float8,
                      std::int64_t post_forward_ranks,
                      std::optional<std::shared_ptr<Mesh>> part,
                      std::pair<std::int64_t, std::int64_t> slices,
                      std::optional<bool> int8_states) {
            return PyUnit::Options{
                .strategy = std::move(strategy),
                .group =
                    {.post_forward_ranks = post_forward_ranks,
                     .offload = offload,
                     .pin_memory = pin_memory},
                .grads_in_place = grads_in_place,
                .peers_read = peers_read,
                .float8 = std::move(float8),
                .int8_states = int8_states,
                .part = std::move(part).value_or(nullptr),
                .number_of_slices = slices.first,
                .which_slice = slices.second};
          }),
          py::kw_only(),
          py::arg("strategy"),
          py::arg("offload"),
          py::arg("pin_memory"),
          py::arg("grads_in_place"),
          py::arg("peers_read"),
          py::arg("float8"),
          py::arg("post_forward_ranks"),
          py::arg("part") = py::none(),
          py::arg("slices") = std::pair<std::int64_t, std::int64_t>(1, 0),
          py::arg("int8_states") = py::none());

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
      .def(
          "join",
          &PyUnit::join,
          py::arg("other"),
          "Appends the parameters of `other` to this unit. Its own parameters "
          "keep their numbers.")
      .def("whole", &PyUnit::whole, py::arg("i"))
      .def("shard", &PyUnit::shard, py::arg("i"))
      .def("grad", &PyUnit::grad, py::arg("i"))
      .def("cuts", &PyUnit::cuts, py::arg("i"))
      .def("shard_of_ranks", &PyUnit::shard_of_ranks, py::arg("i"))
      .def("trainable", &PyUnit::trainable, py::arg("i"))
      .def("group_index", &PyUnit::group_index, py::arg("i"))
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
          },
          py::arg("divisor"))
      .def(
          "set_sums_only",
          [](PyUnit& self, bool sums_only) {
            for (std::size_t g = 0; g < self.num_groups(); ++g) {
              self.group_at(g).set_sums_only(sums_only);
            }
          },
          py::arg("sums_only"),
          "Makes collectives only sum; means are computed afterwards.")
      .def(
          "set_reduced_hook",
          [](PyUnit& self, std::optional<ReducedHook> hook) {
            const auto call = reduced_hook(std::move(hook));
            for (std::size_t g = 0; g < self.num_groups(); ++g) {
              self.group_at(g).gradients().set_hook(call);
            }
          },
          py::arg("hook"),
          "None for none.")
      .def(
          "drop",
          [](PyUnit& self, std::size_t i) {
            self.group_at(self.group_index(i)).drop(self.index_in_group(i));
          },
          py::arg("i"),
          "Checkpoints leave parameter i out from now on.")
      .def(
          "set_part",
          [](PyUnit& self,
             std::size_t i,
             const std::optional<std::vector<PyUnit::Cut>>& cuts,
             std::pair<std::int64_t, std::int64_t> outside) {
            self.set_part(
                i,
                cuts,
                {.index = outside.first, .count = outside.second});
          },
          py::arg("i"),
          py::arg("cuts"),
          py::arg("outside"),
          "Makes parameter i the indices [start, end) of dimension `dim` of a "
          "tensor with `size` indices there, for each (dim, size, start, end); "
          "None: it stays what it is. `outside`: (index, count) of this rank "
          "among the ranks outside the model's mesh that have the same part.")
      .def("set_names", &PyUnit::set_names, py::arg("unit"), py::arg("names"))
      .def(
          "set_access_error",
          &PyUnit::set_access_error,
          "Sets the error of reading unsharded parameter i, or a view of it, "
          "while "
          "it has no memory. After set_names.",
          py::arg("i"),
          py::arg("text"));

  m.def(
      "note_shared",
      &ParameterStorage::note_shared,
      "Notes that an array of another library shares the memory of `tensor`. "
      "If that belongs to an unsharded parameter, its reshard is an error.",
      py::arg("tensor"));
  m.def(
      "describe_excessive_padding",
      [](const std::vector<std::shared_ptr<PyUnit>>& units,
         double max_padding) {
        const auto groups = groups_of(units);
        std::vector<const FlatLayout*> layouts;
        for (const ParamGroup* group : groups) {
          layouts.push_back(&group->layout());
        }
        // A layout keeps the names of its first call, and a unit that becomes
        // a part of a model renames its parameters.
        const auto name_of = [&](const FlatLayout& layout, std::int64_t i) {
          for (const ParamGroup* group : groups) {
            if (&group->layout() == &layout) {
              return group->parameters().at(i).names.front();
            }
          }
          return layout.spec(i).name;
        };
        return flatshard::describe_excessive_padding(
            layouts,
            max_padding,
            /*element_nbytes=*/4,
            kNegligiblePaddingNbytes,
            name_of);
      },
      py::arg("units"),
      py::arg("max_padding"),
      "A sentence about the padding of a model, or None where it is not worth "
      "one.");

  py::class_<GradViews, std::shared_ptr<GradViews>>(
      m,
      "GradViews",
      "The gradients of a unit as `.grad`s of its shards.")
      .def(
          py::init<
              std::shared_ptr<PyUnit>,
              std::vector<at::Tensor>,
              MakeTensor,
              MakeTensor>(),
          py::arg("unit"),
          py::arg("shards"),
          py::arg("beside"),
          py::arg("rows_of"))
      .def("take", &GradViews::take)
      .def("release", &GradViews::release);
}

}  // namespace flatshard::python
