#include "flatshard/float8/cuda_float8_ops.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>

#include "flatshard/core/error.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/device/kernel_launch.h"
#include "flatshard/float8/cuda_planes.h"

namespace flatshard::float8::cuda {
namespace {

using detail::CudaDeviceScope;

cudaStream_t stream() {
  return at::cuda::getCurrentCUDAStream().stream();
}

kernels::Dtype dtype_of(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat ? kernels::Dtype::f32
                                       : kernels::Dtype::bf16;
}

kernels::Values values_of(const at::Tensor& x) {
  return {
      .data = x.const_data_ptr(),
      .rows = x.size(0),
      .columns = x.size(1),
      .dtype = dtype_of(x)};
}

// Fills the scales of a tensor without elements with the scales of zeros.
void fill_scales(const Quantizer& q, const PlaneView& view) {
  if (view.given_scales || view.plane.scales.numel() == 0) {
    return;
  }
  if (q.recipe == Recipe::mxfp8) {
    view.plane.scales.view(at::kByte).zero_();
  } else {
    const Scale scale = has_power_of_two_scales(q.recipe)
                            ? scale_of_e8m0(0)
                            : float_scale_of(0.0F, q.format);
    view.plane.scales.fill_(scale.dequantize);
  }
}

}  // namespace

kernels::PlanePointers pointers_of(const PlaneView* view) {
  if (view == nullptr) {
    return {};
  }
  return {
      .data = view->data(),
      .row_stride = view->row_stride,
      .column_stride = view->column_stride,
      .scales = view->scales(),
      .scale_row_stride = view->grid.row_stride,
      .scale_column_stride = view->grid.column_stride,
      .given_scales = view->given_scales,
      .amax =
          view->amax.defined() ? view->amax.const_data_ptr<float>() : nullptr};
}

at::Tensor find_amax(
    std::int64_t rows,
    std::int64_t columns,
    at::Device device,
    const AmaxKernels& find,
    kernels::Quantize& args) {
  const auto missing = [](const kernels::PlanePointers& p) {
    return p.scales != nullptr && p.amax == nullptr;
  };
  const bool of_rows = missing(args.row);
  const bool of_columns = missing(args.column);
  if (!(of_rows || of_columns) ||
      (args.recipe != Recipe::tensorwise && args.recipe != Recipe::rowwise)) {
    return {};
  }
  const bool one = args.recipe == Recipe::tensorwise;
  const std::int64_t num_rows = one || !of_rows ? 0 : rows;
  const std::int64_t num =
      one ? 1 : num_rows + (of_columns ? columns : std::int64_t{0});
  at::Tensor made =
      at::zeros({num}, at::TensorOptions(device).dtype(at::kFloat));
  auto* found = made.mutable_data_ptr<float>();
  if (one) {
    args.row.amax = args.column.amax = found;
    find.all(found);
  } else {
    args.row.amax = of_rows ? found : args.row.amax;
    args.column.amax = of_columns ? found + num_rows : args.column.amax;
    find.rows_and_columns(
        of_rows ? found : nullptr,
        of_columns ? found + num_rows : nullptr);
  }
  check_kernel_launch();
  return made;
}

namespace {

at::Tensor find_amax(const at::Tensor& x, kernels::Quantize& args) {
  const kernels::Values values = values_of(x);
  return cuda::find_amax(
      x.size(0),
      x.size(1),
      x.device(),
      {.all = [&](float* to) { kernels::amax(values, to, stream()); },
       .rows_and_columns =
           [&](float* rows, float* columns) {
             kernels::row_and_column_amax(values, rows, columns, stream());
           }},
      args);
}

}  // namespace

void quantize(
    const at::Tensor& x,
    const Quantizer& q,
    const PlaneView* row,
    const PlaneView* column) {
  const CudaDeviceScope scope(x.device());
  kernels::Quantize args{
      .row = pointers_of(row),
      .column = pointers_of(column),
      .padded_rows = column != nullptr ? column->padded_rows : 0,
      .recipe = q.recipe,
      .format = q.format,
      .rounding = q.rounding};
  const bool only_rows = column == nullptr;
  if (only_rows && q.recipe == Recipe::tensorwise) {
    const auto amax = find_amax(x, args);
    kernels::quantize_flat(values_of(x), args, stream());
  } else if (x.numel() == 0) {
    for (const PlaneView* view : {row, column}) {
      if (view == nullptr) {
        continue;
      }
      fill_scales(q, *view);
      FLATSHARD_CHECK(
          !view->amax.defined(),
          config,
          "amax: expected none for an empty tensor in this plane");
    }
    return;
  } else if (
      only_rows && q.recipe == Recipe::rowwise && args.row.amax == nullptr &&
      x.size(1) <= kernels::kMaxRow) {
    kernels::quantize_rows(values_of(x), args, stream());
  } else {
    const auto amax = find_amax(x, args);
    kernels::quantize_tiles(values_of(x), args, stream());
  }
  check_kernel_launch();
}

bool requantizes(const Plane& rows, const Quantizer& q) {
  return q.recipe == Recipe::rowwise && q.format == Format::e4m3 &&
         rows.data.is_cuda() && rows.data.numel() > 0 &&
         rows.data.scalar_type() == at::kFloat8_e4m3fn &&
         rows.data.is_contiguous() && rows.scales.is_contiguous() &&
         rows.data.size(1) % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(rows.data.const_data_ptr()) % 8 == 0;
}

void requantize(
    const Plane& rows,
    const Quantizer& q,
    const PlaneView& column) {
  const CudaDeviceScope scope(rows.data.device());
  const kernels::RowPlane values{
      .data = static_cast<const std::uint8_t*>(rows.data.const_data_ptr()),
      .scales = rows.scales.const_data_ptr<float>(),
      .rows = rows.data.size(0),
      .columns = rows.data.size(1)};
  kernels::Quantize args{
      .column = pointers_of(&column),
      .padded_rows = column.padded_rows,
      .recipe = q.recipe,
      .format = q.format,
      .rounding = q.rounding};
  const auto amax = find_amax(
      values.rows,
      values.columns,
      rows.data.device(),
      {.rows_and_columns =
           [&](float* of_rows, float* of_columns) {
             kernels::row_and_column_amax(
                 values,
                 of_rows,
                 of_columns,
                 stream());
           }},
      args);
  kernels::requantize_tiles(values, args, stream());
  check_kernel_launch();
}

void dequantize(
    const at::Tensor& data,
    Format format,
    const ScaleGrid& grid,
    const at::Tensor& scales,
    at::Tensor& out) {
  if (data.numel() == 0) {
    return;
  }
  const CudaDeviceScope scope(data.device());
  kernels::dequantize(
      {.data = static_cast<const std::uint8_t*>(data.const_data_ptr()),
       .out = out.mutable_data_ptr(),
       .rows = data.size(0),
       .columns = data.size(1),
       .scales = scales.const_data_ptr(),
       .block_rows = grid.block_rows,
       .block_columns = grid.block_columns,
       .scale_row_stride = grid.row_stride,
       .scale_column_stride = grid.column_stride,
       .e8m0 = scales.scalar_type() == at::kFloat8_e8m0fnu,
       .format = format,
       .dtype = dtype_of(out)},
      stream());
  check_kernel_launch();
}

at::Tensor amax_of(const at::Tensor& x) {
  const CudaDeviceScope scope(x.device());
  at::Tensor found = at::zeros({}, x.options().dtype(at::kFloat));
  kernels::amax(
      {.data = x.const_data_ptr(),
       .rows = 1,
       .columns = x.numel(),
       .dtype = dtype_of(x)},
      found.mutable_data_ptr<float>(),
      stream());
  check_kernel_launch();
  return found;
}

void transpose_bytes(const at::Tensor& data, at::Tensor& out) {
  if (data.numel() == 0) {
    return;
  }
  const CudaDeviceScope scope(data.device());
  kernels::transpose_bytes(
      data.const_data_ptr<std::uint8_t>(),
      out.mutable_data_ptr<std::uint8_t>(),
      data.size(0),
      data.size(1),
      stream());
  check_kernel_launch();
}

void swizzle_mx_scales(const at::Tensor& scales, at::Tensor& out) {
  if (out.numel() == 0) {
    return;
  }
  const CudaDeviceScope scope(scales.device());
  kernels::swizzle_mx_scales(
      scales.const_data_ptr<std::uint8_t>(),
      out.mutable_data_ptr<std::uint8_t>(),
      scales.size(0),
      scales.size(1),
      stream());
  check_kernel_launch();
}

}  // namespace flatshard::float8::cuda
