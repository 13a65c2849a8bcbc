#include "flatshard/nn/attention_kernels.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/recompute.h"

#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>

#include <algorithm>
#include <utility>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// [batch, seq, heads, head_dim] <-> [batch, heads, seq, head_dim]
at::Tensor by_head(const at::Tensor& x) {
  return x.transpose(1, 2);
}

class CudnnKernel : public AttentionKernel {
 public:
  CudnnKernel(std::optional<double> scale, bool with_logsumexp)
      : scale_(scale), with_logsumexp_(with_logsumexp) {}

  const char* name() const override { return "cuDNN"; }

  TensorList forward(const TensorList& in) const override {
    const auto
        [out, logsumexp, q_ends, k_ends, max_q, max_k, seed, offset, mask] =
            at::_scaled_dot_product_cudnn_attention(
                by_head(in[kQ]),
                by_head(in[kK]),
                by_head(in[kV]),
                /*attn_bias=*/std::nullopt,
                with_logsumexp_,
                /*dropout_p=*/0.0,
                /*is_causal=*/true,
                /*return_debug_mask=*/false,
                scale_);
    return {by_head(out), logsumexp, q_ends, k_ends, seed, offset};
  }

  TensorList backward(
      const at::Tensor& grad,
      const TensorList& in,
      const TensorList& results) const override {
    const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
        by_head(grad),
        by_head(in[kQ]),
        by_head(in[kK]),
        by_head(in[kV]),
        by_head(results[0]),
        results[1],
        /*philox_seed=*/results[4],
        /*philox_offset=*/results[5],
        /*attn_bias=*/at::Tensor(),
        /*cum_seq_q=*/results[2],
        /*cum_seq_k=*/results[3],
        in[kQ].size(1),
        in[kK].size(1),
        /*dropout_p=*/0.0,
        /*is_causal=*/true,
        scale_);
    return {by_head(dq), by_head(dk), by_head(dv)};
  }

 private:
  std::optional<double> scale_;
  bool with_logsumexp_;
};

// With sinks: l is the logsumexp of a row's scores and s the sink. The result
// is the kernel's output times exp(l - l'), l' = log(exp(l) + exp(s)). The
// backward kernel reads this result and l'. Source: the gradients of a softmax
// over one more score with the value 0.
class FlashKernel : public AttentionKernel {
 public:
  explicit FlashKernel(FlashOptions options) : options_(std::move(options)) {
    if (options_.window > 0) {
      before_ = options_.window - 1;
      after_ = 0;
    }
  }

  const char* name() const override { return "FlashAttention"; }

  TensorList forward(const TensorList& in) const override {
    auto [out, logsumexp, seed, unused, mask] = at::_flash_attention_forward(
        in[kQ],
        in[kK],
        in[kV],
        offsets(sequences()),
        offsets(keys()),
        length(in[kQ], sequences()),
        length(in[kK], keys()),
        /*dropout_p=*/0.0,
        /*is_causal=*/true,
        /*return_debug_mask=*/false,
        options_.scale,
        before_,
        after_);
    if (in.size() > kSinks) {
      const at::Tensor sink = by_row(in[kSinks]);
      const at::Tensor share = at::sigmoid(logsumexp - sink);
      out = (out * by_token(share).unsqueeze(-1)).to(in[kQ].scalar_type());
      logsumexp = at::logaddexp(logsumexp, sink);
    }
    return {out, logsumexp, seed, unused};
  }

  TensorList backward(
      const at::Tensor& grad,
      const TensorList& in,
      const TensorList& results) const override {
    const at::Tensor& out = results[0];
    const at::Tensor& logsumexp = results[1];
    const at::Tensor g = grad.contiguous();
    auto [dq, dk, dv] = at::_flash_attention_backward(
        g,
        in[kQ],
        in[kK],
        in[kV],
        out,
        logsumexp,
        offsets(sequences()).value_or(at::Tensor()),
        offsets(keys()).value_or(at::Tensor()),
        length(in[kQ], sequences()),
        length(in[kK], keys()),
        /*dropout_p=*/0.0,
        /*is_causal=*/true,
        /*rng_state=*/results[2],
        /*unused=*/results[3],
        options_.scale,
        before_,
        after_);
    TensorList grads{dq, dk, dv};
    if (in.size() > kSinks) {
      const at::Tensor& sinks = in[kSinks];
      grads.emplace_back();
      if (sinks.requires_grad()) {
        const at::Tensor weights = by_token((by_row(sinks) - logsumexp).exp());
        const at::Tensor dots = (g.to(at::kFloat) * out).sum(-1);
        grads.back() = (weights * dots)
                           .neg()
                           .flatten(0, -2)
                           .sum(0)
                           .to(sinks.scalar_type());
      }
    }
    return grads;
  }

 private:
  using Sequences = std::optional<FlashSequences>;

  const Sequences& sequences() const { return options_.sequences; }
  const Sequences& keys() const {
    return options_.keys ? options_.keys : options_.sequences;
  }
  static std::optional<at::Tensor> offsets(const Sequences& of) {
    return of ? std::optional(of->offsets) : std::nullopt;
  }
  static std::int64_t length(const at::Tensor& x, const Sequences& of) {
    return of ? of->max_length : x.size(1);
  }
  // [heads] -> [heads, 1] float
  static at::Tensor by_row(const at::Tensor& sinks) {
    return sinks.to(at::kFloat).unsqueeze(-1);
  }
  // [..., heads, tokens] -> [..., tokens, heads]
  static at::Tensor by_token(const at::Tensor& of_heads) {
    return of_heads.transpose(-2, -1);
  }

  FlashOptions options_;
  std::optional<std::int64_t> before_;  // tokens that one attends to
  std::optional<std::int64_t> after_;
};

// float32 on GPUs.
class EfficientKernel : public AttentionKernel {
 public:
  EfficientKernel(std::optional<double> scale, bool with_logsumexp)
      : scale_(scale), with_logsumexp_(with_logsumexp) {}

  const char* name() const override { return "memory-efficient attention"; }

  TensorList forward(const TensorList& in) const override {
    const auto [out, logsumexp, seed, offset] =
        at::_scaled_dot_product_efficient_attention(
            by_head(in[kQ]),
            by_head(in[kK]),
            by_head(in[kV]),
            /*attn_bias=*/std::nullopt,
            with_logsumexp_,
            /*dropout_p=*/0.0,
            /*is_causal=*/true,
            scale_);
    return {by_head(out), logsumexp, seed, offset};
  }

  TensorList backward(
      const at::Tensor& grad,
      const TensorList& in,
      const TensorList& results) const override {
    const auto [dq, dk, dv, dbias] =
        at::_scaled_dot_product_efficient_attention_backward(
            by_head(grad),
            by_head(in[kQ]),
            by_head(in[kK]),
            by_head(in[kV]),
            /*attn_bias=*/at::Tensor(),
            by_head(results[0]),
            results[1],
            /*philox_seed=*/results[2],
            /*philox_offset=*/results[3],
            /*dropout_p=*/0.0,
            /*grad_input_mask=*/{true, true, true, false},
            /*is_causal=*/true,
            scale_);
    return {by_head(dq), by_head(dk), by_head(dv)};
  }

 private:
  std::optional<double> scale_;
  bool with_logsumexp_;
};

class CpuKernel : public AttentionKernel {
 public:
  explicit CpuKernel(std::optional<double> scale) : scale_(scale) {}

  const char* name() const override { return "attention on a CPU"; }

  TensorList forward(const TensorList& in) const override {
    const auto [out, logsumexp] =
        at::_scaled_dot_product_flash_attention_for_cpu(
            by_head(in[kQ]),
            by_head(in[kK]),
            by_head(in[kV]),
            /*dropout_p=*/0.0,
            /*is_causal=*/true,
            /*attn_mask=*/std::nullopt,
            scale_);
    return {by_head(out), logsumexp};
  }

  TensorList backward(
      const at::Tensor& grad,
      const TensorList& in,
      const TensorList& results) const override {
    const auto [dq, dk, dv] =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(
            by_head(grad),
            by_head(in[kQ]),
            by_head(in[kK]),
            by_head(in[kV]),
            by_head(results[0]),
            results[1],
            /*dropout_p=*/0.0,
            /*is_causal=*/true,
            /*attn_mask=*/std::nullopt,
            scale_);
    return {by_head(dq), by_head(dk), by_head(dv)};
  }

 private:
  std::optional<double> scale_;
};

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      at::TensorList inputs,
      const AttentionKernelPtr& kernel) {
    TensorList saved = inputs.vec();
    const TensorList results = keep_once(kernel->name(), [&] {
      TensorList computed = kernel->forward(saved);
      // The same tensor is returned and saved, so that autograd and KeptTensors
      // notice a write into it.
      computed[0] = reshape_result(computed[0], computed[0].sizes());
      return computed;
    });
    saved.insert(saved.end(), results.begin(), results.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["kernel"] = c10::IValue::make_capsule(kernel);
    ctx->saved_data["inputs"] = static_cast<std::int64_t>(inputs.size());
    return results[0];
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("attention");
    const auto capsule = ctx->saved_data["kernel"].toCapsule();
    const variable_list saved = ctx->get_saved_variables();
    const auto results = saved.begin() + ctx->saved_data["inputs"].toInt();
    variable_list out = static_cast<const AttentionKernel&>(*capsule).backward(
        grads[0],
        {saved.begin(), results},
        {results, saved.end()});
    out.emplace_back();  // the kernel
    return out;
  }
};

}  // namespace

at::Tensor run_attention(AttentionKernelPtr kernel, const TensorList& inputs) {
  return AttentionFunction::apply(at::TensorList(inputs), kernel);
}

bool needs_logsumexp(const TensorList& inputs) {
  return keeps_results() ||
         (at::GradMode::is_enabled() &&
          std::ranges::any_of(inputs, [](const at::Tensor& input) {
            return input.requires_grad();
          }));
}

AttentionKernelPtr cudnn_kernel(
    std::optional<double> scale,
    bool with_logsumexp) {
  return c10::make_intrusive<CudnnKernel>(scale, with_logsumexp);
}

AttentionKernelPtr flash_kernel(FlashOptions options) {
  return c10::make_intrusive<FlashKernel>(std::move(options));
}

AttentionKernelPtr aten_kernel(
    const TensorList& inputs,
    std::optional<double> scale,
    bool with_logsumexp) {
  const at::Tensor& q = inputs[kQ];
  if (!q.is_cpu() && !q.is_cuda()) {
    return {};
  }
  const auto choice = static_cast<at::SDPBackend>(at::_fused_sdp_choice(
      by_head(q),
      by_head(inputs[kK]),
      by_head(inputs[kV]),
      /*attn_mask=*/std::nullopt,
      /*dropout_p=*/0.0,
      /*is_causal=*/true,
      scale));
  switch (choice) {
    case at::SDPBackend::flash_attention:
      if (q.is_cpu()) {
        return c10::make_intrusive<CpuKernel>(scale);
      }
      // ATen pads other sizes of heads.
      return q.size(-1) % 8 == 0 ? flash_kernel({.scale = scale})
                                 : AttentionKernelPtr();
    case at::SDPBackend::cudnn_attention:
      return cudnn_kernel(scale, with_logsumexp);
    case at::SDPBackend::efficient_attention:
      return c10::make_intrusive<EfficientKernel>(scale, with_logsumexp);
    default:
      return {};
  }
}

}  // namespace flatshard::nn
