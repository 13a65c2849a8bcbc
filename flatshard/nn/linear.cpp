#include "flatshard/nn/linear.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/nn/matmul.h"
#include "flatshard/nn/parallel/parallel_products.h"

#include <utility>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns null if the program has hooks on the parameter, because these need
// its gradient as a tensor.
ModuleContextPtr unless_hooked(
    const ModuleContextPtr& context,
    const at::Tensor& parameter) {
  return torch::autograd::impl::hooks(parameter).empty() ? context : nullptr;
}

// With `ranks` the layer is row-parallel: x has all tokens, y and its gradient
// have this rank's tokens.
struct LinearFunction : torch::autograd::Function<LinearFunction> {
  enum Input { kX, kWeight, kBias, kResidual, kFactors };

  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& maybe_bias,
      const std::optional<at::Tensor>& maybe_residual,
      at::TensorList factors,
      const ModuleContextPtr& context,
      const AdapterCallsPtr& calls,
      const TensorParallelPtr& ranks) {
    const at::Tensor bias = maybe_bias.value_or(at::Tensor());
    const at::Tensor residual = maybe_residual.value_or(at::Tensor());
    save_context(ctx, context);
    save_ranks(ctx, ranks);
    node_state(ctx).adds = residual.defined();
    const MatmulRows rows(as_rows(x));
    const AdapterForward adapters(calls, factors, rows);
    std::vector<std::int64_t> sizes = with_last(x, weight.size(0));
    if (ranks) {
      sizes = sizes_of_part(*ranks, sizes);
    }
    const at::Tensor y = adapters.matmul_and_scatter(
        ranks,
        weight,
        context,
        bias,
        residual.defined() ? as_rows(residual) : residual);
    variable_list saved{x, weight, bias, rows.amax()};
    adapters.save(ctx, saved);
    ctx->save_for_backward(saved);
    return reshape_result(y, sizes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list saved = ctx->get_saved_variables();
    AdapterBackward adapters(ctx, saved);
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2];
    const ModuleContextPtr context = saved_context(ctx);
    at::Tensor dx;
    const at::Tensor dy = gathered_gradient(
        saved_ranks(ctx),
        grads[0],
        weight,
        context,
        ctx->needs_input_grad(kX) ? &dx : nullptr);
    const MatmulRows g = gradient_rows(
        dy,
        ctx->needs_input_grad(kX) && ctx->needs_input_grad(kWeight));
    variable_list out(kFactors + adapters.num_factors() + 3);
    // Edges count defined tensors only.
    const std::size_t residual_edge = kBias + (bias.defined() ? 1 : 0);
    const bool has_residual = node_state(ctx).adds;
    adapters.set_places(
        {.edge = residual_edge + (has_residual ? 1 : 0), .out = kFactors});
    adapters.begin(dy, out);
    if (ctx->needs_input_grad(kX)) {
      if (!dx.defined()) {
        add_input_gradient(dx, g, weight, context);
      }
      adapters.add_input_gradient(dx);
      out[kX] = dx.view(x.sizes());
    }
    adapters.end(x, out);
    if (ctx->needs_input_grad(kWeight)) {
      out[kWeight] = deliver_matmul_wgrad(
          unless_hooked(context, weight),
          weight,
          g,
          activation_rows(as_rows(x), saved[3]));
    }
    if (bias.defined() && ctx->needs_input_grad(kBias)) {
      out[kBias] = deliver_bias_grad(unless_hooked(context, bias), bias, dy);
    }
    if (has_residual && ctx->needs_input_grad(residual_edge)) {
      out[kResidual] = grads[0];
    }
    return out;
  }
};

at::Tensor run_linear(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& bias,
    const at::Tensor& residual,
    const ModuleContextPtr& context,
    const Adapter* adapter,
    const TensorParallelPtr& sums_over = nullptr) {
  check_linear_input(x, weight);
  // Undefined tensors become empty optionals, because a Function rejects them.
  return LinearFunction::apply(
      x,
      weight,
      as_optional(bias),
      as_optional(residual),
      at::TensorList(adapter_factors({adapter})),
      context,
      AdapterCalls::of({adapter}),
      sums_over);
}

}  // namespace

at::Tensor linear(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& bias,
    const at::Tensor& residual,
    const ModuleContextPtr& context) {
  return run_linear(x, weight, bias, residual, context, /*adapter=*/nullptr);
}

LinearImpl::LinearImpl(
    std::int64_t in_features,
    std::int64_t out_features,
    LinearOptions options)
    : Module("Linear") {
  weight_ =
      declare_parameter("weight", {out_features, in_features}, options.init);
  set_reads_planes("weight");
  if (options.bias) {
    bias_ = declare_parameter("bias", {out_features}, InitSpec::zeros());
  }
  share(std::move(options.ranks), options.cut);
}

void LinearImpl::share(TensorParallelPtr ranks, LinearCut cut) {
  if (!ranks) {
    return;
  }
  FLATSHARD_CHECK(
      weight_.is_meta() && parts_.empty(),
      usage,
      "a linear layer [{}, {}] {}; share layers once, before their parameters "
      "have memory",
      weight_.size(0),
      weight_.size(1),
      parts_.empty() ? "has memory" : "is shared already");
  FLATSHARD_CHECK(
      !adapter_,
      usage,
      "a linear layer [{}, {}] has an adapter; share layers before",
      weight_.size(0),
      weight_.size(1));
  const bool is_row = cut == LinearCut::row;
  const std::int64_t dim = is_row ? 1 : 0;
  const std::int64_t whole = weight_.size(dim);
  const IndexPart part = equal_part_of(
      ranks,
      whole,
      is_row ? "the inputs of a row-parallel layer"
             : "the outputs of a column-parallel layer");
  const auto take = [&](const char* name, const at::Tensor& parameter) {
    parts_[name] = {.dim = dim, .whole = whole, .part = part};
    keep_part(parameter, parts_[name]);
  };
  take("weight", weight_);
  if (bias_.defined() && !is_row) {
    take("bias", bias_);
  }
  (is_row ? sums_over_ : gathers_from_) = std::move(ranks);
}

at::Tensor LinearImpl::forward(
    const at::Tensor& x,
    const at::Tensor& residual) {
  if (!sums_over_) {
    return run_linear(
        gather_sequence(gathers_from_, x),
        weight_,
        bias_,
        residual,
        context(),
        adapter());
  }
  at::Tensor y =
      run_linear(x, weight_, {}, {}, context(), adapter(), sums_over_);
  if (bias_.defined()) {
    y = y + bias_;
  }
  return residual.defined() ? y + residual : y;
}

std::vector<std::int64_t> LinearImpl::whole_shape() const {
  std::vector<std::int64_t> shape = weight_.sizes().vec();
  if (const auto cut = parts_.find("weight"); cut != parts_.end()) {
    shape[cut->second.dim] = cut->second.whole;
  }
  return shape;
}

void LinearImpl::add_adapter(
    const AdapterOptions& options,
    const LinearImpl* shared) {
  FLATSHARD_CHECK(
      !adapter_ && (shared == nullptr || shared->adapter_),
      usage,
      "expected a layer without an adapter, and one with it to share A of");
  const std::vector<std::int64_t> whole = whole_shape();
  Adapter adapter{
      .a = shared == nullptr
               ? LoraFactor(options.rank, whole[1], options.a_init)
               : LoraFactor(*shared->adapter_->a),
      .b = LoraFactor(whole[0], options.rank, InitSpec::zeros()),
      .scale = options.scale,
      .dropout = options.dropout,
      .dropout_key = options.dropout_key};
  if (const auto cut = parts_.find("weight"); cut != parts_.end()) {
    const ParameterPart& part = cut->second;
    if (part.dim == 0) {
      adapter.b->take(part);
    } else if (shared == nullptr) {
      adapter.a->take(part);
    }
    adapter.dropout_column = part.dim == 0 ? 0 : part.part.begin;
    FLATSHARD_CHECK(
        !adapter.dropout || part.dim == 0 || part.part.size() % 4 == 0,
        config,
        "the dropout of an adapter: expected ranks to share a multiple of 4 "
        "input features each, got {} of {}; use a dropout of 0, or other "
        "layers",
        part.part.size(),
        part.whole);
  }
  register_module("lora_A", adapter.a);
  register_module("lora_B", adapter.b);
  adapter_ = std::move(adapter);
}

at::Tensor deliver_bias_grad(
    const ModuleContextPtr& context,
    const at::Tensor& bias,
    const at::Tensor& dy) {
  return deliver_wgrad(context, bias, [&] { return dy.sum(0); });
}

}  // namespace flatshard::nn
