#include "flatshard/nn/rope.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/cpu_kernels.h"
#include "flatshard/nn/cuda_ops.h"

#include <cmath>
#include <numbers>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor rotate(
    const at::Tensor& x,
    const at::Tensor& cos,
    const at::Tensor& sin,
    bool inverse,
    const at::Tensor& positions) {
  if (cuda::supports(x)) {
    const at::Tensor in = x.contiguous();
    at::Tensor out = at::empty_like(in);
    cuda::rope(in, out, cos, sin, inverse, positions);
    return out;
  }
  const at::Tensor in = x.to(at::kFloat).contiguous();
  if (x.is_cpu()) {
    at::Tensor out = at::empty_like(in);
    cpu::rope(
        in.const_data_ptr<float>(),
        out.mutable_data_ptr<float>(),
        cos.const_data_ptr<float>(),
        sin.const_data_ptr<float>(),
        x.size(0) * x.size(1),
        x.size(1),
        x.size(2),
        x.size(3) / 2,
        inverse ? -1.0F : 1.0F,
        positions.defined() ? positions.const_data_ptr<std::int32_t>()
                            : nullptr);
    return out.to(x.scalar_type());
  }
  const std::vector<at::Tensor> half = in.chunk(2, -1);
  const auto of_tokens = [&](const at::Tensor& table) {
    return (positions.defined() ? table.index_select(0, positions)
                                      .view({x.size(0), x.size(1), -1})
                                : table)
        .unsqueeze(-2);
  };
  const at::Tensor c = of_tokens(cos);
  const at::Tensor s = of_tokens(inverse ? sin.neg() : sin);
  return at::cat({half[0] * c - half[1] * s, half[1] * c + half[0] * s}, -1)
      .to(x.scalar_type());
}

struct RopeFunction : torch::autograd::Function<RopeFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const at::Tensor& cos,
      const at::Tensor& sin,
      bool inverse,
      const std::optional<at::Tensor>& positions) {
    const at::Tensor at_positions = positions.value_or(at::Tensor());
    ctx->save_for_backward({cos, sin, at_positions});
    ctx->saved_data["inverse"] = inverse;
    return rotate(x, cos, sin, inverse, at_positions);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const bool inverse = ctx->saved_data["inverse"].toBool();
    return {
        rope(grads[0], saved[0], saved[1], !inverse, saved[2]),
        {},
        {},
        {},
        {}};
  }
};

}  // namespace

std::vector<double> rope_frequencies(const RopeOptions& options) {
  const std::int64_t half = options.head_dim / 2;
  std::vector<double> frequencies(half);
  for (std::int64_t i = 0; i < half; ++i) {
    double f = std::pow(
        options.theta,
        -static_cast<double>(i) / static_cast<double>(half));
    if (options.scaling) {
      const RopeScaling& s = *options.scaling;
      // Turns within the original context: many stay, few are stretched.
      const double turns = static_cast<double>(s.original_max_positions) * f /
                           (2.0 * std::numbers::pi);
      const double blend = (turns - s.low_freq_factor) /
                           (s.high_freq_factor - s.low_freq_factor);
      const double keep = std::clamp(blend, 0.0, 1.0);
      f = keep * f + (1.0 - keep) * f / s.factor;
    }
    frequencies[i] = f;
  }
  return frequencies;
}

RopeTable::RopeTable(RopeOptions options) : options_(options) {
  FLATSHARD_CHECK(
      options_.head_dim > 0 && options_.head_dim % 2 == 0,
      config,
      "head_dim: expected an even number for RoPE, got {}",
      options_.head_dim);
}

std::pair<at::Tensor, at::Tensor> RopeTable::get(
    std::int64_t seq_len,
    at::Device device) {
  if (!cos_.defined() || cos_.device() != device || cos_.size(0) < seq_len) {
    const at::NoGradGuard no_grad;
    const std::vector<double> f = rope_frequencies(options_);
    const at::Tensor angles =
        at::outer(at::arange(seq_len, at::kDouble), at::tensor(f, at::kDouble));
    cos_ = angles.cos().to(at::kFloat).to(device);
    sin_ = angles.sin().to(at::kFloat).to(device);
    last_ = {};
  }
  // Every block of every microbatch asks for the same.
  if (!last_.first.defined() || last_.first.size(0) != seq_len) {
    const at::NoGradGuard no_grad;
    last_ = {cos_.narrow(0, 0, seq_len), sin_.narrow(0, 0, seq_len)};
  }
  return last_;
}

at::Tensor rope(
    const at::Tensor& x,
    const at::Tensor& cos,
    const at::Tensor& sin,
    bool inverse,
    const at::Tensor& positions) {
  FLATSHARD_CHECK(
      x.dim() == 4 && cos.dim() == 2 && x.size(1) == cos.size(0) &&
          x.size(3) == 2 * cos.size(1),
      usage,
      "rope: expected x [batch, {}, heads, {}], got {}",
      cos.size(0),
      2 * cos.size(1),
      c10::str(x.sizes()));
  FLATSHARD_CHECK(
      !positions.defined() ||
          (positions.scalar_type() == at::kInt && positions.is_contiguous() &&
           positions.numel() == x.size(0) * x.size(1)),
      usage,
      "rope: expected int32 positions of {} tokens, got {} of {}",
      x.size(0) * x.size(1),
      c10::str(positions.scalar_type()),
      c10::str(positions.sizes()));
  return RopeFunction::apply(
      x,
      cos,
      sin,
      inverse,
      positions.defined() ? std::optional(positions) : std::nullopt);
}

}  // namespace flatshard::nn
