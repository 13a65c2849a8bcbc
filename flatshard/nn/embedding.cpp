#include "flatshard/nn/embedding.h"

#include "flatshard/nn/autograd.h"
#include "flatshard/ops/cuda_ops.h"
#include "flatshard/ops/parameter_check.h"

#include <utility>
#include <vector>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Writes or adds the gradient of a table of rows, and returns whether it did:
// in float32 on a GPU, where only the rows of these tokens are read and added.
//
// @param index  [tokens]; at least the number of rows: there is no such row
bool write_rows(
    at::Tensor& grad,
    bool accumulate,
    const at::Tensor& g,
    const at::Tensor& index) {
  if (!cuda::supports(g) || grad.scalar_type() != at::kFloat ||
      !grad.is_contiguous()) {
    return false;
  }
  if (!accumulate) {
    grad.zero_();
  }
  cuda::add_token_rows(grad, index, g.contiguous());
  return true;
}

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& weight,
      const at::Tensor& tokens,
      const ModuleContextPtr& context) {
    save_context(ctx, context);
    ctx->save_for_backward({weight, tokens});
    std::vector<std::int64_t> sizes = tokens.sizes().vec();
    sizes.push_back(weight.size(1));
    return reshape_result(weight.index_select(0, tokens.reshape({-1})), sizes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &weight = saved[0], &tokens = saved[1];
    const at::Tensor g = as_rows(grads[0]);
    const at::Tensor index = tokens.reshape({-1});
    // Sorts on CUDA and sums each row in float32, so it is deterministic.
    const auto compute = [&] {
      return at::embedding_dense_backward(
          g,
          index,
          weight.size(0),
          /*padding_idx=*/-1,
          /*scale_grad_by_freq=*/false);
    };
    variable_list out(3);
    out[0] = deliver_wgrad(
        saved_context(ctx),
        weight,
        compute,
        [&](at::Tensor& grad, bool accumulate) {
          if (write_rows(grad, accumulate, g, index)) {
            return;
          }
          if (accumulate) {
            // Summed on its own first: the result then does not depend on
            // whether microbatches are added here or by a reduction.
            grad.add_(compute());
          } else if (grad.is_cpu() && grad.scalar_type() == at::kFloat) {
            grad.zero_().index_add_(0, index, g.to(at::kFloat));
          } else {
            grad.copy_(compute());
          }
        },
        /*adds_to_float32=*/cuda::supports(g));
    return out;
  }
};

// Rows that are one part of a table: tokens of other parts return zeros and get
// no gradient. They map to one extra row, so that no mask is needed.
struct PartEmbeddingFunction
    : torch::autograd::Function<PartEmbeddingFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& weight,
      const at::Tensor& tokens,
      std::int64_t first,
      const ModuleContextPtr& context) {
    save_context(ctx, context);
    const at::Tensor index = tokens.reshape({-1}) - first;
    const at::Tensor elsewhere =
        index.lt(0).logical_or_(index.ge(weight.size(0)));
    const at::Tensor known = index.masked_fill(elsewhere, 0);
    at::Tensor rows = weight.index_select(0, known);
    rows.masked_fill_(elsewhere.unsqueeze(1), 0);
    ctx->save_for_backward(
        {weight, index.masked_fill(elsewhere, weight.size(0))});
    std::vector<std::int64_t> sizes = tokens.sizes().vec();
    sizes.push_back(weight.size(1));
    return reshape_result(rows, sizes);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &weight = saved[0], &index = saved[1];
    const at::Tensor g = as_rows(grads[0]);
    const auto compute = [&] {
      return at::embedding_dense_backward(
                 g,
                 index,
                 weight.size(0) + 1,
                 /*padding_idx=*/weight.size(0),
                 /*scale_grad_by_freq=*/false)
          .narrow(0, 0, weight.size(0));
    };
    variable_list out(4);
    out[0] = deliver_wgrad(
        saved_context(ctx),
        weight,
        compute,
        [&](at::Tensor& grad, bool accumulate) {
          if (!write_rows(grad, accumulate, g, index)) {
            accumulate ? grad.add_(compute()) : grad.copy_(compute());
          }
        },
        /*adds_to_float32=*/cuda::supports(g));
    return out;
  }
};

void check_tokens(const at::Tensor& tokens, const at::Tensor& weight) {
  FLATSHARD_CHECK(
      tokens.scalar_type() == at::kLong,
      usage,
      "embedding: expected int64 tokens, got {}",
      c10::toString(tokens.scalar_type()));
  check_has_memory("Embedding", tokens, weight);
}

}  // namespace

at::Tensor embedding(
    const at::Tensor& tokens,
    const at::Tensor& weight,
    const ModuleContextPtr& context) {
  check_tokens(tokens, weight);
  return EmbeddingFunction::apply(weight, tokens, context);
}

EmbeddingImpl::EmbeddingImpl(
    std::int64_t num_embeddings,
    std::int64_t dim,
    InitSpec init,
    double scale,
    TensorParallelPtr ranks)
    : Module("Embedding"),
      num_embeddings_(num_embeddings),
      ranks_(std::move(ranks)),
      scale_(scale) {
  weight_ = declare_parameter(
      "weight",
      {part_of(ranks_, num_embeddings).size(), dim},
      init);
  set_attribute("weight", "state_dtype", "float32");  // kStateDtypeAttribute
}

ParameterParts EmbeddingImpl::parts() const {
  if (!ranks_) {
    return {};
  }
  return {
      {"weight",
       {.dim = 0,
        .whole = num_embeddings_,
        .part = part_of(ranks_, num_embeddings_)}}};
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  at::Tensor rows;
  if (ranks_) {
    check_tokens(tokens, weight_);
    rows = scatter_sum(
        ranks_,
        PartEmbeddingFunction::apply(
            weight_,
            tokens,
            part_of(ranks_, num_embeddings_).begin,
            context()));
  } else {
    rows = embedding(tokens, weight_, context());
  }
  if (scale_ == 1.0) {
    return rows;
  }
  const double rounded = at::scalar_tensor(scale_, at::kDouble)
                             .to(rows.scalar_type())
                             .item<double>();
  return rows * rounded;
}

}  // namespace flatshard::nn
