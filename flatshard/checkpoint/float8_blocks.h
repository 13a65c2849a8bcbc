#pragma once

#include "flatshard/float8/quantize.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {

// Weights in FP8 in the form of DeepSeek-V3's folders. A linear layer's
// `weight` [out, in] is float8_e4m3fn. Next to it is `weight_scale_inv`
// [ceil(out / 128), ceil(in / 128)] float32, the factors of the elements of a
// block. Everything else is bfloat16. Source: README_WEIGHTS.md of
// deepseek-ai/DeepSeek-V3.

/// Returns whether a tensor of a folder is the weight of a linear layer of a
/// block: matrices of `model.layers` whose names end in `_proj.weight`.
bool is_linear_of_a_block(std::string_view name, std::size_t num_dims);

/// Returns the name of the scales of a weight.
std::string block_scales_name(const std::string& weight);
/// Returns the shape of the scales of a weight [out, in].
std::vector<std::int64_t> block_scales_shape(
    const std::vector<std::int64_t>& weight);

/// @param what    the weight, for the message.
/// @param weight  [out, in] of any float dtype.
/// @return data [out, in] float8_e4m3fn and scales [ceil(out / 128),
///   ceil(in / 128)] float32, both contiguous.
/// @throws Error{config} "`what` has values that are not finite, ...; `advice`"
/// Blocks the host.
float8::Plane quantize_blocks(
    const std::string& what,
    const at::Tensor& weight,
    const std::string& advice);

}  // namespace flatshard
