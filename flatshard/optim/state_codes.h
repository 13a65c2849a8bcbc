#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "flatshard/layout/tensor_slice.h"

namespace flatshard {

/// The scales of int8 states are saved as, for example, `exp_avg.scale`.
inline constexpr std::string_view kScaleSuffix = ".scale";

/// Returns the shape of the scales of int8 states of a tensor: one for each
/// kStateBlock elements along the last dimension or, where blocks go over its
/// end, of the flattened tensor.
std::vector<std::int64_t> state_scales_shape(
    const std::vector<std::int64_t>& shape);

/// The scales of a rank's parameter: their shape, and their part of the scales
/// of the full parameter.
struct StateScales {
  std::vector<std::int64_t> shape;
  TensorSlice slice;
};

/// Returns the scales of a parameter of `shape` that is a slice of a larger
/// one. Nothing where the slice splits blocks of the larger one.
std::optional<StateScales> state_scales(
    const std::vector<std::int64_t>& shape,
    const TensorSlice& slice);

/// Returns the values of int8 states, float32 on their device. Waits for it.
/// @param codes   [n], int8 of exp_avg or uint8 of exp_avg_sq.
/// @param scales  [ceil(n / kStateBlock)] float32.
at::Tensor decode_states(const at::Tensor& codes, const at::Tensor& scales);

/// Writes the codes and scales of [n] values. Waits for their device.
void encode_states(
    const at::Tensor& values,
    const at::Tensor& codes,
    const at::Tensor& scales);

/// Decodes a block of kStateBlock codes, from element `first` of `codes` on.
///
/// @param is_signed  int8 codes of exp_avg; otherwise uint8 ones of exp_avg_sq.
void decode_state_block(
    const void* codes,
    bool is_signed,
    std::int64_t first,
    float scale,
    float* to);

/// Encodes kStateBlock values. Returns their scale.
float encode_state_block(
    const float* from,
    void* codes,
    bool is_signed,
    std::int64_t first);

}  // namespace flatshard
