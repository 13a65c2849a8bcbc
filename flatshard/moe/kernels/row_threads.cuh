#pragma once

#include "flatshard/moe/kernels/moe_kernels.h"
#include "flatshard/ops/kernels/common.cuh"

// Common parts of the kernels on rows of tokens.
namespace flatshard::nn::kernels {

constexpr int kRowThreads = 256;

}  // namespace flatshard::nn::kernels
