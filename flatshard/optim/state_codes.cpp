#include "flatshard/optim/state_codes.h"

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/layout/rectangle.h"
#include "flatshard/optim/state_format.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>

namespace flatshard {
namespace {

// As integers, the bits of magnitudes have the same order, and NaN is the
// largest.
std::uint32_t largest_of(const float* values) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < kStateBlock; ++i) {
    largest = std::max(largest, state_format::magnitude(values[i]));
  }
  return largest;
}

// Blocks of rows of the larger tensor, of which the slice is one box.
std::optional<StateScales> scales_of_box(
    const std::vector<std::int64_t>& whole,
    const Rectangle& box) {
  StateScales scales;
  for (std::size_t d = 0; d < whole.size(); ++d) {
    const std::int64_t block = d + 1 < whole.size() ? 1 : kStateBlock;
    const IndexRange range{box.start[d], box.start[d] + box.length[d]};
    if (range.begin % block != 0 || range.end % block != 0) {
      return std::nullopt;
    }
    const IndexRange blocks{range.begin / block, range.end / block};
    scales.shape.push_back(blocks.size());
    if (range.size() < whole[d]) {
      scales.slice = scales.slice.take(
          static_cast<std::int64_t>(d),
          whole[d] / block,
          {blocks});
    }
  }
  return scales;
}

// The same of a slice of several boxes.
std::optional<StateScales> scales_of_rows(
    const std::vector<std::int64_t>& shape,
    const TensorSlice& slice) {
  StateScales scales{.shape = state_scales_shape(shape), .slice = slice};
  try {
    slice.check(scales.shape, "scales");
  } catch (const Error&) {
    return std::nullopt;
  }
  return slice.whole_shape(scales.shape) ==
                 state_scales_shape(slice.whole_shape(shape))
             ? std::optional(std::move(scales))
             : std::nullopt;
}

// Blocks of the larger tensor, flattened, of which the slice is one run.
std::optional<StateScales> scales_of_run(
    const std::vector<std::int64_t>& shape,
    const TensorSlice& slice) {
  const std::vector<std::int64_t> whole = slice.whole_shape(shape);
  const std::int64_t numel = c10::multiply_integers(shape);
  const auto boxes = slice.boxes(shape, 0, numel);
  if (boxes.size() != 1) {
    return std::nullopt;
  }
  const FlatRuns runs(whole, boxes.front());
  if (runs.size() != 1) {
    return std::nullopt;
  }
  const std::int64_t begin = runs.begin(0);
  const std::int64_t end = begin + numel;
  if (begin % kStateBlock != 0 ||
      (end % kStateBlock != 0 && end != c10::multiply_integers(whole))) {
    return std::nullopt;
  }
  const std::int64_t last = ceil_div(end, kStateBlock);
  return StateScales{
      .shape = {last - begin / kStateBlock},
      .slice = TensorSlice().take(
          0,
          state_scales_shape(whole).front(),
          {{begin / kStateBlock, last}})};
}

}  // namespace

std::vector<std::int64_t> state_scales_shape(
    const std::vector<std::int64_t>& shape) {
  if (shape.empty() || shape.back() % kStateBlock != 0) {
    return {ceil_div(c10::multiply_integers(shape), kStateBlock)};
  }
  std::vector<std::int64_t> scales = shape;
  scales.back() /= kStateBlock;
  return scales;
}

std::optional<StateScales> state_scales(
    const std::vector<std::int64_t>& shape,
    const TensorSlice& slice) {
  if (slice.is_whole(shape)) {
    return StateScales{.shape = state_scales_shape(shape), .slice = {}};
  }
  const std::vector<std::int64_t> whole = slice.whole_shape(shape);
  if (whole.back() % kStateBlock != 0) {
    return scales_of_run(shape, slice);
  }
  const auto boxes = slice.boxes(shape, 0, c10::multiply_integers(shape));
  return boxes.size() == 1 ? scales_of_box(whole, boxes.front())
                           : scales_of_rows(shape, slice);
}

at::Tensor decode_states(const at::Tensor& codes, const at::Tensor& scales) {
  const bool is_signed = codes.scalar_type() == at::kChar;
  const std::int64_t blocks = scales.numel();
  const at::Tensor bytes =
      at::zeros({blocks * kStateBlock}, at::TensorOptions(at::kByte));
  bytes.narrow(0, 0, codes.numel()).copy_(codes.view(at::kByte));
  const at::Tensor of_blocks = scales.to(at::kCPU);
  const at::Tensor values = at::empty({blocks * kStateBlock});
  for (std::int64_t b = 0; b < blocks; ++b) {
    decode_state_block(
        bytes.data_ptr(),
        is_signed,
        b * kStateBlock,
        of_blocks.data_ptr<float>()[b],
        values.data_ptr<float>() + b * kStateBlock);
  }
  return values.narrow(0, 0, codes.numel()).to(codes.device());
}

void encode_states(
    const at::Tensor& values,
    const at::Tensor& codes,
    const at::Tensor& scales) {
  const bool is_signed = codes.scalar_type() == at::kChar;
  const std::int64_t blocks = scales.numel();
  const at::Tensor padded = at::zeros({blocks * kStateBlock});
  padded.narrow(0, 0, values.numel()).copy_(values);
  const at::Tensor bytes =
      at::empty({blocks * kStateBlock}, at::TensorOptions(at::kByte));
  const at::Tensor of_blocks = at::empty({blocks});
  for (std::int64_t b = 0; b < blocks; ++b) {
    of_blocks.data_ptr<float>()[b] = encode_state_block(
        padded.data_ptr<float>() + b * kStateBlock,
        bytes.data_ptr(),
        is_signed,
        b * kStateBlock);
  }
  codes.copy_(bytes.narrow(0, 0, codes.numel()).view(codes.scalar_type()));
  scales.copy_(of_blocks);
}

__attribute__((optimize("O3", "no-math-errno"))) void decode_state_block(
    const void* codes,
    bool is_signed,
    std::int64_t first,
    float scale,
    float* to) {
  if (is_signed) {
    const auto* from = static_cast<const std::int8_t*>(codes) + first;
    for (std::int64_t i = 0; i < kStateBlock; ++i) {
      to[i] = state_format::decode_exp_avg(static_cast<float>(from[i]), scale);
    }
    return;
  }
  const auto* from = static_cast<const std::uint8_t*>(codes) + first;
  for (std::int64_t i = 0; i < kStateBlock; ++i) {
    to[i] = state_format::decode_exp_avg_sq(static_cast<float>(from[i]), scale);
  }
}

__attribute__((optimize("O3", "no-math-errno"))) float encode_state_block(
    const float* from,
    void* codes,
    bool is_signed,
    std::int64_t first) {
  auto* to = static_cast<std::uint8_t*>(codes) + first;
  if (is_signed) {
    const float scale = state_format::scale_of(largest_of(from));
    const float inverse = state_format::inverse_of(1.0F, scale);
    for (std::int64_t i = 0; i < kStateBlock; ++i) {
      to[i] = static_cast<std::uint8_t>(
          state_format::encode_exp_avg(from[i], inverse));
    }
    return scale;
  }
  float roots[kStateBlock];
  for (std::int64_t i = 0; i < kStateBlock; ++i) {
    roots[i] = std::sqrt(from[i]);
  }
  const float scale = state_format::float_of(largest_of(roots));
  const float inverse = state_format::inverse_of(255.0F, scale);
  for (std::int64_t i = 0; i < kStateBlock; ++i) {
    to[i] = static_cast<std::uint8_t>(
        state_format::encode_exp_avg_sq(roots[i], inverse));
  }
  return scale;
}

}  // namespace flatshard
