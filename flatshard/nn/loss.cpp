#include "flatshard/nn/loss.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/cross_entropy.h"
#include "flatshard/nn/matmul.h"

#include <algorithm>

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
    const bool keep = wants_grad && options.chunk_tokens == 0;
    const std::int64_t chunk = keep ? std::max<std::int64_t>(n, 1)
                               : options.chunk_tokens > 0 ? options.chunk_tokens
                                                          : kEvalChunk;
    at::Tensor loss = at::empty({n}, f32);
    at::Tensor lse = at::empty({n}, f32);
    at::Tensor logits = at::empty({std::min(chunk, n), vocab}, rows.options());
    for (std::int64_t at = 0; at < n; at += chunk) {
      const std::int64_t m = std::min(chunk, n - at);
      at::Tensor part = logits.narrow(0, 0, m);
      at::Tensor loss_part = loss.narrow(0, at, m);
      at::Tensor lse_part = lse.narrow(0, at, m);
      at::mm_out(part, rows.narrow(0, at, m), weight.t());
      const cuda::CrossEntropyArgs args{
          .ignore_index = options.ignore_index,
          .write_gradient = keep};
      const at::Tensor targets_part = flat.narrow(0, at, m);
      if (options.ranks) {
        part_cross_entropy(
            part,
            targets_part,
            scale,
            loss_part,
            lse_part,
            args,
            options);
      } else {
        chunk_cross_entropy(
            part,
            targets_part,
            scale,
            loss_part,
            lse_part,
            args,
            options.soft_cap);
      }
    }
    if (keep) {
      ctx->save_for_backward({hidden, weight, logits});
    } else if (wants_grad) {
      ctx->saved_data["chunk"] = chunk;
      ctx->saved_data["ignore_index"] = options.ignore_index;
      ctx->saved_data["is_part"] = options.ranks != nullptr;
      ctx->saved_data["soft_cap"] = options.soft_cap;
      ctx->save_for_backward({hidden, weight, flat, lse, scale});
    }
    return loss.sum().mul_(scale);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("linear_cross_entropy");
    const variable_list saved = ctx->get_saved_variables();
    variable_list out(6);
    if (saved.size() == 3) {
      backward_kept(ctx, saved, grads[0], out);
    } else {
      backward_again(ctx, saved, grads[0], out);
    }
    return out;
  }

  static void backward_kept(
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

  static void backward_again(
      AutogradContext* ctx,
      const variable_list& saved,
      const at::Tensor& g,
      variable_list& out) {
    const at::Tensor &hidden = saved[0], &weight = saved[1];
    const at::Tensor &targets = saved[2], &scale = saved[4];
    at::Tensor lse = saved[3];
    const std::int64_t chunk = ctx->saved_data["chunk"].toInt();
    const cuda::CrossEntropyArgs args{
        .ignore_index = ctx->saved_data["ignore_index"].toInt(),
        .lse_is_given = true,
        .write_gradient = true,
        .is_part = ctx->saved_data["is_part"].toBool()};
    const double soft_cap = ctx->saved_data["soft_cap"].toDouble();
    const at::Tensor rows = as_rows(hidden);
    const std::int64_t n = rows.size(0);
    const at::Tensor total = scale * g;
    at::Tensor logits =
        at::empty({std::min(chunk, n), weight.size(0)}, rows.options());
    at::Tensor dx;
    if (ctx->needs_input_grad(kHidden)) {
      dx = at::empty_like(rows);
      out[kHidden] = dx.view(hidden.sizes());
    }
    const auto run = [&](at::Tensor* dw, bool accumulate) {
      if (dw != nullptr && n == 0 && !accumulate) {
        dw->zero_();
      }
      // A sum in 16 bits would be rounded with each chunk.
      const bool rounds_once = dw != nullptr && n > chunk &&
                               dw->element_size() < std::int64_t{sizeof(float)};
      at::Tensor sum =
          dw == nullptr ? at::Tensor()
          : rounds_once
              ? at::empty(dw->sizes(), dw->options().dtype(at::kFloat))
              : *dw;
      bool adds = accumulate && !rounds_once;
      for (std::int64_t at = 0; at < n; at += chunk) {
        const std::int64_t m = std::min(chunk, n - at);
        const at::Tensor x = rows.narrow(0, at, m);
        at::Tensor d = logits.narrow(0, 0, m);
        at::Tensor lse_part = lse.narrow(0, at, m);
        at::Tensor no_loss;
        at::mm_out(d, x, weight.t());
        chunk_cross_entropy(
            d,
            targets.narrow(0, at, m),
            total,
            no_loss,
            lse_part,
            args,
            soft_cap);
        if (dx.defined()) {
          at::Tensor dx_part = dx.narrow(0, at, m);
          at::mm_out(dx_part, d, weight);
        }
        if (dw == nullptr) {
          continue;
        }
        write_matmul_wgrad(
            sum,
            adds,
            std::nullopt,
            gradient_rows(d, false),
            MatmulRows(x));
        adds = true;
      }
      if (rounds_once) {
        accumulate ? dw->add_(sum) : dw->copy_(sum);
      }
    };
    if (!ctx->needs_input_grad(kWeight)) {
      run(nullptr, false);
      return;
    }
    out[kWeight] = deliver_wgrad(
        saved_context(ctx),
        weight,
        [&] {
          at::Tensor dw = at::empty_like(weight);
          run(&dw, false);
          return dw;
        },
        [&](at::Tensor& grad, bool accumulate) { run(&grad, accumulate); });
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
