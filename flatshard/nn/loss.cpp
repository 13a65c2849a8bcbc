#include "flatshard/nn/loss.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/cross_entropy.h"
#include "flatshard/nn/matmul.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Tokens at a time when nothing has to be kept.
constexpr std::int64_t kEvalChunk = 2048;
void check_targets(
    const at::Tensor& targets,
    std::int64_t vocab,
    std::int64_t ignore_index) {
  // On CUDA this would stop the host. There a bad target makes the loss NaN.
  if (!targets.is_cpu()) {
    return;
  }
  const at::Tensor bad =
      targets.ne(ignore_index)
          .logical_and_(targets.lt(0).logical_or_(targets.ge(vocab)));
  if (bad.any().item<bool>()) {
    FLATSHARD_THROW(
        usage,
        "expected targets in [0, {}) or {}, got {}",
        vocab,
        ignore_index,
        targets.masked_select(bad)[0].item<std::int64_t>());
  }
}

// The gradients for a loss whose own gradient is 1, of one chunk of tokens
// after the other.
struct ChunkGradients {
  at::Tensor hidden;  ///< [tokens, dim]; undefined: nobody wants it
  at::Tensor weight;  ///< float32: a sum in 16 bits would be rounded each time
  bool adds = false;

  ChunkGradients() = default;
  ChunkGradients(const at::Tensor& of_hidden, const at::Tensor& of_weight) {
    if (of_hidden.requires_grad()) {
      hidden = at::empty_like(as_rows(of_hidden));
    }
    if (of_weight.requires_grad()) {
      const at::TensorOptions f32 = of_weight.options().dtype(at::kFloat);
      weight = of_hidden.numel() == 0 ? at::zeros(of_weight.sizes(), f32)
                                      : at::empty(of_weight.sizes(), f32);
    }
  }

  /// @param d   [n, vocab]: the gradient of the logits of tokens `first` to
  ///   `first` + n
  /// @param x   [n, dim]: these tokens
  void add(
      const at::Tensor& d,
      const at::Tensor& x,
      const at::Tensor& of_weight,
      std::int64_t first) {
    if (hidden.defined()) {
      at::Tensor part = hidden.narrow(0, first, d.size(0));
      at::mm_out(part, d, of_weight);
    }
    if (weight.defined()) {
      write_matmul_wgrad(
          weight,
          std::exchange(adds, true),
          std::nullopt,
          gradient_rows(d, false),
          MatmulRows(x));
    }
  }
};

struct LossFunction : torch::autograd::Function<LossFunction> {
  enum Input { kHidden, kWeight };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& hidden,
      const at::Tensor& weight,
      const at::Tensor& targets,
      const LossOptions& options,
      bool wants_grad,
      const ModuleContextPtr& context) {
    save_context(ctx, context);
    const at::Tensor rows = as_rows(hidden);
    at::Tensor flat = targets.reshape({-1});
    const std::int64_t n = rows.size(0);
    const std::int64_t vocab = weight.size(0);
    check_targets(
        flat,
        options.ranks ? options.vocab : vocab,
        options.ignore_index);
    const at::TensorOptions f32 = rows.options().dtype(at::kFloat);
    const at::Tensor scale = options.reduction == LossReduction::mean
                                 ? flat.ne(options.ignore_index)
                                       .sum()
                                       .to(at::kFloat)
                                       .clamp_min_(1.0F)
                                       .reciprocal_()
                                 : at::ones({}, f32);
    if (options.ranks) {
      flat = targets_of_part(flat, options);
    }
    const bool in_chunks = options.chunk_tokens > 0;
    const std::int64_t chunk = in_chunks    ? options.chunk_tokens
                               : wants_grad ? std::max<std::int64_t>(n, 1)
                                            : kEvalChunk;
    const cuda::CrossEntropyArgs args{
        .ignore_index = options.ignore_index,
        .write_gradient = wants_grad};
    // A gradient divided by the number of tokens could underflow in 16 bits,
    // so backward scales the gradients of chunks.
    const at::Tensor grad_scale = in_chunks ? at::ones({}, f32) : scale;
    at::Tensor loss = at::empty({n}, f32);
    at::Tensor lse = at::empty({std::min(chunk, n)}, f32);
    at::Tensor logits = at::empty({std::min(chunk, n), vocab}, rows.options());
    ChunkGradients gradients;
    if (in_chunks && wants_grad) {
      gradients = ChunkGradients(hidden, weight);
    }
    for (std::int64_t at = 0; at < n; at += chunk) {
      const std::int64_t m = std::min(chunk, n - at);
      at::Tensor part = logits.narrow(0, 0, m);
      at::Tensor loss_part = loss.narrow(0, at, m);
      at::Tensor lse_part = lse.narrow(0, 0, m);
      at::mm_out(part, rows.narrow(0, at, m), weight.t());
      const at::Tensor targets_part = flat.narrow(0, at, m);
      if (options.ranks) {
        part_cross_entropy(
            part,
            targets_part,
            grad_scale,
            loss_part,
            lse_part,
            args,
            options);
      } else {
        chunk_cross_entropy(
            part,
            targets_part,
            grad_scale,
            loss_part,
            lse_part,
            args,
            options.soft_cap);
      }
      gradients.add(part, rows.narrow(0, at, m), weight, at);
    }
    ctx->saved_data["in_chunks"] = in_chunks;
    if (in_chunks && wants_grad) {
      ctx->save_for_backward(
          {hidden, weight, scale, gradients.hidden, gradients.weight});
    } else if (wants_grad) {
      ctx->save_for_backward({hidden, weight, logits});
    }
    return loss.sum().mul_(scale);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("linear_cross_entropy");
    const variable_list saved = ctx->get_saved_variables();
    variable_list out(6);
    if (ctx->saved_data["in_chunks"].toBool()) {
      backward_of_chunks(ctx, saved, grads[0], out);
    } else {
      backward_whole(ctx, saved, grads[0], out);
    }
    return out;
  }

  static void backward_whole(
      AutogradContext* ctx,
      const variable_list& saved,
      const at::Tensor& g,
      variable_list& out) {
    const at::Tensor &hidden = saved[0], &weight = saved[1], &d = saved[2];
    at::Tensor rows = as_rows(hidden);
    // On the CPU reading g costs nothing, and it is 1 in most programs.
    const bool one = g.is_cpu() && g.item<float>() == 1.0F;
    if (ctx->needs_input_grad(kHidden)) {
      at::Tensor dx = at::mm(d, weight);
      out[kHidden] = (one ? dx : dx.mul_(g)).view(hidden.sizes());
    }
    if (ctx->needs_input_grad(kWeight)) {
      if (!one) {
        rows = (rows * g).to(d.scalar_type());
      }
      out[kWeight] = deliver_matmul_wgrad(
          saved_context(ctx),
          weight,
          gradient_rows(d, false),
          MatmulRows(rows));
    }
  }

  static void backward_of_chunks(
      AutogradContext* ctx,
      const variable_list& saved,
      const at::Tensor& g,
      variable_list& out) {
    const at::Tensor &hidden = saved[0], &weight = saved[1];
    const at::Tensor &dx = saved[3], &dw = saved[4];
    const at::Tensor scale = saved[2] * g;
    if (dx.defined()) {
      at::Tensor scaled = at::empty_like(dx);
      at::mul_out(scaled, dx, scale);
      out[kHidden] = scaled.view(hidden.sizes());
    }
    if (dw.defined()) {
      out[kWeight] = deliver_wgrad(
          saved_context(ctx),
          weight,
          [&] {
            at::Tensor grad = at::empty_like(weight);
            at::mul_out(grad, dw, scale);
            return grad;
          },
          [&](at::Tensor& grad, bool accumulate) {
            accumulate ? grad.addcmul_(dw, scale)
                       : at::mul_out(grad, dw, scale);
          },
          /*adds_to_float32=*/dw.is_cuda());
    }
  }
};

}  // namespace

at::Tensor soft_capped(const at::Tensor& logits, double cap) {
  return cap > 0.0 ? (logits / cap).tanh() * cap : logits;
}

at::Tensor linear_cross_entropy(
    const at::Tensor& hidden,
    const at::Tensor& weight,
    const at::Tensor& targets,
    const LossOptions& options,
    const ModuleContextPtr& context) {
  FLATSHARD_CHECK(
      targets.scalar_type() == at::kLong &&
          hidden.sizes().slice(0, hidden.dim() - 1) == targets.sizes() &&
          hidden.size(-1) == weight.size(1),
      usage,
      "linear_cross_entropy: expected int64 targets of hidden's leading shape "
      "and weight [vocab, {}], got targets {} and weight {}",
      hidden.size(-1),
      c10::str(targets.sizes()),
      c10::str(weight.sizes()));
  FLATSHARD_CHECK(
      options.chunk_tokens >= 0,
      config,
      "chunk_tokens: expected 0 or more, got {}",
      options.chunk_tokens);
  FLATSHARD_CHECK(
      !options.ranks ||
          weight.size(0) == part_of(options.ranks, options.vocab).size(),
      usage,
      "linear_cross_entropy: expected this rank's {} rows of a vocabulary of "
      "{}, got {}",
      part_of(options.ranks, options.vocab).size(),
      options.vocab,
      weight.size(0));
  const bool wants_grad = at::GradMode::is_enabled() &&
                          (hidden.requires_grad() || weight.requires_grad());
  return LossFunction::apply(
      hidden,
      weight,
      targets,
      options,
      wants_grad,
      context);
}

}  // namespace flatshard::nn
