#include "flatshard/ops/float8/cuda_float8.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>

#include <optional>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/kernel_launch.h"
#include "flatshard/float8/cuda_planes.h"
#include "flatshard/ops/kernels/float8.h"

namespace flatshard::nn::cuda {
namespace {

bool is_wide(const at::Tensor& t) {
  return t.dim() == 2 && t.stride(1) == 1 && t.stride(0) % 8 == 0 &&
         t.size(1) % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// The requested planes of a tensor [rows, columns], and the kernels' arguments.
struct WantedPlanes {
  WantedPlanes(
      std::int64_t rows,
      std::int64_t columns,
      at::Device device,
      const float8::Quantizer& q,
      const Float8Wanted& wanted) {
    const auto make = [&](const float8::PlaneOptions& options) {
      return float8::plane_over(
          float8::empty_plane(rows, columns, device, q, options),
          rows,
          columns,
          q,
          options);
    };
    if (wanted.rows) {
      row = make({.amax = wanted.amax});
    }
    if (wanted.columns) {
      column = make(
          {.axis = float8::Axis::column,
           .multiple = wanted.multiple,
           .amax = wanted.amax});
    }
    args = {
        .row = float8::cuda::pointers_of(row ? &*row : nullptr),
        .column = float8::cuda::pointers_of(column ? &*column : nullptr),
        .padded_rows = column ? column->padded_rows : 0,
        .recipe = q.recipe,
        .format = q.format,
        .rounding = q.rounding};
  }
  Float8RowsAndColumns planes(at::Tensor amax) const {
    return {
        row ? row->plane : float8::Plane(),
        column ? column->plane : float8::Plane(),
        std::move(amax)};
  }

  std::optional<float8::PlaneView> row;
  std::optional<float8::PlaneView> column;
  float8::kernels::Quantize args;
};

// Values that have no memory.
template <class Values>
Float8RowsAndColumns quantize_computed(
    const Values& values,
    std::int64_t rows,
    std::int64_t columns,
    at::Device device,
    const float8::Quantizer& q,
    const Float8Wanted& wanted) {
  const detail::CudaDeviceScope scope(device);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  WantedPlanes planes(rows, columns, device, q, wanted);
  const at::Tensor found = float8::cuda::find_amax(
      rows,
      columns,
      device,
      {.all = [&](float* to) { kernels::values_amax(values, to, stream); },
       .rows_and_columns =
           [&](float* of_rows, float* of_columns) {
             kernels::values_row_and_column_amax(
                 values,
                 of_rows,
                 of_columns,
                 stream);
           }},
      planes.args);
  kernels::quantize_values(values, planes.args, stream);
  check_kernel_launch();
  const bool one =
      float8::traits_of(q.recipe).has_one_scale() && found.defined();
  return planes.planes(one ? found[0] : wanted.amax);
}

}  // namespace

bool is_aligned(const at::Tensor& tensor) {
  return tensor.is_contiguous() &&
         reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

bool quantizes(const at::Tensor& rows) {
  return rows.is_cuda() && rows.scalar_type() == at::kBFloat16 &&
         rows.numel() > 0 && is_wide(rows);
}

Float8RowsAndColumns quantize_swiglu(
    const at::Tensor& gate,
    const at::Tensor& up,
    const float8::Quantizer& q,
    const Float8Wanted& wanted) {
  return quantize_computed(
      kernels::SwigluValues{
          .gate = gate.const_data_ptr(),
          .up = up.const_data_ptr(),
          .gate_stride = gate.stride(0),
          .up_stride = up.stride(0),
          .rows = gate.size(0),
          .columns = gate.size(1)},
      gate.size(0),
      gate.size(1),
      gate.device(),
      q,
      wanted);
}

Float8RowsAndColumns quantize_swiglu_gradient(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up,
    const float8::Quantizer& q,
    const Float8Wanted& wanted) {
  FLATSHARD_CHECK(
      !float8::traits_of(q.recipe).has_one_scale() &&
          q.format == float8::Format::e4m3,
      internal,
      "gradients of SwiGLU: no kernel for {} and {}",
      float8::to_string(q.recipe),
      float8::to_string(q.format));
  return quantize_computed(
      kernels::SwigluGradientValues{
          .dy = dy.const_data_ptr(),
          .gate = gate.const_data_ptr(),
          .up = up.const_data_ptr(),
          .dy_stride = dy.stride(0),
          .gate_stride = gate.stride(0),
          .up_stride = up.stride(0),
          .rows = gate.size(0),
          .columns = 2 * gate.size(1)},
      gate.size(0),
      2 * gate.size(1),
      gate.device(),
      q,
      wanted);
}

Float8RowsAndColumns quantize_norm(
    const at::Tensor& x,
    const at::Tensor& rstd,
    const at::Tensor& weight,
    const float8::Quantizer& q,
    const Float8Wanted& wanted) {
  return quantize_computed(
      kernels::NormValues{
          .x = x.const_data_ptr(),
          .rstd = rstd.const_data_ptr<float>(),
          .weight = weight.const_data_ptr(),
          .float_weight = weight.scalar_type() == at::kFloat,
          .rows = x.size(0),
          .columns = x.size(1)},
      x.size(0),
      x.size(1),
      x.device(),
      q,
      wanted);
}

Float8RowsAndColumns quantize_side_by_side(
    const at::Tensor& left,
    const at::Tensor& right,
    const float8::Quantizer& q,
    const Float8Wanted& wanted) {
  const detail::CudaDeviceScope scope(left.device());
  const std::int64_t rows = left.size(0);
  const std::int64_t width = left.size(1);
  WantedPlanes planes(rows, 2 * width, left.device(), q, wanted);
  for (const at::Tensor& half : {left, right}) {
    float8::kernels::quantize_tiles(
        {.data = half.const_data_ptr(),
         .rows = rows,
         .columns = width,
         .dtype = float8::kernels::Dtype::bf16},
        planes.args,
        at::cuda::getCurrentCUDAStream());
    for (auto* plane : {&planes.args.row, &planes.args.column}) {
      if (plane->data != nullptr) {
        plane->data += width * plane->column_stride;
      }
    }
  }
  check_kernel_launch();
  return planes.planes(wanted.amax);
}

}  // namespace flatshard::nn::cuda
