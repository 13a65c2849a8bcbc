#pragma once

// The common computation of the kernels of SwiGLU and of the kernels that
// quantize it.
namespace flatshard::nn::kernels {

// Within 2 units in the last place of float32, and 0 where exp overflows.
__device__ inline float sigmoid(float v) {
  return __fdividef(1.0F, 1.0F + __expf(-v));
}

// Computes SwiGLU from the sigmoid of gate. Forward and backward round alike.
__device__ inline float swiglu(float gate, float sigmoid, float up) {
  return gate * (sigmoid * up);
}

struct SwigluGradient {
  float gate;
  float up;
};

__device__ inline SwigluGradient
swiglu_gradient(float dy, float gate, float sigmoid, float up) {
  const float silu = gate * sigmoid;
  return {dy * up * __fmaf_rn(silu, 1.0F - sigmoid, sigmoid), dy * silu};
}

}  // namespace flatshard::nn::kernels
