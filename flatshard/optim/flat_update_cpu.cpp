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
    const UpdateRow& s) {
  const float keep = 1.0F - s.lr * s.weight_decay;
  const float step_size = s.step_size;
  const float inverse_c2 = s.inverse_c2;
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
    const UpdateRow& s) {
  const float keep = 1.0F - s.lr * s.weight_decay;
  const float momentum = s.momentum;
  for (std::int64_t i = 0; i < n; ++i) {
    float g = grad[i] * scale;
    if (u != nullptr) {
      g += momentum * u[i];
      u[i] = g;
    }
    w[i] = w[i] * keep - s.lr * g;
  }
}

// Calls block(w, grad, at, n, row) over the shard, split at the ranges, with w
// and grad as float32 in cache. Skips ranges that are not updated.
template <class Block>
void for_blocks(const FlatUpdate& u, Block block) {
  const at::NoGradGuard no_grad;
  const std::vector<UpdateRange> ranges =
      u.ranges.empty() ? std::vector<UpdateRange>{{u.main.numel(), 0}}
                       : u.ranges;
  parallel_for(
      0,
      u.main.numel(),
      kGrain,
      [&](std::int64_t begin, std::int64_t end) {
        alignas(64) float w[kBlock];
        alignas(64) float g[kBlock];
        std::size_t range = 0;
        while (begin < end) {
          while (ranges[range].end <= begin) {
            ++range;
          }
          const auto [range_end, group] = ranges[range];
          if (group == UpdateRange::kSkipped) {
            begin = std::min(end, range_end);
            continue;
          }
          const std::int64_t n =
              std::min({kBlock, end - begin, range_end - begin});
          load_any(u.main, begin, n, w);
          load_any(u.grad, begin, n, g);
          block(w, g, begin, n, u.rows[group]);
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
  const bool rows_exist = std::all_of(
      u.ranges.begin(),
      u.ranges.end(),
      [&](const UpdateRange& range) {
        return range.group == UpdateRange::kSkipped ||
               (range.group >= 0 &&
                static_cast<std::size_t>(range.group) < u.rows.size());
      });
  FLATSHARD_CHECK(
      n == 0 || (u.ranges.empty() ? !u.rows.empty()
                                  : u.ranges.back().end >= n && rows_exist),
      internal,
      "expected ranges that cover all {} elements, each with one of {} rows",
      n,
      u.rows.size());
}

float host_scale(const FlatUpdate& u) {
  return u.grad_scale.defined() ? u.grad_scale.item<float>() : 1.0F;
}

at::Tensor bytes_of(const void* data, std::size_t nbytes) {
  return at::from_blob(
      const_cast<void*>(data),
      {static_cast<std::int64_t>(nbytes)},
      at::TensorOptions(at::kByte));
}

}  // namespace

void FlatUpdate::upload_ranges(at::Device device) {
  if (!ranges.empty() && device.is_cuda()) {
    device_ranges =
        bytes_of(ranges.data(), ranges.size() * sizeof(UpdateRange)).to(device);
  }
}

at::Tensor upload_rows(const std::vector<UpdateRow>& rows, at::Device device) {
  // The allocator of pinned memory keeps it until the copy has run.
  return bytes_of(rows.data(), rows.size() * sizeof(UpdateRow))
      .pin_memory()
      .to(device, /*non_blocking=*/true);
}

void adamw_update(const FlatUpdate& u) {
  check(u, 2);
  if (u.main.numel() == 0) {
    return;
  }
  if (u.float8.wanted()) {
    check_float8_outputs(u.float8, u.main);
  }
  if (u.main.is_cuda()) {
    adamw_update_cuda(u);
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
          const UpdateRow& row) {
        adamw_block(w, g, m + at, v + at, n, scale, row);
      });
  if (u.float8.wanted()) {
    write_float8_outputs(u.float8, u.main);
  }
}

void sgd_update(const FlatUpdate& u) {
  check(u, u.state0.defined() ? 1 : 0);
  if (u.main.numel() == 0) {
    return;
  }
  if (u.main.is_cuda()) {
    sgd_update_cuda(u);
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
          const UpdateRow& row) {
        sgd_block(
            w,
            g,
            momentum == nullptr ? nullptr : momentum + at,
            n,
            scale,
            row);
      });
}

}  // namespace flatshard
