#include "flatshard/float8/cpu_ops.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "flatshard/core/rounding.h"
#include "flatshard/device/parallel_for.h"

namespace flatshard::float8::cpu {
namespace {

// Below this many elements a thread costs more than it gives.
constexpr std::int64_t kGrain = 1 << 16;

std::int64_t grain_of(std::int64_t columns) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, columns));
}

std::uint32_t magnitude_bits(float value) {
  return bits_of(value) & 0x7fffffffU;
}
// bfloat16 is the upper half of a float32.
std::uint32_t magnitude_bits(c10::BFloat16 value) {
  return static_cast<std::uint32_t>(value.x & 0x7fffU) << 16;
}

// Returns the largest magnitudes of blocks as bits: one row of blocks after the
// other. The bits order as magnitudes do, NaN last.
template <class T>
std::vector<std::uint32_t> block_amax(
    const T* x,
    std::int64_t rows,
    std::int64_t columns,
    const ScaleGrid& grid,
    std::int64_t num_columns) {
  const std::int64_t num_rows = ceil_div(rows, grid.block_rows);
  std::vector<std::uint32_t> found(num_rows * num_columns, 0);
  for (std::int64_t r = 0; r < rows; ++r) {
    std::uint32_t* of_row = found.data() + r / grid.block_rows * num_columns;
    const T* row = x + r * columns;
    if (grid.block_columns == 1) {
      for (std::int64_t c = 0; c < columns; ++c) {
        of_row[c] = std::max(of_row[c], magnitude_bits(row[c]));
      }
      continue;
    }
    for (std::int64_t b = 0; b < num_columns; ++b) {
      const std::int64_t end = std::min(columns, (b + 1) * grid.block_columns);
      std::uint32_t largest = 0;
      for (std::int64_t c = b * grid.block_columns; c < end; ++c) {
        largest = std::max(largest, magnitude_bits(row[c]));
      }
      of_row[b] = std::max(of_row[b], largest);
    }
  }
  return found;
}

// Stores the scale of one block and returns the factor of its elements.
float take_scale(
    const Quantizer& q,
    const PlaneView& view,
    std::int64_t at,
    float amax) {
  if (q.recipe == Recipe::mxfp8) {
    auto* scales = static_cast<std::uint8_t*>(view.scales());
    if (!view.given_scales) {
      scales[at] = e8m0_of(amax, q.format, q.rounding);
    }
    return scale_of_e8m0(scales[at]).quantize;
  }
  auto* scales = static_cast<float*>(view.scales());
  if (view.given_scales) {
    return 1.0F / scales[at];
  }
  const Scale scale = has_power_of_two_scales(q.recipe)
                          ? scale_of_e8m0(e8m0_of(amax, q.format, q.rounding))
                          : float_scale_of(amax, q.format);
  scales[at] = scale.dequantize;
  return scale.quantize;
}

template <class T>
void quantize_from(
    const T* x,
    const at::Tensor& tensor,
    const Quantizer& q,
    const PlaneView& view) {
  const std::int64_t rows = tensor.size(0);
  const std::int64_t columns = tensor.size(1);
  const ScaleGrid& grid = view.grid;
  const std::int64_t num_columns =
      std::max<std::int64_t>(1, ceil_div(columns, grid.block_columns));
  const std::int64_t num_rows =
      std::max<std::int64_t>(1, ceil_div(rows, grid.block_rows));
  std::vector<std::uint32_t> found;
  if (!view.given_scales && !view.amax.defined()) {
    found = block_amax(x, rows, columns, grid, num_columns);
    found.resize(num_rows * num_columns);
  }
  std::vector<float> factors(num_rows * num_columns);
  const float* given =
      view.amax.defined() ? view.amax.const_data_ptr<float>() : nullptr;
  const std::int64_t blocks =
      view.plane.scales.numel() == 0 ? 0 : num_rows * num_columns;
  for (std::int64_t i = 0; i < blocks; ++i) {
    const std::int64_t at = i / num_columns * grid.row_stride +
                            i % num_columns * grid.column_stride;
    const float amax = given != nullptr ? float_of(magnitude_bits(given[at]))
                       : found.empty()  ? 0.0F
                                        : float_of(found[i]);
    factors[i] = take_scale(q, view, at, amax);
  }
  std::uint8_t* data = view.data();
  parallel_for(
      0,
      rows,
      grain_of(columns),
      [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
          const float* factor =
              factors.data() + r / grid.block_rows * num_columns;
          const T* row = x + r * columns;
          std::uint8_t* to = data + r * view.row_stride;
          for (std::int64_t c = 0; c < columns; ++c) {
            to[c * view.column_stride] = encode(
                static_cast<float>(row[c]) * factor[c / grid.block_columns],
                q.format);
          }
        }
      });
  for (std::int64_t c = 0; view.padded_rows > rows && c < columns; ++c) {
    std::fill_n(
        data + c * view.column_stride + rows,
        view.padded_rows - rows,
        std::uint8_t{0});
  }
}

}  // namespace

void quantize(const at::Tensor& x, const Quantizer& q, const PlaneView& view) {
  if (x.scalar_type() == at::kFloat) {
    quantize_from(x.const_data_ptr<float>(), x, q, view);
  } else {
    quantize_from(x.const_data_ptr<c10::BFloat16>(), x, q, view);
  }
}

void dequantize(
    const at::Tensor& data,
    Format format,
    const ScaleGrid& grid,
    const at::Tensor& scales,
    at::Tensor& out) {
  float table[256];
  for (int code = 0; code < 256; ++code) {
    table[code] = decode(static_cast<std::uint8_t>(code), format);
  }
  const std::int64_t columns = data.size(1);
  const auto* from = static_cast<const std::uint8_t*>(data.const_data_ptr());
  const bool e8m0 = scales.scalar_type() == at::kFloat8_e8m0fnu;
  const void* all = scales.const_data_ptr();
  auto* to = out.mutable_data_ptr<float>();
  parallel_for(
      0,
      data.size(0),
      grain_of(columns),
      [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
          const std::int64_t first = r / grid.block_rows * grid.row_stride;
          for (std::int64_t c = 0; c < columns; ++c) {
            const std::int64_t at =
                first + c / grid.block_columns * grid.column_stride;
            const float scale =
                e8m0 ? decode_e8m0(static_cast<const std::uint8_t*>(all)[at])
                     : static_cast<const float*>(all)[at];
            to[r * columns + c] = table[from[r * columns + c]] * scale;
          }
        }
      });
}

float amax_of(const at::Tensor& x) {
  const std::int64_t n = x.numel();
  const ScaleGrid whole{1, std::max<std::int64_t>(1, n), 0, 0};
  const auto found =
      x.scalar_type() == at::kFloat
          ? block_amax(x.const_data_ptr<float>(), 1, n, whole, 1)
          : block_amax(x.const_data_ptr<c10::BFloat16>(), 1, n, whole, 1);
  return float_of(found[0]);
}

}  // namespace flatshard::float8::cpu
