#include "flatshard/optim/flat_update_float8.h"

#include "flatshard/core/error.h"
#include "flatshard/float8/quantize.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace flatshard {
namespace {

using float8::FlatRun;

// As integers, the bits of magnitudes have the same order, and NaN is the
// largest.
void raise_amax(float& amax, const float* x, std::int64_t n) {
  std::uint32_t largest = float8::bits_of(amax);
  for (std::int64_t i = 0; i < n; ++i) {
    largest = std::max(largest, float8::bits_of(x[i]) & 0x7fffffffU);
  }
  amax = float8::float_of(largest);
}

void find_amax(const FlatRun& run, const float* main, float* amax) {
  if (run.block_rows == 0) {
    raise_amax(amax[run.amax], main + run.begin, run.end - run.begin);
    return;
  }
  for (std::int64_t i = run.begin; i < run.end;) {
    const std::int64_t at = run.first + i - run.begin;
    const std::int64_t row = at / run.columns;
    const std::int64_t column = at % run.columns;
    const std::int64_t block = column / run.block_columns;
    const std::int64_t n = std::min(
        std::min(run.columns, (block + 1) * run.block_columns) - column,
        run.end - i);
    raise_amax(
        amax[run.amax + row / run.block_rows * run.amax_stride + block],
        main + i,
        n);
    i += n;
  }
}

at::Tensor part_of(
    const at::Tensor& bytes,
    std::int64_t offset,
    std::int64_t numel,
    at::ScalarType dtype) {
  return bytes.view(at::kByte).narrow(0, offset, numel).view(dtype);
}

bool is_on(const at::Tensor& t, const at::Tensor& main) {
  return t.defined() && t.is_contiguous() && t.device() == main.device();
}

bool fits(const FlatRun& run, const PlaneWriter& f) {
  const std::int64_t multiple = f.data.defined() ? float8::kMxBlock : 16;
  const auto divides = [&](std::int64_t n) {
    return n >= 0 && n % multiple == 0;
  };
  const std::int64_t n = run.end - run.begin;
  return divides(run.begin) && divides(n) && divides(run.first) &&
         run.columns > 0 && divides(run.columns) &&
         (run.block_rows == 0 || run.block_columns > 0) &&
         (!f.data.defined() ||
          (run.data % 4 == 0 && run.data + n <= f.data.numel() &&
           run.scales + n / float8::kMxBlock <= f.scales.numel()));
}

}  // namespace

void check_float8_outputs(const PlaneWriter& f, const at::Tensor& main) {
  bool in_order = true;
  std::int64_t end = 0;
  for (const FlatRun& run : f.runs) {
    in_order =
        in_order && run.begin >= end && run.end <= main.numel() && fits(run, f);
    end = run.end;
  }
  const bool amax_fits =
      !f.amax.defined() ||
      (is_on(f.amax, main) && f.amax.scalar_type() == at::kFloat);
  const bool data_fits =
      !f.data.defined() ||
      (is_on(f.data, main) && is_on(f.scales, main) &&
       f.data.element_size() == 1 && f.scales.element_size() == 1);
  FLATSHARD_CHECK(
      main.scalar_type() == at::kFloat && in_order && amax_fits && data_fits &&
          (main.is_cpu() || f.runs.empty() || f.device_runs.defined()),
      internal,
      "expected float32 main weights, runs of them in ascending order that end "
      "at multiples of 16 (mxfp8: 32) elements of {}, and amax, data and "
      "scales as large as the runs need",
      main.numel());
}

void write_float8_outputs(const PlaneWriter& f, const at::Tensor& main) {
  for (const FlatRun& run : f.runs) {
    const std::int64_t n = run.end - run.begin;
    if (n == 0) {
      continue;
    }
    if (f.amax.defined()) {
      find_amax(run, main.data_ptr<float>(), f.amax.data_ptr<float>());
    }
    if (f.data.defined()) {
      float8::quantize_into(
          {part_of(f.data, run.data, n, at::kFloat8_e4m3fn)
               .view({-1, float8::kMxBlock}),
           part_of(
               f.scales,
               run.scales,
               n / float8::kMxBlock,
               at::kFloat8_e8m0fnu)
               .view({-1, 1})},
          main.narrow(0, run.begin, n).view({-1, float8::kMxBlock}),
          {.recipe = float8::Recipe::mxfp8, .rounding = f.rounding});
    }
  }
}

}  // namespace flatshard
