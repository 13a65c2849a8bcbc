#include "flatshard/train/plan/model_work.h"

#include "flatshard/models/flops.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

using plan::Kernel;
using plan::Kernels;
using plan::LayerWork;
using plan::NodeWork;
using plan::Product;

double d(std::int64_t n) {
  return static_cast<double>(n);
}

void append(Kernels& to, const Kernels& more) {
  to.insert(to.end(), more.begin(), more.end());
}

/// Writes down the kernels of a model's layers.
class ModelWork {
 public:
  /// @param layer  whose weights `float8` is asked for.
  ModelWork(
      const Config& config,
      const models::ModelConfig& model,
      std::int64_t layer,
      const Float8RecipeOf& float8)
      : config_(config),
        model_(model),
        layer_(layer),
        float8_(float8),
        size_(d(static_cast<std::int64_t>(
            c10::elementSize(config.precision.compute)))),
        tokens_(config.training.local_batch_size * config.training.seq_len) {}

  LayerWork dense() const {
    LayerWork layer;
    NodeWork& node = layer.nodes[PlanNode::attend];
    attention(node);
    NodeWork mlp;
    norm(mlp, /*with_delta=*/true);
    gate_up_down("mlp", model_.ffn_dim, mlp);
    append(node.forward, mlp.forward);
    append(node.backward, mlp.backward);
    append(node.wgrad, mlp.wgrad);
    const std::int64_t mlp_saved =
        bytes(model_.dim) + bytes(2 * model_.ffn_dim) + rows_of_floats(1);
    layer.input_nbytes = bytes(model_.dim);
    layer.saved_nbytes = attention_saved() + mlp_saved;
    layer.transient_nbytes = bytes(3 * model_.ffn_dim + 2 * model_.dim);
    if (selective()) {
      // The feed-forward part keeps its input alone.
      node.recompute = mlp.forward;
      layer.saved_nbytes = attention_saved() + bytes(model_.dim);
      layer.transient_nbytes += mlp_saved;
    }
    return layer;
  }

  LayerWork experts() const {
    const models::MoeConfig& moe = model_.moe;
    const std::int64_t degree = config_.parallelism.expert_parallel_degree;
    const std::int64_t rows = tokens_ * moe.experts_per_token;
    const double each = d(rows) * d(degree) / d(moe.num_experts);
    const double local = d(moe.num_experts / degree);
    LayerWork layer;
    NodeWork& attend = layer.nodes[PlanNode::attend];
    attention(attend);
    norm(attend, /*with_delta=*/true);
    product(attend, "mlp.gate", tokens_, moe.num_experts, model_.dim);
    // Scores, choice and order read and write few numbers a token.
    const double scores = d(tokens_) * d(moe.num_experts) * sizeof(float);
    attend.forward.push_back(Kernel::memory("sum", 6 * scores));
    attend.backward.push_back(Kernel::memory("sum", 4 * scores));

    NodeWork& node = layer.nodes[PlanNode::experts];
    grouped(node, local, each, 2 * moe.ffn_dim, model_.dim);
    swiglu(node, rows, moe.ffn_dim);
    grouped(node, local, each, model_.dim, moe.ffn_dim);
    // Rows of tokens, and the sums of a token's rows.
    const double moved = 2 * size_ * d(rows) * d(model_.dim);
    const double summed = size_ * d(model_.dim) * (d(rows) + 2 * d(tokens_));
    const bool here = degree == 1;
    NodeWork& leaving = here ? node : layer.nodes[PlanNode::dispatch];
    NodeWork& returning = here ? node : layer.nodes[PlanNode::combine];
    leaving.forward.push_back(Kernel::memory("permute", moved));
    leaving.backward.push_back(Kernel::memory("permute", summed));
    returning.forward.push_back(Kernel::memory("permute", summed));
    returning.backward.push_back(Kernel::memory("permute", moved));
    if (here) {
      // The rows are made again for the gradient of the weights.
      node.wgrad.push_back(Kernel::memory("permute", moved));
    }
    if (moe.shared_experts > 0) {
      NodeWork& shared = layer.nodes[PlanNode::shared];
      gate_up_down(
          "mlp.shared_experts",
          moe.shared_experts * moe.ffn_dim,
          shared);
    }
    layer.input_nbytes = bytes(model_.dim);
    const auto element = static_cast<std::int64_t>(size_);
    layer.saved_nbytes = attention_saved() + bytes(2 * model_.dim) +
                         2 * rows * moe.ffn_dim * element +
                         rows * static_cast<std::int64_t>(3 * sizeof(float)) +
                         rows_of_floats(1 + 2 * moe.num_experts) +
                         (here ? 0 : rows * model_.dim * element) +
                         bytes(2 * moe.shared_experts * moe.ffn_dim);
    layer.transient_nbytes =
        rows * (3 * moe.ffn_dim + 2 * model_.dim) * element;
    if (selective()) {
      Kernels again = layer.nodes[PlanNode::experts].forward;
      layer.nodes[PlanNode::experts].recompute = std::move(again);
      layer.transient_nbytes += layer.saved_nbytes - attention_saved();
      layer.saved_nbytes = attention_saved() + bytes(model_.dim);
    }
    return layer;
  }

  /// Embedding and head, with loss.
  LayerWork ends() const {
    LayerWork layer;
    const double wide = d(tokens_) * d(model_.dim) * size_;
    const double vocab = d(tokens_) * d(model_.vocab_size) * size_;
    NodeWork& embed = layer.nodes[PlanNode::embed];
    embed.forward.push_back(Kernel::memory("copy", 2 * wide));
    const double table = d(model_.vocab_size) * d(model_.dim) *
                         d(static_cast<std::int64_t>(
                             c10::elementSize(config_.precision.reduce)));
    embed.backward.push_back(Kernel::memory("copy", table + 3 * wide));
    NodeWork& head = layer.nodes[PlanNode::head];
    norm(head, /*with_delta=*/false);
    product(head, {}, tokens_, model_.vocab_size, model_.dim);
    head.forward.push_back(Kernel::memory("cross_entropy", 2 * vocab));
    layer.saved_nbytes =
        bytes(2 * model_.dim) + bytes(model_.vocab_size) + rows_of_floats(3);
    layer.transient_nbytes = bytes(3 * model_.dim);
    return layer;
  }

 private:
  bool selective() const {
    return config_.activation_checkpoint.mode ==
           models::ActivationCheckpoint::selective;
  }
  /// Of so many numbers for each token.
  std::int64_t bytes(std::int64_t width) const {
    return tokens_ * width * static_cast<std::int64_t>(size_);
  }
  std::int64_t rows_of_floats(std::int64_t width) const {
    return tokens_ * width * static_cast<std::int64_t>(sizeof(float));
  }

  /// Of a linear layer [rows, in] -> [rows, out]; in FP8 with what quantizes
  /// its gradient, and its input once more for the gradient of the weight.
  /// @param module  of a layer; empty: the head's, which is never in FP8.
  void product(
      NodeWork& node,
      const std::string& module,
      std::int64_t rows,
      std::int64_t out,
      std::int64_t in) const {
    const std::string recipe =
        module.empty() ? std::string() : float8_(layer_, module + ".weight");
    const double m = d(rows);
    const double n = d(out);
    const double k = d(in);
    node.forward.push_back(Kernel::matmul(Product::forward, m, n, k, recipe));
    node.backward.push_back(Kernel::matmul(Product::dgrad, m, k, n, recipe));
    node.wgrad.push_back(Kernel::matmul(Product::wgrad, n, k, m, recipe));
    if (!recipe.empty()) {
      node.backward.push_back(Kernel::memory("quantize", m * n * (size_ + 2)));
      node.wgrad.push_back(Kernel::memory("quantize", m * k * (size_ + 1)));
    }
  }

  void grouped(
      NodeWork& node,
      double groups,
      double m,
      std::int64_t out,
      std::int64_t in) const {
    node.forward.push_back(
        Kernel::experts(Product::forward, groups, m, d(out), d(in)));
    node.backward.push_back(
        Kernel::experts(Product::dgrad, groups, m, d(in), d(out)));
    node.wgrad.push_back(
        Kernel::experts(Product::wgrad, groups, m, d(out), d(in)));
  }

  void norm(NodeWork& node, bool with_delta) const {
    const double row = d(tokens_) * d(model_.dim) * size_;
    node.forward.push_back(Kernel::memory("norm", (with_delta ? 4 : 2) * row));
    // dy, gradient of the sum and input in; dx and the result again out.
    node.backward.push_back(Kernel::memory("norm", 5 * row));
  }

  void swiglu(NodeWork& node, std::int64_t rows, std::int64_t width) const {
    const double row = d(rows) * d(width) * size_;
    node.forward.push_back(Kernel::memory("swiglu", 3 * row));
    node.backward.push_back(Kernel::memory("swiglu", 6 * row));
  }

  void gate_up_down(
      const std::string& module,
      std::int64_t width,
      NodeWork& node) const {
    product(node, module + ".gate_proj", tokens_, width, model_.dim);
    product(node, module + ".up_proj", tokens_, width, model_.dim);
    swiglu(node, tokens_, width);
    product(node, module + ".down_proj", tokens_, model_.dim, width);
    // The product is added to the residual, which is copied there first.
    node.forward.push_back(
        Kernel::memory("copy", 2 * d(tokens_) * d(model_.dim) * size_));
  }

  void attention(NodeWork& node) const {
    const std::int64_t q = model_.heads * model_.head_dim;
    const std::int64_t kv = model_.kv_heads * model_.head_dim;
    norm(node, /*with_delta=*/false);
    product(node, "self_attn.q_proj", tokens_, q, model_.dim);
    product(node, "self_attn.k_proj", tokens_, kv, model_.dim);
    product(node, "self_attn.v_proj", tokens_, kv, model_.dim);
    const double rotated = d(tokens_) * d(q + kv) * size_;
    if (model_.block.attention.qk_norm != models::QkNorm::none) {
      node.forward.push_back(Kernel::memory("norm", 2 * rotated));
      node.backward.push_back(Kernel::memory("norm", 4 * rotated));
    }
    node.forward.push_back(Kernel::memory("rope", 2 * rotated));
    node.backward.push_back(Kernel::memory("rope", 2 * rotated));
    for (const bool backward : {false, true}) {
      (backward ? node.backward : node.forward)
          .push_back(Kernel::attention(
              backward,
              d(config_.training.local_batch_size),
              d(model_.heads),
              d(config_.training.seq_len),
              model_.head_dim));
    }
    product(node, "self_attn.o_proj", tokens_, model_.dim, q);
  }

  /// Input, rotated queries and keys, values, result, its log-sum-exp, and what
  /// the norm divided by.
  std::int64_t attention_saved() const {
    const std::int64_t q = model_.heads * model_.head_dim;
    const std::int64_t kv = model_.kv_heads * model_.head_dim;
    std::int64_t nbytes = bytes(model_.dim) + bytes(2 * q + 2 * kv) +
                          rows_of_floats(1 + model_.heads);
    if (model_.block.attention.qk_norm != models::QkNorm::none) {
      nbytes += bytes(q + kv) + rows_of_floats(model_.heads + model_.kv_heads);
    }
    return nbytes;
  }

  const Config& config_;
  const models::ModelConfig& model_;
  std::int64_t layer_;
  const Float8RecipeOf& float8_;
  double size_;  ///< of an element of activations
  std::int64_t tokens_;
};

}  // namespace

void add_model_work(
    const Config& config,
    const models::ModelConfig& model,
    const Float8RecipeOf& float8,
    plan::Job& job) {
  job.ends = ModelWork(config, model, 0, float8).ends();
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    const ModelWork work(config, model, layer, float8);
    const LayerWork kind =
        model.has_experts(layer) ? work.experts() : work.dense();
    const auto found = std::ranges::find(job.layer_kinds, kind);
    job.kind_of_layer.push_back(
        static_cast<int>(found - job.layer_kinds.begin()));
    if (found == job.layer_kinds.end()) {
      job.layer_kinds.push_back(kind);
    }
  }
  const std::int64_t seq = config.training.seq_len;
  job.flops_per_token = models::flops_per_token(model, seq);
  job.causal_flops_per_token =
      models::flops_per_token(model, seq, models::FlopsConvention::causal);
  job.tokens_per_rank =
      d(config.training.global_batch_size) * d(seq) / d(job.ranks);
}

}  // namespace flatshard
