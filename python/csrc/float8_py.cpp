#include "flatshard/core/error.h"
#include "flatshard/float8/float8_matmul.h"
#include "flatshard/float8/quantize.h"
#include "python/csrc/bind.h"
#include "python/csrc/float8_linear.h"
#include "python/csrc/py_unit.h"

#include <optional>
#include <string>
#include <vector>

namespace flatshard::python {
namespace {

float8::Axis axis_of(const std::string& name) {
  FLATSHARD_CHECK(
      name == "row" || name == "column",
      config,
      "axis: expected 'row' or 'column', got '{}'",
      name);
  return name == "row" ? float8::Axis::row : float8::Axis::column;
}

std::pair<at::Tensor, at::Tensor> quantize(
    const at::Tensor& tensor,
    const float8::Quantizer& quantizer,
    const float8::PlaneOptions& options) {
  const float8::Plane plane = float8::quantize(tensor, quantizer, options);
  return {plane.data, plane.scales};
}

at::Tensor dequantize(
    const at::Tensor& data,
    const at::Tensor& scales,
    const std::string& recipe,
    const float8::DequantizeOptions& options) {
  return float8::dequantize({data, scales}, float8::recipe_of(recipe), options);
}

GatherParts gather_parts_of(const std::string& name) {
  FLATSHARD_CHECK(
      name == "unit" || name == "recomputed" || name == "module",
      config,
      "gather_parts: expected 'unit', 'recomputed' or 'module', got '{}'",
      name);
  return name == "unit"     ? GatherParts::unit
         : name == "module" ? GatherParts::module
                            : GatherParts::recomputed;
}

Float8Format make_format(
    const std::string& recipe,
    bool stored_columns,
    const std::string& gather_parts,
    bool emulate) {
  return {
      .recipe = float8::recipe_of(recipe),
      .stored_columns = stored_columns,
      .gather_parts = gather_parts_of(gather_parts),
      .emulate = emulate};
}

}  // namespace

void bind_float8(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<float8::Quantizer>(m, "Float8Quantizer")
      .def(
          py::init([](const std::string& recipe,
                      const std::string& format,
                      const std::string& rounding) {
            return float8::Quantizer{
                .recipe = float8::recipe_of(recipe),
                .format = float8::format_of(format),
                .rounding = float8::rounding_of(rounding)};
          }),
          py::kw_only(),
          py::arg("recipe"),
          py::arg("format"),
          py::arg("rounding"));
  py::class_<float8::PlaneOptions>(m, "Float8PlaneOptions")
      .def(
          py::init([](const std::string& axis,
                      bool transpose,
                      std::int64_t multiple,
                      const std::optional<at::Tensor>& amax,
                      const std::optional<at::Tensor>& scales) {
            return float8::PlaneOptions{
                .axis = axis_of(axis),
                .transpose = transpose,
                .multiple = multiple,
                .amax = amax.value_or(at::Tensor()),
                .scales = scales.value_or(at::Tensor())};
          }),
          py::kw_only(),
          py::arg("axis"),
          py::arg("transpose"),
          py::arg("multiple"),
          py::arg("amax").none(true),
          py::arg("scales").none(true));
  py::class_<float8::DequantizeOptions>(m, "Float8DequantizeOptions")
      .def(
          py::init([](const std::string& axis,
                      bool transpose,
                      at::ScalarType dtype) {
            return float8::DequantizeOptions{
                .axis = axis_of(axis),
                .transpose = transpose,
                .dtype = dtype};
          }),
          py::kw_only(),
          py::arg("axis"),
          py::arg("transpose"),
          py::arg("dtype"));
  m.def(
      "float8_quantize",
      &quantize,
      NoGil(),
      py::arg("tensor"),
      py::arg("quantizer"),
      py::arg("options"));
  m.def(
      "float8_dequantize",
      &dequantize,
      NoGil(),
      py::arg("data"),
      py::arg("scales"),
      py::arg("recipe"),
      py::arg("options"));
  m.def(
      "float8_linear",
      &float8_linear_sharing,
      NoGil(),
      py::arg("x"),
      py::arg("weight"),
      py::arg("bias"));
  m.def("float8_amax", &float8::amax_of, NoGil(), py::arg("tensor"));
  m.def(
      "float8_swizzle_mx_scales",
      &float8::swizzle_mx_scales,
      NoGil(),
      py::arg("scales"));
  m.def("float8_transpose", &float8::transpose_bytes, NoGil(), py::arg("data"));
  m.def(
      "float8_multiplies",
      [](const std::string& recipe, at::Device device) {
        return float8::multiplies(float8::recipe_of(recipe), device);
      },
      py::arg("recipe"),
      py::arg("device"),
      "Whether the device multiplies the recipe in FP8.");
  m.def(
      "float8_why_not_multiplied",
      [](const std::string& recipe, at::Device device) {
        return float8::why_not_multiplied(float8::recipe_of(recipe), device);
      },
      py::arg("recipe"),
      py::arg("device"),
      "Returns which GPU this is, and which ones multiply the recipe in FP8.");
  py::class_<Float8Format>(
      m,
      "Float8Format",
      "FP8 format of the weights of a unit.")
      .def(
          py::init(&make_format),
          py::kw_only(),
          py::arg("recipe"),
          py::arg("stored_columns"),
          py::arg("gather_parts"),
          py::arg("emulate"))
      .def(
          "why_not",
          [](const Float8Format& self, const std::vector<std::int64_t>& shape) {
            return self.why_not(shape);
          },
          py::arg("shape"),
          "Returns why a weight of this shape cannot be FP8, or an empty "
          "string.");
}

}  // namespace flatshard::python
