#include "flatshard/nn/cuda_float8.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

#include "flatshard/device/cuda_scope.h"
#include "flatshard/float8/cuda_planes.h"
#include "flatshard/nn/kernels/float8.h"

namespace flatshard::nn::cuda {
namespace {

bool is_wide(const at::Tensor& t) {
  return t.dim() == 2 && t.stride(1) == 1 && t.stride(0) % 8 == 0 &&
         t.size(1) % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// Both planes of a tensor [rows, columns], and what kernels take of them.
struct BothPlanes {
  BothPlanes(
      std::int64_t rows,
      std::int64_t columns,
      at::Device device,
      const at::Tensor& amax,
      const float8::Quantizer& q,
      std::int64_t multiple) {
    const auto make = [&](const float8::PlaneOptions& options) {
      return float8::plane_over(
          float8::empty_plane(rows, columns, device, q, options),
          rows,
          columns,
          q,
          options);
    };
    row = make({.amax = amax});
    column = make(
        {.axis = float8::Axis::column, .multiple = multiple, .amax = amax});
    args = {
        .row = float8::cuda::pointers_of(&row),
        .column = float8::cuda::pointers_of(&column),
        .padded_rows = column.padded_rows,
        .recipe = q.recipe,
        .format = q.format,
        .rounding = q.rounding};
  }
  Float8Planes planes() const { return {row.plane, column.plane}; }

  float8::PlaneView row;
  float8::PlaneView column;
  float8::kernels::Quantize args;
};

// Values that have no memory.
Float8Planes quantize_computed(
    const kernels::Float8Values& values,
    std::int64_t rows,
    std::int64_t columns,
    at::Device device,
    const at::Tensor& amax,
    const float8::Quantizer& q,
    std::int64_t multiple) {
  const detail::CudaDeviceScope scope(device);
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  BothPlanes both(rows, columns, device, amax, q, multiple);
  const auto found = float8::cuda::find_amax(
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
      both.args);
  kernels::quantize_values(values, both.args, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return both.planes();
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

Float8Planes quantize_swiglu(
    const at::Tensor& gate,
    const at::Tensor& up,
    const float8::Quantizer& q,
    std::int64_t multiple) {
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
      {},
      q,
      multiple);
}

Float8Planes quantize_swiglu_gradient(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up,
    const float8::Quantizer& q,
    std::int64_t multiple) {
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
      {},
      q,
      multiple);
}

Float8Planes quantize_norm(
    const at::Tensor& x,
    const at::Tensor& rstd,
    const at::Tensor& weight,
    const at::Tensor& amax,
    const float8::Quantizer& q,
    std::int64_t multiple) {
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
      amax,
      q,
      multiple);
}

Float8Planes quantize_side_by_side(
    const at::Tensor& left,
    const at::Tensor& right,
    const at::Tensor& amax,
    const float8::Quantizer& q,
    std::int64_t multiple) {
  const detail::CudaDeviceScope scope(left.device());
  const std::int64_t rows = left.size(0);
  const std::int64_t width = left.size(1);
  BothPlanes both(rows, 2 * width, left.device(), amax, q, multiple);
  for (const at::Tensor& half : {left, right}) {
    float8::kernels::quantize_tiles(
        {.data = half.const_data_ptr(),
         .rows = rows,
         .columns = width,
         .dtype = float8::kernels::Dtype::bf16},
        both.args,
        at::cuda::getCurrentCUDAStream());
    both.args.row.data += width * both.args.row.column_stride;
    both.args.column.data += width * both.args.column.column_stride;
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return both.planes();
}

}  // namespace flatshard::nn::cuda
