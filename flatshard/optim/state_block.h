#pragma once

#include <cstdint>

#include "flatshard/optim/state_format.h"

namespace flatshard {

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
