#include "flatshard/checkpoint/changed_weights.h"
#include "flatshard/checkpoint/float8_blocks.h"
#include "flatshard/checkpoint/weight_stream.h"
#include "python/csrc/bind.h"
#include "python/csrc/py_unit.h"

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace flatshard::python {
namespace {

using Units = std::vector<std::shared_ptr<PyUnit>>;
using Shape = std::vector<std::int64_t>;

std::vector<const ParamGroup*> const_groups_of(const Units& units) {
  const auto groups = groups_of(units);
  return {groups.begin(), groups.end()};
}

DtypeOf wanted_dtype(std::optional<at::ScalarType> dtype) {
  return dtype ? dtype_of_weights(*dtype) : compute_dtype_of;
}

/// A WeightStream and the units that it reads.
class PyWeightStream {
 public:
  PyWeightStream(
      Units units,
      std::optional<at::ScalarType> dtype,
      const std::shared_ptr<Mesh>& mesh)
      : units_(std::move(units)),
        stream_(
            const_groups_of(units_),
            {.dtype_of = wanted_dtype(dtype), .mesh = mesh}) {}

  std::vector<std::tuple<std::string, at::ScalarType, Shape>> metadata() const {
    std::vector<std::tuple<std::string, at::ScalarType, Shape>> specs;
    for (const StreamedSpec& spec : stream_.metadata()) {
      specs.emplace_back(spec.name, spec.dtype, spec.shape);
    }
    return specs;
  }
  std::optional<std::vector<std::pair<std::string, at::Tensor>>> next() {
    auto tensors = stream_.next();
    if (!tensors) {
      return std::nullopt;
    }
    std::vector<std::pair<std::string, at::Tensor>> named;
    for (StreamedTensor& each : *tensors) {
      named.emplace_back(std::move(each.name), std::move(each.tensor));
    }
    return named;
  }
  void gather_ahead() { stream_.gather_ahead(); }

 private:
  Units units_;
  WeightStream stream_;
};

/// ChangedWeights and the units that it reads.
class PyChangedWeights {
 public:
  using Changed = std::tuple<std::string, Shape, at::Tensor, at::Tensor>;

  PyChangedWeights(
      Units units,
      std::optional<at::ScalarType> dtype,
      const std::shared_ptr<Mesh>& mesh)
      : units_(std::move(units)),
        changed_(const_groups_of(units_), wanted_dtype(dtype), mesh) {}

  std::optional<std::vector<Changed>> next() {
    const auto parameters = changed_.next();
    if (!parameters) {
      return std::nullopt;
    }
    std::vector<Changed> result;
    for (const ChangedParameter& p : *parameters) {
      result.emplace_back(p.name, p.shape, p.indices, p.values);
    }
    return result;
  }
  bool finish(bool sent) { return changed_.finish(sent); }

 private:
  Units units_;
  ChangedWeights changed_;
};

}  // namespace

void bind_weights(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<PyWeightStream>(
      m,
      "WeightStream",
      "The full parameters of units, one group after another.")
      .def(
          py::init<
              Units,
              std::optional<at::ScalarType>,
              const std::shared_ptr<Mesh>&>(),
          py::arg("units"),
          py::arg("dtype").none(true),
          py::arg("mesh"))
      .def("metadata", &PyWeightStream::metadata)
      .def(
          "next",
          &PyWeightStream::next,
          NoGil(),
          "Returns names and tensors of the next group; None at the end. "
          "Collective.")
      .def("gather_ahead", &PyWeightStream::gather_ahead, NoGil());

  py::class_<PyChangedWeights>(
      m,
      "ChangedWeights",
      "The elements that changed since they were returned last.")
      .def(
          py::init<
              Units,
              std::optional<at::ScalarType>,
              const std::shared_ptr<Mesh>&>(),
          py::arg("units"),
          py::arg("dtype").none(true),
          py::arg("mesh"))
      .def(
          "next",
          &PyChangedWeights::next,
          NoGil(),
          "Returns name, shape, indices and values of the parameters of the "
          "next group; None at the end. Collective.")
      .def(
          "finish",
          &PyChangedWeights::finish,
          py::arg("sent"),
          NoGil(),
          "Ends a pass. Its patches count as sent if they were, on all "
          "ranks. Collective.");

  m.def(
      "is_linear_of_a_block",
      [](const std::string& name, std::size_t num_dims) {
        return is_linear_of_a_block(name, num_dims);
      },
      py::arg("name"),
      py::arg("num_dims"));
  m.def("block_scales_name", &block_scales_name, py::arg("weight"));
  m.def("block_scales_shape", &block_scales_shape, py::arg("weight"));
  m.def(
      "quantize_blocks",
      [](const std::string& name,
         const at::Tensor& weight,
         const std::string& advice) {
        float8::Plane plane = quantize_blocks(name, weight, advice);
        return std::pair(plane.data, plane.scales);
      },
      py::arg("name"),
      py::arg("weight"),
      py::arg("advice"),
      NoGil());
}

}  // namespace flatshard::python
