#include "flatshard/ops/cpu_kernels.h"

#include <cmath>

#if defined(__x86_64__)
#define FLATSHARD_CLONES \
  __attribute__((        \
      target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define FLATSHARD_CLONES
#endif

namespace flatshard::nn::cpu {

FLATSHARD_CLONES
void rms_norm_forward(
    const float* x,
    const float* w,
    float* y,
    float* rstd,
    std::int64_t rows,
    std::int64_t dim,
    float eps) {
  for (std::int64_t r = 0; r < rows; ++r, x += dim, y += dim) {
    float squares = 0.0F;
#pragma omp simd reduction(+ : squares)
    for (std::int64_t i = 0; i < dim; ++i) {
      squares += x[i] * x[i];
    }
    const float scale =
        1.0F / std::sqrt(squares / static_cast<float>(dim) + eps);
    rstd[r] = scale;
#pragma omp simd
    for (std::int64_t i = 0; i < dim; ++i) {
      y[i] = x[i] * scale * w[i];
    }
  }
}

FLATSHARD_CLONES
void rms_norm_backward(
    const float* dy,
    const float* dsum,
    const float* x,
    const float* w,
    const float* rstd,
    float* dx,
    float* dw,
    std::int64_t rows,
    std::int64_t dim) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float scale = rstd[r];
    float dot = 0.0F;
#pragma omp simd reduction(+ : dot)
    for (std::int64_t i = 0; i < dim; ++i) {
      dot += dy[i] * w[i] * x[i];
    }
    const float pull = dot * scale * scale * scale / static_cast<float>(dim);
#pragma omp simd
    for (std::int64_t i = 0; i < dim; ++i) {
      dx[i] = dy[i] * w[i] * scale - x[i] * pull;
      dw[i] += dy[i] * x[i] * scale;
    }
    if (dsum != nullptr) {
#pragma omp simd
      for (std::int64_t i = 0; i < dim; ++i) {
        dx[i] += dsum[i];
      }
      dsum += dim;
    }
    dy += dim;
    x += dim;
    dx += dim;
  }
}

FLATSHARD_CLONES
void rope(
    const float* in,
    float* out,
    const float* cos,
    const float* sin,
    std::int64_t tokens,
    std::int64_t seq_len,
    std::int64_t heads,
    std::int64_t half,
    float sign,
    const std::int32_t* positions) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t position =
        positions != nullptr ? positions[t] : t % seq_len;
    const float* c = cos + position * half;
    const float* s = sin + position * half;
    for (std::int64_t h = 0; h < heads; ++h) {
#pragma omp simd
      for (std::int64_t i = 0; i < half; ++i) {
        const float a = in[i];
        const float b = in[half + i];
        out[i] = a * c[i] - b * s[i] * sign;
        out[half + i] = b * c[i] + a * s[i] * sign;
      }
      in += 2 * half;
      out += 2 * half;
    }
  }
}

}  // namespace flatshard::nn::cpu
