#include "flatshard/nn/rope.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/ops/cpu_kernels.h"
#include "flatshard/ops/cuda_ops.h"

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

namespace {

bool is_longer(const RopeScaling& s, std::int64_t seq_len) {
  return seq_len > s.original_max_positions;
}

double theta_for(const RopeOptions& options, std::int64_t seq_len) {
  if (!options.scaling || options.scaling->type != RopeType::dynamic ||
      !is_longer(*options.scaling, seq_len)) {
    return options.theta;
  }
  const RopeScaling& s = *options.scaling;
  const auto dim = static_cast<double>(options.head_dim);
  const double longer = static_cast<double>(seq_len) /
                        static_cast<double>(s.original_max_positions);
  return options.theta *
         std::pow(s.factor * longer - (s.factor - 1.0), dim / (dim - 2.0));
}

// Returns the fraction of a frequency that stays unscaled. The rest is divided
// by the factor.
double kept_by_llama3(const RopeScaling& s, double frequency) {
  // Turns within the original context: many stay, few are stretched.
  const double turns = static_cast<double>(s.original_max_positions) *
                       frequency / (2.0 * std::numbers::pi);
  const double blend =
      (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  return std::clamp(blend, 0.0, 1.0);
}

double kept_by_yarn(const RopeOptions& options, std::int64_t i) {
  const RopeScaling& s = *options.scaling;
  const auto dim = static_cast<double>(options.head_dim);
  // The rotation that makes this many turns.
  const auto rotation_of = [&](double turns) {
    return dim *
           std::log(
               static_cast<double>(s.original_max_positions) /
               (turns * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(options.theta));
  };
  double low = rotation_of(s.beta_fast);
  double high = rotation_of(s.beta_slow);
  if (s.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  if (low == high) {
    high += 0.001;
  }
  return 1.0 -
         std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
}

double scaled(
    const RopeOptions& options,
    std::int64_t i,
    double frequency,
    std::int64_t seq_len) {
  const RopeScaling& s = *options.scaling;
  const auto blend = [&](double kept) {
    return kept * frequency + (1.0 - kept) * frequency / s.factor;
  };
  switch (s.type) {
    case RopeType::llama3:
      return blend(kept_by_llama3(s, frequency));
    case RopeType::linear:
      return frequency / s.factor;
    case RopeType::dynamic:
      return frequency;  // theta has changed
    case RopeType::yarn:
      return blend(kept_by_yarn(options, i));
    case RopeType::longrope:
      return frequency /
             (is_longer(s, seq_len) ? s.long_factors : s.short_factors).at(i);
  }
  return frequency;
}

}  // namespace

double yarn_attention_factor(double factor) {
  return factor <= 1.0 ? 1.0 : 0.1 * std::log(factor) + 1.0;
}

std::vector<double> rope_frequencies(
    const RopeOptions& options,
    std::int64_t seq_len) {
  const std::int64_t half = options.head_dim / 2;
  const double theta = theta_for(options, seq_len);
  std::vector<double> frequencies(half);
  for (std::int64_t i = 0; i < half; ++i) {
    const double f =
        std::pow(theta, -static_cast<double>(i) / static_cast<double>(half));
    frequencies[i] = options.scaling ? scaled(options, i, f, seq_len) : f;
  }
  return frequencies;
}

std::int64_t RopeTable::frequencies_of(std::int64_t seq_len) const {
  if (!options_.scaling || !is_longer(*options_.scaling, seq_len)) {
    return 0;
  }
  switch (options_.scaling->type) {
    case RopeType::dynamic:
      return seq_len;
    case RopeType::longrope:
      return 1;
    default:
      return 0;
  }
}

RopeTable::RopeTable(RopeOptions options) : options_(std::move(options)) {
  FLATSHARD_CHECK(
      options_.head_dim > 0 && options_.head_dim % 2 == 0,
      config,
      "head_dim: expected an even number for RoPE, got {}",
      options_.head_dim);
}

std::pair<at::Tensor, at::Tensor> RopeTable::get(
    std::int64_t seq_len,
    at::Device device) {
  const std::int64_t frequencies = frequencies_of(seq_len);
  const bool serves =
      cos_.defined() && cos_.device() == device && frequencies_ == frequencies;
  if (!serves || cos_.size(0) < seq_len) {
    const at::NoGradGuard no_grad;
    // So a sequence that grows token by token computes it only a few times.
    const std::int64_t length =
        serves ? std::max(seq_len, 2 * cos_.size(0)) : seq_len;
    const std::vector<double> f = rope_frequencies(options_, seq_len);
    const double factor =
        options_.scaling ? options_.scaling->attention_factor : 1.0;
    const at::Tensor angles =
        at::outer(at::arange(length, at::kDouble), at::tensor(f, at::kDouble));
    cos_ = (angles.cos() * factor).to(at::kFloat).to(device);
    sin_ = (angles.sin() * factor).to(at::kFloat).to(device);
    frequencies_ = frequencies;
    last_ = {};
  }
  // Every block of every microbatch requests the same.
  if (!last_.first.defined() || last_.first.size(0) != seq_len) {
    const at::NoGradGuard no_grad;
    last_ = {cos_.narrow(0, 0, seq_len), sin_.narrow(0, 0, seq_len)};
  }
  return last_;
}

const at::Tensor& RopeTable::factors(at::Device device) {
  if (!factors_.defined() || factors_.device() != device) {
    const at::NoGradGuard no_grad;
    const RopeScaling& s = options_.scaling.value();
    factors_ = at::stack({at::tensor(s.short_factors, at::kDouble),
                          at::tensor(s.long_factors, at::kDouble)})
                   .to(device);
  }
  return factors_;
}

TensorList RopeTable::constants(std::int64_t seq_len, at::Device device) {
  const auto [cos, sin] = get(seq_len, device);
  TensorList tensors{cos, sin};
  if (depends_on_length(seq_len) &&
      options_.scaling->type == RopeType::longrope) {
    tensors.push_back(factors(device));
  }
  return tensors;
}

std::pair<at::Tensor, at::Tensor> RopeTable::of_documents(
    const Documents& documents) {
  const at::NoGradGuard no_grad;
  const RopeScaling& s = options_.scaling.value();
  const auto dim = static_cast<double>(options_.head_dim);
  const at::Tensor lengths =
      lengths_of_tokens(documents).to(at::kDouble).unsqueeze(1);
  const auto original = static_cast<double>(s.original_max_positions);
  const at::Tensor is_long = lengths.gt(original);
  const at::Tensor exponents =
      at::arange(options_.head_dim / 2, lengths.options()) * (-2.0 / dim);
  at::Tensor frequencies;
  if (s.type == RopeType::dynamic) {
    const at::Tensor longer =
        (lengths * (s.factor / original) - (s.factor - 1.0)).clamp_min(1.0);
    const at::Tensor theta = at::where(
        is_long,
        longer.pow(dim / (dim - 2.0)) * options_.theta,
        at::full_like(longer, options_.theta));
    frequencies = theta.pow(exponents);
  } else {
    const at::Tensor& both = factors(lengths.device());
    frequencies = at::pow(options_.theta, exponents) /
                  at::where(is_long, both[1], both[0]);
  }
  const at::Tensor angles =
      documents.positions.to(at::kDouble).unsqueeze(1) * frequencies;
  const double factor = s.attention_factor;
  return {
      (angles.cos() * factor).to(at::kFloat),
      (angles.sin() * factor).to(at::kFloat)};
}

at::Tensor rope(
    const at::Tensor& x,
    const at::Tensor& cos,
    const at::Tensor& sin,
    bool inverse,
    const at::Tensor& positions) {
  FLATSHARD_CHECK(
      x.dim() == 4 && cos.dim() == 2 &&
          (positions.defined() || x.size(1) == cos.size(0)) &&
          x.size(3) >= 2 * cos.size(1),
      usage,
      "rope: expected x [batch, {}, heads, {} or more], got {}",
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
  const auto at_positions =
      positions.defined() ? std::optional(positions) : std::nullopt;
  const std::int64_t rotated = 2 * cos.size(1);
  if (rotated < x.size(3)) {
    return at::cat(
        {RopeFunction::apply(
             x.narrow(3, 0, rotated),
             cos,
             sin,
             inverse,
             at_positions),
         x.narrow(3, rotated, x.size(3) - rotated)},
        3);
  }
  return RopeFunction::apply(x, cos, sin, inverse, at_positions);
}

}  // namespace flatshard::nn
