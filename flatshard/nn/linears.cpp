#include "flatshard/nn/autograd.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/matmul.h"
#include "flatshard/nn/parallel/parallel_products.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

// Linear layers that read one input.
namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Weights that read one input; x is input 0, then the weights, then no biases
// or one for each weight, then the factors of adapters. With `ranks` x has this
// rank's tokens, and the node keeps those. The backward all-gathers them again
// while it computes the gradient of x, and reduce-scatters that while it
// computes the weight gradients. In forward the first matmul starts before all
// tokens have arrived. The others are too small for that or need not wait.
struct LinearsFunction : torch::autograd::Function<LinearsFunction> {
  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      at::TensorList weights,
      at::TensorList biases,
      at::TensorList factors,
      const std::vector<ModuleContextPtr>& contexts,
      const AdapterCallsPtr& calls,
      const TensorParallelPtr& ranks) {
    ctx->set_materialize_grads(false);
    node_state(ctx).contexts = contexts;
    save_ranks(ctx, ranks);
    std::vector<std::int64_t> sizes = x.sizes().vec();
    GatheredProduct first{as_rows(x), {}};
    if (ranks) {
      const at::Tensor part = first.rows.contiguous();
      if (calls || is_float8(weights[0], contexts[0])) {
        first.rows = ranks->all_gather(part);
      } else {
        first = gather_and_multiply(
            *ranks,
            part,
            weights[0].t(),
            biases.empty() ? at::Tensor() : biases[0]);
      }
      sizes[sizes.size() - 2] *= ranks->size();
    }
    const MatmulRows rows(first.rows);
    const AdapterForward adapters(calls, factors, rows);
    variable_list out;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      sizes.back() = weights[i].size(0);
      const at::Tensor y = i == 0 && first.product.defined()
                               ? first.product
                               : adapters.matmul(
                                     i,
                                     weights[i],
                                     contexts[i],
                                     biases.empty() ? at::Tensor() : biases[i]);
      out.push_back(reshape_result(y, sizes));
    }
    variable_list saved{x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    saved.insert(saved.end(), biases.begin(), biases.end());
    saved.push_back(rows.amax());
    adapters.save(ctx, saved);
    ctx->save_for_backward(saved);
    return out;
  }

  // `grads` is a reference. A gradient is freed once it is quantized.
  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    variable_list saved = ctx->get_saved_variables();
    AdapterBackward adapters(ctx, saved);
    const at::Tensor& x = saved[0];
    const std::size_t first_bias = 1 + grads.size();
    const bool has_biases = saved.size() > first_bias + 1;
    const std::size_t first_factor =
        first_bias + (has_biases ? grads.size() : 0);
    adapters.set_places({.edge = first_factor, .out = first_factor});
    // And the contexts, the adapters' calls, and the ranks to all-gather from.
    variable_list out(first_factor + adapters.num_factors() + 3);
    const std::vector<ModuleContextPtr>& contexts = node_state(ctx).contexts;
    const TensorParallelPtr ranks = saved_ranks(ctx);
    std::unique_ptr<PendingTensor> pending_rows, pending_dx;
    bool wants_rows = false;
    for (std::size_t i = 0; i < grads.size(); ++i) {
      wants_rows |= grads[i].defined() &&
                    (ctx->needs_input_grad(1 + i) || adapters.wants_input(i));
    }
    if (ranks && wants_rows) {
      pending_rows = ranks->start_all_gather(as_rows(x).contiguous());
    }
    adapters.begin(grads, out);
    at::Tensor dx;
    std::vector<std::optional<MatmulRows>> g(grads.size());
    for (std::size_t i = 0; i < grads.size(); ++i) {
      if (grads[i].defined()) {
        // Before the gradient is freed.
        if (has_biases && ctx->needs_input_grad(first_bias + i)) {
          out[first_bias + i] = deliver_bias_grad(
              contexts[i],
              saved[first_bias + i],
              as_rows(grads[i]));
        }
        g[i].emplace(gradient_rows(
            as_rows(std::exchange(grads[i], {})),
            ctx->needs_input_grad(0) && ctx->needs_input_grad(1 + i)));
        if (ctx->needs_input_grad(0)) {
          add_input_gradient(dx, *g[i], saved[1 + i], contexts[i]);
        }
      }
    }
    if (dx.defined()) {
      adapters.add_input_gradient(dx);
      if (ranks) {
        pending_dx = ranks->start_reduce_scatter(dx);
      } else {
        out[0] = dx.view(x.sizes());
      }
    }
    std::optional<MatmulRows> rows;
    const at::Tensor read = pending_rows ? pending_rows->finish() : as_rows(x);
    if (wants_rows) {
      rows.emplace(activation_rows(read, saved.back()));
    }
    adapters.end(read, out);
    for (std::size_t i = 0; i < grads.size(); ++i) {
      if (g[i] && ctx->needs_input_grad(1 + i)) {
        out[1 + i] =
            deliver_matmul_wgrad(contexts[i], saved[1 + i], *g[i], *rows);
      }
    }
    if (pending_dx) {
      out[0] = pending_dx->finish().view(x.sizes());
    }
    return out;
  }
};

}  // namespace

bool can_run_together(const std::vector<LinearImpl*>& layers) {
  return std::all_of(layers.begin(), layers.end(), [&](const LinearImpl* l) {
    return l->has_only_pre_hooks() && !l->sums_over() &&
           l->gathers_from() == layers.front()->gathers_from() &&
           l->bias().defined() == layers.front()->bias().defined();
  });
}

JointLinears begin_together(
    const at::Tensor& x,
    const std::vector<LinearImpl*>& layers) {
  JointLinears joint;
  std::vector<const Adapter*> adapters;
  for (LinearImpl* layer : layers) {
    check_linear_input(x, layer->weight());
    layer->run_forward_pre_hooks({x});
    joint.weights.push_back(layer->weight());
    if (layer->bias().defined()) {
      joint.biases.push_back(layer->bias());
    }
    joint.contexts.push_back(layer->context());
    adapters.push_back(layer->adapter());
  }
  joint.factors = adapter_factors(adapters);
  joint.adapters = AdapterCalls::of(adapters);
  return joint;
}

std::vector<at::Tensor> linears(
    const at::Tensor& x,
    const std::vector<LinearImpl*>& layers) {
  std::vector<at::Tensor> out;
  if (!can_run_together(layers)) {
    for (LinearImpl* layer : layers) {
      out.push_back(call_with_hooks(*layer, x));
    }
    return out;
  }
  const JointLinears joint = begin_together(x, layers);
  return LinearsFunction::apply(
      x,
      at::TensorList(joint.weights),
      at::TensorList(joint.biases),
      at::TensorList(joint.factors),
      joint.contexts,
      joint.adapters,
      layers.front()->gathers_from());
}

}  // namespace flatshard::nn
