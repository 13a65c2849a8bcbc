#include "flatshard/nn/matmul.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/parallel/parallel_products.h"
#include "flatshard/nn/weight_source.h"
#include "flatshard/ops/parameter_check.h"

#include <ATen/ATen.h>

namespace flatshard::nn {
namespace {

std::shared_ptr<WeightSource> weight_source(const ModuleContextPtr& context) {
  return context ? context->weight_source.lock() : nullptr;
}

std::optional<EncodedWeight> float8_weight(
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

bool is_float8(const at::Tensor& weight, const ModuleContextPtr& context) {
  return common_recipe(weight, context).has_value();
}

at::Tensor gathered_gradient(
    const TensorParallelPtr& ranks,
    const at::Tensor& grad,
    const at::Tensor& weight,
    const ModuleContextPtr& context,
    at::Tensor* dx) {
  const at::Tensor rows = as_rows(grad);
  if (!ranks) {
    return rows;
  }
  if (dx == nullptr || is_float8(weight, context)) {
    return ranks->all_gather(rows.contiguous());
  }
  GatheredProduct made = gather_and_multiply(*ranks, rows.contiguous(), weight);
  *dx = std::move(made.product);
  return std::move(made.rows);
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

void add_matmul(
    at::Tensor& y,
    const MatmulRows& x,
    const at::Tensor& weight,
    const ModuleContextPtr& context) {
  if (const auto fp8 = float8_weight(context, weight, PlaneUse::fprop)) {
    float8::matmul(
        y,
        x.row(fp8->operand.recipe),
        fp8->operand,
        {.accumulate = true,
         .fast_accumulation = true,
         .emulate = fp8->emulate});
    return;
  }
  at::addmm_out(y, y, x.tensor(), weight.t());
}

void add_input_gradient(
    at::Tensor& dx,
    const MatmulRows& g,
    const at::Tensor& weight,
    const ModuleContextPtr& context) {
  if (const auto fp8 = float8_weight(context, weight, PlaneUse::dgrad)) {
    refuse_create_graph("a layer with FP8 weights");
    const bool adds = dx.defined();
    if (!adds) {
      dx = at::empty({g.num_rows(), weight.size(1)}, g.options());
    }
    float8::matmul(
        dx,
        g.row(fp8->operand.recipe),
        fp8->operand,
        {.accumulate = adds, .emulate = fp8->emulate});
    return;
  }
  const at::Tensor& rows = g.tensor();
  if (!dx.defined()) {
    dx = at::mm(rows, weight);
  } else if (at::GradMode::is_enabled()) {
    dx = at::addmm(dx, rows, weight);
  } else {
    at::addmm_out(dx, dx, rows, weight);
  }
}

namespace {

// out = g^T x, or out += g^T x, in a dtype that matmuls can write.
void wgrad_product(
    at::Tensor& out,
    bool accumulate,
    const std::optional<float8::Recipe>& recipe,
    const MatmulRows& g,
    const MatmulRows& x) {
  if (recipe) {
    // mxfp8 of activations is emulated wherever mxfp8 of the weight is.
    float8::matmul(
        out,
        g.column(*recipe),
        x.column(*recipe),
        {.accumulate = accumulate, .emulate = true});
  } else if (accumulate) {
    at::addmm_out(out, out, g.tensor().t(), x.tensor());
  } else {
    at::mm_out(out, g.tensor().t(), x.tensor());
  }
}

// Matmuls on a GPU sum bfloat16 and FP8 operands in float32. On CPUs the sum of
// a microbatch is rounded first, so that a reduction may as well add it.
bool adds_to_float32(const at::Tensor& weight) {
  return weight.is_cuda() && weight.scalar_type() == at::kBFloat16;
}

}  // namespace

void write_matmul_wgrad(
    at::Tensor& grad,
    bool accumulate,
    const std::optional<float8::Recipe>& recipe,
    const MatmulRows& g,
    const MatmulRows& x) {
  const at::ScalarType dtype = grad.scalar_type();
  if (recipe ? dtype == at::kFloat || dtype == at::kBFloat16
             : dtype == g.tensor().scalar_type()) {
    wgrad_product(grad, accumulate, recipe, g, x);
    return;
  }
  if (!recipe && dtype == at::kFloat && grad.is_cuda()) {
    // Sums of 16-bit matmuls are float32 anyway.
    const at::Tensor gt = g.tensor().t();
    accumulate ? at::addmm_out(grad, grad, gt, x.tensor(), at::kFloat)
               : at::mm_out(grad, gt, x.tensor(), at::kFloat);
    return;
  }
  at::Tensor value = at::empty(grad.sizes(), g.options());
  wgrad_product(value, false, recipe, g, x);
  accumulate ? grad.add_(value) : grad.copy_(value);
}

at::Tensor deliver_matmul_wgrad(
    const ModuleContextPtr& context,
    const at::Tensor& weight,
    const MatmulRows& g,
    const MatmulRows& x) {
  const auto source = weight_source(context);
  const auto recipe = source ? source->recipe(weight) : std::nullopt;
  if (defer_wgrad(context, weight, [&]() -> LateWgrad {
        return {
            [recipe, g, x](at::Tensor& grad, bool accumulate) {
              write_matmul_wgrad(grad, accumulate, recipe, g, x);
            },
            adds_to_float32(weight)};
      })) {
    return {};
  }
  return deliver_wgrad(
      context,
      weight,
      [&] {
        if (!recipe) {
          return at::mm(g.tensor().t(), x.tensor());
        }
        at::Tensor out = at::empty(weight.sizes(), g.options());
        wgrad_product(out, false, recipe, g, x);
        return out;
      },
      [&](at::Tensor& grad, bool accumulate) {
        write_matmul_wgrad(grad, accumulate, recipe, g, x);
      },
      adds_to_float32(weight));
}

}  // namespace flatshard::nn
