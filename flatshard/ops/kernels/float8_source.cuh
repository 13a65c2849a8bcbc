#pragma once

#include "flatshard/float8/kernels/tiles.cuh"
#include "flatshard/ops/kernels/float8.h"

// The common parts of the sources of computed values (float8_*.cu). A file for
// each source: they are the slowest of all to compile.
namespace flatshard::nn::kernels {

using Bf16 = __nv_bfloat16;
using Eights = float8::kernels::Eight<Bf16>;

__device__ inline Eights
load(const void* from, std::int64_t stride, std::int64_t r, std::int64_t c) {
  return *reinterpret_cast<const Eights*>(
      static_cast<const Bf16*>(from) + r * stride + c);
}

}  // namespace flatshard::nn::kernels
