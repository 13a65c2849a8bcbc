#include "flatshard/optim/muon/muon_update.h"

#include "flatshard/device/memory.h"
#include "flatshard/device/parallel_for.h"
#include "flatshard/optim/muon/muon_cuda.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#if defined(__x86_64__)
#define FLATSHARD_FMA_CLONES \
  __attribute__((            \
      target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define FLATSHARD_FMA_CLONES
#endif

namespace flatshard {
namespace {

// Below this many elements a thread costs more than it gives.
constexpr std::int64_t kMuonGrain = 1 << 16;

FLATSHARD_FMA_CLONES void
scale_elements(float* values, float scale, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    values[i] *= scale;
  }
}

// out = start + weight * (end - start), computed from the nearer of the two as
// at::lerp does. `out` may be one of them.
FLATSHARD_FMA_CLONES void lerp_elements(
    const float* start,
    const float* end,
    float* out,
    float weight,
    std::int64_t n) {
  if (std::abs(weight) < 0.5F) {
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) {
      out[i] = __builtin_fmaf(weight, end[i] - start[i], start[i]);
    }
  } else {
    const float back = weight - 1.0F;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) {
      out[i] = __builtin_fmaf(back, end[i] - start[i], end[i]);
    }
  }
}

FLATSHARD_FMA_CLONES void apply_elements(
    float* w,
    const float* direction,
    float keep,
    float step,
    std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float kept = w[i] * keep;
    w[i] = __builtin_fmaf(-step, direction[i], kept);
  }
}

bool runs_here(const at::Tensor& main) {
  return main.is_cpu() && main.scalar_type() == at::kFloat;
}

bool is_float32_or_bfloat16(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16;
}

}  // namespace

void muon_direction(
    const at::Tensor& grad,
    const at::Tensor& grad_scale,
    const at::Tensor& buffer,
    const at::Tensor& direction,
    double momentum,
    bool nesterov) {
  if (buffer.is_cuda() && is_float32_or_bfloat16(grad)) {
    muon_direction_cuda(
        grad,
        grad_scale,
        buffer,
        direction,
        momentum,
        nesterov);
    return;
  }
  at::Tensor g = grad.to(at::kFloat);
  if (!runs_here(buffer)) {
    keep_for_current_stream(grad);
    if (grad_scale.defined()) {
      keep_for_current_stream(grad_scale);
      g = g * grad_scale;
    }
    buffer.lerp_(g, 1 - momentum);
    direction.copy_(nesterov ? g.lerp(buffer, momentum) : buffer);
    return;
  }
  if (grad_scale.defined()) {
    g = g.is_same(grad) ? g.clone() : g;
    scale_elements(
        g.mutable_data_ptr<float>(),
        grad_scale.item<float>(),
        g.numel());
  }
  const float* gradient = g.const_data_ptr<float>();
  float* m = buffer.mutable_data_ptr<float>();
  auto* to = direction.mutable_data_ptr<at::BFloat16>();
  parallel_for(
      0,
      g.numel(),
      kMuonGrain,
      [&](std::int64_t begin, std::int64_t end) {
        constexpr std::int64_t kBlock = 1024;  // stays in the first cache
        float look_ahead[kBlock];
        for (; begin < end; begin += kBlock) {
          const std::int64_t n = std::min(kBlock, end - begin);
          lerp_elements(
              m + begin,
              gradient + begin,
              m + begin,
              static_cast<float>(1 - momentum),
              n);
          const float* from = m + begin;
          if (nesterov) {
            lerp_elements(
                gradient + begin,
                m + begin,
                look_ahead,
                static_cast<float>(momentum),
                n);
            from = look_ahead;
          }
          std::copy(from, from + n, to + begin);
        }
      });
}

void muon_apply(
    const at::Tensor& main,
    const at::Tensor& compute,
    const at::Tensor& direction,
    double decay,
    double step) {
  if (main.is_cuda() && main.scalar_type() == at::kFloat &&
      (!compute.defined() || compute.scalar_type() == at::kBFloat16)) {
    muon_apply_cuda(main, compute, direction, decay, step);
    return;
  }
  const auto apply_here = [&](const at::Tensor& weights, double keep) {
    const at::Tensor d = direction.to(at::kFloat);
    const float* from = d.const_data_ptr<float>();
    float* w = weights.mutable_data_ptr<float>();
    parallel_for(
        0,
        weights.numel(),
        kMuonGrain,
        [&](std::int64_t begin, std::int64_t end) {
          apply_elements(
              w + begin,
              from + begin,
              static_cast<float>(keep),
              static_cast<float>(step),
              end - begin);
        });
  };
  if (runs_here(main)) {
    apply_here(main, 1 - decay);
  } else if (main.is_cpu()) {
    // at::add rounds the step to bfloat16, and more often in the elements after
    // the last full vector. On GPUs it does neither.
    const at::Tensor kept = main.to(at::kFloat)
                                .mul_(1 - decay)
                                .to(main.scalar_type())
                                .to(at::kFloat);
    apply_here(kept, /*keep=*/1);
    main.copy_(kept);
  } else {
    main.mul_(1 - decay);
    main.add_(direction, -step);
  }
  if (compute.defined()) {
    compute.copy_(main);
  }
}

}  // namespace flatshard
