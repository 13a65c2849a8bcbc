#include "flatshard/checkpoint/float8_blocks.h"

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"

#include <ATen/ATen.h>

namespace flatshard {
namespace {

std::int64_t blocks_of(std::int64_t n) {
  return ceil_div(n, float8::kBlock);
}

}  // namespace

bool is_linear_of_a_block(std::string_view name, std::size_t num_dims) {
  return num_dims == 2 && name.find(".layers.") != std::string_view::npos &&
         name.ends_with("_proj.weight");
}

std::string block_scales_name(const std::string& weight) {
  return weight + "_scale_inv";
}

std::vector<std::int64_t> block_scales_shape(
    const std::vector<std::int64_t>& weight) {
  return {blocks_of(weight.at(0)), blocks_of(weight.at(1))};
}

float8::Plane quantize_blocks(
    const std::string& what,
    const at::Tensor& weight,
    const std::string& advice) {
  const std::int64_t rows = weight.size(0);
  const std::int64_t columns = weight.size(1);
  // Zeros change no block's largest magnitude.
  const at::Tensor whole = at::constant_pad_nd(
      weight.to(at::kFloat),
      {0,
       blocks_of(columns) * float8::kBlock - columns,
       0,
       blocks_of(rows) * float8::kBlock - rows});
  const float8::Plane plane =
      float8::quantize(whole, {.recipe = float8::Recipe::blockwise});
  FLATSHARD_CHECK(
      plane.scales.isfinite().all().item<bool>(),
      config,
      "{} has values that are not finite, and no FP8 scale fits them; {}",
      what,
      advice);
  return {
      plane.data.narrow(0, 0, rows).narrow(1, 0, columns).contiguous(),
      plane.scales.contiguous()};
}

}  // namespace flatshard
