#include "flatshard/core/error.h"
#include "flatshard/device/parallel_for.h"
#include "flatshard/optim/flat_update.h"
#include "flatshard/optim/flat_update_float8.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace flatshard {
namespace {

// Elements that are converted to float32, updated and converted back at once:
// they stay in the first cache, and one loop serves every mix of dtypes.
constexpr std::int64_t kBlock = 1024;
// Below this many elements a thread costs more than it gives.
constexpr std::int64_t kGrain = 1 << 17;

template <class T>
void load(const at::Tensor& from, std::int64_t at, std::int64_t n, float* to) {
  const T* source = from.data_ptr<T>() + at;
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = static_cast<float>(source[i]);
  }
}

template <class T>
void store(
    const float* from,
    const at::Tensor& to,
    std::int64_t at,
    std::int64_t n) {
  T* target = to.data_ptr<T>() + at;
  for (std::int64_t i = 0; i < n; ++i) {
    target[i] = static_cast<T>(from[i]);
  }
}

void load_any(
    const at::Tensor& from,
    std::int64_t at,
    std::int64_t n,
    float* to) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      from.scalar_type(),
      "flat_update",
      [&] { load<scalar_t>(from, at, n, to); });
}

void store_any(
    const float* from,
    const at::Tensor& to,
    std::int64_t at,
    std::int64_t n) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      to.scalar_type(),
      "flat_update",
      [&] { store<scalar_t>(from, to, at, n); });
}

__attribute__((optimize("O3", "no-math-errno"))) void adamw_block(
    float* w,
    const float* grad,
    float* m,
    float* v,
    std::int64_t n,
    float scale,
    float keep,
    const AdamWStep& s) {
  const float step_size = s.lr / s.bias_correction1;
  const float inverse_c2 = 1.0F / std::sqrt(s.bias_correction2);
  const float one_minus_b1 = 1.0F - s.beta1;
  const float one_minus_b2 = 1.0F - s.beta2;
  const float b1 = s.beta1;
  const float b2 = s.beta2;
  const float eps = s.eps;
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * scale;
    m[i] = b1 * m[i] + one_minus_b1 * g;
    v[i] = b2 * v[i] + one_minus_b2 * g * g;
    const float denominator = std::sqrt(v[i]) * inverse_c2 + eps;
    w[i] = w[i] * keep - step_size * m[i] / denominator;
  }
}

__attribute__((optimize("O3"))) void sgd_block(
    float* w,
    const float* grad,
    float* u,
    std::int64_t n,
    float scale,
    float keep,
    const SgdStep& s) {
  const float momentum = s.first ? 0.0F : s.momentum;
  for (std::int64_t i = 0; i < n; ++i) {
    float g = grad[i] * scale;
    if (u != nullptr) {
      g += momentum * u[i];
      u[i] = g;
    }
    w[i] = w[i] * keep - s.lr * g;
  }
}

// Calls block(w, grad, at, n, weight_decay) over the shard, split at the decay
// ranges, with w and grad as float32 in cache.
template <class Block>
void for_blocks(const FlatUpdate& u, Block block) {
  const at::NoGradGuard no_grad;
  parallel_for(
      0,
      u.main.numel(),
      kGrain,
      [&](std::int64_t begin, std::int64_t end) {
        alignas(64) float w[kBlock];
        alignas(64) float g[kBlock];
        std::size_t range = 0;
        while (begin < end) {
          while (u.decay[range].end <= begin) {
            ++range;
          }
          const std::int64_t n =
              std::min({kBlock, end - begin, u.decay[range].end - begin});
          load_any(u.main, begin, n, w);
          load_any(u.grad, begin, n, g);
          block(w, g, begin, n, u.decay[range].weight_decay);
          store_any(w, u.main, begin, n);
          if (u.compute.defined()) {
            store_any(w, u.compute, begin, n);
          }
          begin += n;
        }
      });
}

void check(const FlatUpdate& u, int num_states) {
  const std::int64_t n = u.main.numel();
  const auto fits = [&](const at::Tensor& t) {
    return t.defined() && t.numel() == n && t.is_contiguous() &&
           t.device() == u.main.device();
  };
  FLATSHARD_CHECK(
      fits(u.main) && fits(u.grad) && (num_states < 1 || fits(u.state0)) &&
          (num_states < 2 || fits(u.state1)) &&
          (!u.compute.defined() || fits(u.compute)),
      internal,
      "expected main, grad, compute and state of {} contiguous elements on one "
      "device",
      n);
  FLATSHARD_CHECK(
      n == 0 || (!u.decay.empty() && u.decay.back().end >= n),
      internal,
      "the weight decay ranges do not cover all {} elements",
      n);
}

float host_scale(const FlatUpdate& u) {
  return u.grad_scale.defined() ? u.grad_scale.item<float>() : 1.0F;
}

}  // namespace

void adamw_update(const FlatUpdate& u, const AdamWStep& step) {
  check(u, 2);
  if (u.main.numel() == 0) {
    return;
  }
  if (u.float8.wanted()) {
    check_float8_outputs(u.float8, u.main);
  }
  if (u.main.is_cuda()) {
    adamw_update_cuda(u, step);
    return;
  }
  const float scale = host_scale(u);
  float* m = u.state0.data_ptr<float>();
  float* v = u.state1.data_ptr<float>();
  for_blocks(
      u,
      [&](float* w,
          const float* g,
          std::int64_t at,
          std::int64_t n,
          float decay) {
        adamw_block(
            w,
            g,
            m + at,
            v + at,
            n,
            scale,
            1.0F - step.lr * decay,
            step);
      });
  if (u.float8.wanted()) {
    write_float8_outputs(u.float8, u.main);
  }
}

void sgd_update(const FlatUpdate& u, const SgdStep& step) {
  check(u, u.state0.defined() ? 1 : 0);
  if (u.main.numel() == 0) {
    return;
  }
  if (u.main.is_cuda()) {
    sgd_update_cuda(u, step);
    return;
  }
  const float scale = host_scale(u);
  float* momentum = u.state0.defined() ? u.state0.data_ptr<float>() : nullptr;
  for_blocks(
      u,
      [&](float* w,
          const float* g,
          std::int64_t at,
          std::int64_t n,
          float decay) {
        sgd_block(
            w,
            g,
            momentum == nullptr ? nullptr : momentum + at,
            n,
            scale,
            1.0F - step.lr * decay,
            step);
      });
}

}  // namespace flatshard
