#pragma once

#include "flatshard/moe/kernels/moe_kernels.h"
#include "flatshard/ops/kernels/common.cuh"

// Common parts of the kernels on rows of tokens.
namespace flatshard::nn::kernels {

constexpr int kRowThreads = 256;

// Calls run<T, N> with as many elements at a time as all pointers allow.
template <class Run>
void with_pack(Dtype dtype, std::int64_t dim, bool aligned, Run&& run) {
  const auto with = [&]<class T>(T) {
    if (aligned && dim % kWide<T> == 0) {
      run.template operator()<T, kWide<T>>();
    } else {
      run.template operator()<T, 1>();
    }
  };
  dtype == Dtype::f32 ? with(float{}) : with(__nv_bfloat16{});
}

}  // namespace flatshard::nn::kernels
