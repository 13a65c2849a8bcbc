#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "flatshard/models/config.h"
#include "flatshard/train/config/lora_keys.h"
#include "flatshard/train/config/parallelism_keys.h"
#include "flatshard/train/config/precision_keys.h"

namespace flatshard {

struct LeastMemoryOptions {
  config::Precision precision;
  config::Parallelism parallelism;
  config::Lora lora;
  bool float8 = false;      ///< frozen weights are FP8
  double state_nbytes = 8;  ///< of the optimizer on the device, per element
};

/// Returns the minimum memory in bytes of a rank at the end of a backward: its
/// part of main weights, gradients and optimizer state.
std::int64_t least_memory(
    const LeastMemoryOptions& options,
    const models::ModelConfig& model,
    std::int64_t world);

/// Refuses a model whose least_memory does not fit, before anything of that
/// size is made: a machine that lends more memory than it has would end the run
/// later, without a word. @throws Error{memory}.
void check_memory(
    std::int64_t least_nbytes,
    const models::ModelConfig& model,
    std::int64_t world,
    at::Device device);

}  // namespace flatshard
