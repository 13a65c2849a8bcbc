#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "flatshard/device/float_dtype.h"

namespace flatshard::kernels {

/// Calls `run` with a value of the dtype: run(float{}), for example.
template <class Run>
void with_dtype(FloatDtype dtype, Run run) {
  switch (dtype) {
    case FloatDtype::float32:
      return run(float{});
    case FloatDtype::bfloat16:
      return run(__nv_bfloat16{});
    case FloatDtype::float16:
      return run(__half{});
  }
}

}  // namespace flatshard::kernels
