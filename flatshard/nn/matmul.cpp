#include "flatshard/nn/matmul.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/parameter_check.h"
#include "flatshard/nn/weight_source.h"

#include <ATen/ATen.h>

namespace flatshard::nn {
namespace {

std::shared_ptr<WeightSource> weight_source(const ModuleContextPtr& context) {
  return context ? context->weight_source.lock() : nullptr;
}

std::optional<Float8Weight> float8_weight(
    const ModuleContextPtr& context,
    const at::Tensor& weight,
    PlaneUse use) {
  const auto source = weight_source(context);
  return source ? source->plane(weight, use) : std::nullopt;
}

}  // namespace

void check_linear_input(const at::Tensor& x, const at::Tensor& weight) {
  FLATSHARD_CHECK(
      x.dim() >= 1 && x.size(-1) == weight.size(1),
      usage,
      "linear: expected x of [..., {}], got {}",
      weight.size(1),
      c10::str(x.sizes()));
  check_has_memory("Linear", x, weight);
  check_same_dtype("Linear", x, weight);
}

std::optional<float8::Recipe> common_recipe(
    at::ArrayRef<at::Tensor> weights,
    at::ArrayRef<ModuleContextPtr> contexts) {
  std::optional<float8::Recipe> common;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto source = weight_source(contexts[i]);
    const auto recipe = source ? source->recipe(weights[i]) : std::nullopt;
    if (!recipe || (i > 0 && recipe != common)) {
      return std::nullopt;
    }
    common = recipe;
  }
  return common;
}

at::Tensor matmul_forward(
    const MatmulRows& x,
    const at::Tensor& weight,
    const ModuleContextPtr& context,
    const at::Tensor& bias,
    const at::Tensor& residual) {
  if (const auto fp8 = float8_weight(context, weight, PlaneUse::fprop)) {
    at::Tensor y = at::empty({x.num_rows(), weight.size(0)}, x.options());
    float8::matmul(
        y,
        x.row(fp8->operand.recipe),
        fp8->operand,
        {.addend = residual.defined() ? residual.contiguous() : residual,
         .fast_accumulation = true,
         .emulate = fp8->emulate});
    return bias.defined() ? y.add_(bias) : y;
  }
  const at::Tensor& rows = x.tensor();
  const at::Tensor wt = weight.t();
  if (!residual.defined()) {
    return bias.defined() ? at::addmm(bias, rows, wt) : at::mm(rows, wt);
  }
  const at::Tensor y = at::addmm(residual, rows, wt);
  return bias.defined() ? y.add_(bias) : y;
}

void add_input_gradient(
    at::Tensor& dx,
    const MatmulRows& g,
    const at::Tensor& weight,
    const ModuleContextPtr& context) {
  const at::Tensor& rows = g.tensor();
  if (const auto fp8 = float8_weight(context, weight, PlaneUse::dgrad)) {
    refuse_create_graph("a layer with FP8 weights");
    const bool adds = dx.defined();
    if (!adds) {
      dx = at::empty({rows.size(0), weight.size(1)}, rows.options());
    }
    float8::matmul(
        dx,
        g.row(fp8->operand.recipe),
        fp8->operand,
        {.accumulate = adds, .emulate = fp8->emulate});
    return;
  }
  if (!dx.defined()) {
    dx = at::mm(rows, weight);
  } else if (at::GradMode::is_enabled()) {
    dx = at::addmm(dx, rows, weight);
  } else {
    at::addmm_out(dx, dx, rows, weight);
  }
}

at::Tensor deliver_matmul_wgrad(
    const ModuleContextPtr& context,
    const at::Tensor& weight,
    const MatmulRows& g,
    const MatmulRows& x) {
  const auto source = weight_source(context);
  const auto recipe = source ? source->recipe(weight) : std::nullopt;
  // mxfp8 of activations is emulated wherever that of the weight is.
  const auto product = [&](at::Tensor& out, bool accumulate) {
    float8::matmul(
        out,
        g.column(*recipe),
        x.column(*recipe),
        {.accumulate = accumulate, .emulate = true});
  };
  const at::Tensor &dy = g.tensor(), &rows = x.tensor();
  const auto compute = [&] {
    if (!recipe) {
      return at::mm(dy.t(), rows);
    }
    at::Tensor out = at::empty(weight.sizes(), dy.options());
    product(out, false);
    return out;
  };
  return deliver_wgrad(
      context,
      weight,
      compute,
      [&](at::Tensor& grad, bool accumulate) {
        const bool takes_product = recipe
                                       ? grad.scalar_type() == at::kFloat ||
                                             grad.scalar_type() == at::kBFloat16
                                       : grad.scalar_type() == dy.scalar_type();
        if (!takes_product) {
          accumulate ? grad.add_(compute()) : grad.copy_(compute());
        } else if (recipe) {
          product(grad, accumulate);
        } else if (accumulate) {
          at::addmm_out(grad, grad, dy.t(), rows);
        } else {
          at::mm_out(grad, dy.t(), rows);
        }
      });
}

}  // namespace flatshard::nn
