#pragma once

// What the kernels of SwiGLU and those that quantize it compute alike.
namespace flatshard::nn::kernels {

// Within 2 units in the last place of float32, and 0 where exp overflows.
__device__ inline float sigmoid(float v) {
  return __fdividef(1.0F, 1.0F + __expf(-v));
}

// With the sigmoid of gate. Forward and backward round alike.
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
