#include "flatshard/train/plan/block_work.h"

#include <algorithm>
#include <span>
#include <utility>

namespace flatshard {
namespace {

using plan::Kernel;
using plan::LayerWork;
using plan::NodeWork;

bool is_kept(const Kernel& kernel) {
  return kernel.is_kept;
}

/// A second run does not make the result of the part that it runs: marks
/// kernels from a number on.
void without_result(plan::Kernels& kernels, std::size_t from = 0) {
  for (Kernel& kernel : std::span(kernels).subspan(from)) {
    kernel.is_kept = true;
  }
}

}  // namespace

LayerWork BlockWork::dense() const {
  LayerWork layer;
  NodeWork& node = layer.nodes[PlanNode::attend];
  const std::int64_t run = options_.mlp_chunk_tokens;
  Stages mlp = mlp_stages();
  for (Stage& stage : mlp) {
    stage.runs = num_chunks(own_tokens_, run);
  }
  Stages stages = attention_.stages();
  NodeWork before_mlp;
  put_together(stages, before_mlp);
  const std::size_t num_attention = before_mlp.forward.size();
  stages.insert(stages.end(), mlp.begin(), mlp.end());
  put_together(stages, node);
  const std::int64_t ffn_dim = model_.ffn_dim / sharing_;
  const std::int64_t mlp_saved =
      own_bytes(norm_width()) + bytes(2 * ffn_dim) + own_rows_of_floats(1) +
      adapters_saved({"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"});
  layer.input_nbytes = own_bytes(model_.dim) + attention_.kept_nbytes();
  layer.saved_nbytes = attention_.saved_nbytes() + mlp_saved;
  layer.transient_nbytes = dense_transient(ffn_dim);
  if (selective() || run > 0) {
    // The feed-forward part saves only its input, or inputs.
    NodeWork again;
    put_together(mlp, again);
    node.recompute = again.forward;
    std::erase_if(node.recompute, is_kept);
    layer.saved_nbytes = attention_.saved_nbytes() + own_bytes(model_.dim);
    layer.transient_nbytes += mlp_saved;
  }
  if (run > 0) {
    if (!selective()) {
      // The second run of the block leaves the feed-forward part to its
      // backward.
      without_result(node.forward, num_attention);
    }
    // The tensors of one run, and gradients of the part's inputs and output.
    const double share = std::min(1.0, d(run) / d(own_tokens_));
    layer.transient_nbytes =
        static_cast<std::int64_t>(share * d(layer.transient_nbytes)) +
        own_bytes(3 * model_.dim);
    if (share < 1.0 && options_.reduce != at::kFloat &&
        !options_.lora.enabled()) {
      // Gradients of the part are summed over the runs in float32.
      layer.transient_nbytes +=
          3 * ffn_dim * model_.dim * static_cast<std::int64_t>(sizeof(float));
    }
  }
  with_gathered_over_hosts(layer);
  layer.offloaded_nbytes = offloaded(layer);
  return layer;
}

LayerWork BlockWork::experts() const {
  const models::MoeConfig& moe = model_.moe;
  const std::int64_t degree = options_.parallelism.expert_parallel_degree;
  const std::int64_t parts = options_.parallelism.expert_tensor_parallel_degree;
  // A rank routes its own tokens, to each part of an expert.
  const std::int64_t sent = own_tokens_ * moe.experts_per_token;
  const std::int64_t rows = sent * parts;
  const std::int64_t ffn_dim = moe.ffn_dim / parts;
  const double each = d(rows) * d(degree) / d(moe.num_experts);
  const double local = d(moe.num_experts / degree);
  LayerWork layer;
  Stages attend = attention_.stages();
  NodeWork& router = attend.emplace_back().work;
  norm(router, /*with_delta=*/true);
  product(router, "mlp.gate", own_tokens_, moe.num_experts, model_.dim);
  // Scores, choice and order read and write few numbers a token.
  const double scores = d(own_tokens_) * d(moe.num_experts) * sizeof(float);
  router.forward.push_back(Kernel::memory("sum", 6 * scores));
  router.backward.push_back(Kernel::memory("sum", 4 * scores));
  put_together(attend, layer.nodes[PlanNode::attend]);

  NodeWork& node = layer.nodes[PlanNode::experts];
  grouped(node, local, each, 2 * ffn_dim, model_.dim);
  const std::size_t num_read = node.forward.size();
  swiglu(node, rows, ffn_dim);
  grouped(node, local, each, model_.dim, ffn_dim);
  without_result(node.forward, num_read);
  // Rows of tokens, and the sums of a token's rows.
  const double moved = 2 * size_ * d(sent) * d(model_.dim);
  const double summed = size_ * d(model_.dim) * (d(sent) + 2 * d(own_tokens_));
  const bool here = degree * parts == 1;
  NodeWork& leaving = here ? node : layer.nodes[PlanNode::dispatch];
  NodeWork& returning = here ? node : layer.nodes[PlanNode::combine];
  leaving.forward.push_back(Kernel::memory("permute", moved));
  if (parts > 1) {
    // Adds up the partial results of the parts of an expert for each row.
    const double added = size_ * d(model_.dim) * d(rows + sent);
    leaving.backward.push_back(Kernel::memory("sum", added));
    returning.forward.push_back(Kernel::memory("sum", added));
  }
  leaving.backward.push_back(Kernel::memory("permute", summed));
  returning.forward.push_back(Kernel::memory("permute", summed));
  returning.forward.back().is_kept = true;
  returning.backward.push_back(Kernel::memory("permute", moved));
  // An OverlapRunner exchanges rows also where all experts are here.
  const bool keeps_rows = !here || options_.parallelism.overlap_expert_parallel;
  if (!keeps_rows && !frozen_) {
    // The rows are made again for the gradient of the weights.
    node.wgrad.push_back(Kernel::memory("permute", moved));
  }
  if (moe.shared_experts > 0) {
    put_together(
        gate_up_down("mlp.shared_experts", moe.shared_experts * moe.ffn_dim),
        layer.nodes[PlanNode::shared]);
  }
  layer.input_nbytes = own_bytes(model_.dim) + attention_.kept_nbytes();
  const auto element = static_cast<std::int64_t>(size_);
  layer.saved_nbytes =
      attention_.saved_nbytes() + own_bytes(2 * model_.dim) +
      2 * rows * ffn_dim * element +
      (2 * sent + rows) * static_cast<std::int64_t>(sizeof(float)) +
      own_rows_of_floats(1 + 2 * moe.num_experts) +
      (keeps_rows ? rows * model_.dim * element : 0) +
      bytes(2 * moe.shared_experts * moe.ffn_dim / sharing_) +
      adapters_saved(
          {"mlp.shared_experts.gate_proj",
           "mlp.shared_experts.up_proj",
           "mlp.shared_experts.down_proj"});
  layer.transient_nbytes = rows * (3 * ffn_dim + 2 * model_.dim) * element;
  if (selective()) {
    plan::Kernels again = layer.nodes[PlanNode::experts].forward;
    std::erase_if(again, is_kept);
    layer.nodes[PlanNode::experts].recompute = std::move(again);
    layer.transient_nbytes += layer.saved_nbytes - attention_.saved_nbytes();
    layer.saved_nbytes = attention_.saved_nbytes() + own_bytes(model_.dim);
  }
  with_gathered_over_hosts(layer);
  layer.offloaded_nbytes = offloaded(layer);
  return layer;
}

bool BlockWork::is_recomputed() const {
  return options_.recompute != models::ActivationCheckpoint::none &&
         layer_ < options_.recomputed_layers.value_or(model_.layers);
}

bool BlockWork::selective() const {
  return options_.recompute == models::ActivationCheckpoint::selective &&
         is_recomputed();
}

std::int64_t BlockWork::offloaded(const LayerWork& layer) const {
  if (!options_.offloads) {
    return 0;
  }
  if (!is_recomputed()) {  // the chunks' inputs: the residual and its addend
    return options_.mlp_chunk_tokens > 0 ? own_bytes(2 * model_.dim) : 0;
  }
  return selective() ? own_bytes(model_.dim) : layer.input_nbytes;
}

std::int64_t BlockWork::dense_transient(std::int64_t ffn_dim) const {
  const std::int64_t dim = model_.dim;
  if (sharing_ == 1) {
    return bytes(3 * ffn_dim + 2 * dim);
  }
  // The backward of down makes the all-gathered gradient and three tensors of
  // the width. The backward of gate and up makes their gradients, the input's
  // gradient, and all-gathers the input again.
  return std::max(
      bytes(3 * ffn_dim + dim) + own_bytes(dim),
      bytes(2 * ffn_dim + 2 * dim) + own_bytes(2 * dim));
}

Stages BlockWork::gate_up_down(const std::string& module, std::int64_t whole)
    const {
  const std::int64_t width = whole / sharing_;
  Stages stages(4);
  stages[0].reads = Stage::Reads::tokens;
  stages[0].gathers_again = !frozen_ || has_adapter(module + ".gate_proj") ||
                            has_adapter(module + ".up_proj");
  NodeWork& in = stages[0].work;
  product(in, module + ".gate_proj", tokens_, width, model_.dim);
  product(in, module + ".up_proj", tokens_, width, model_.dim);
  swiglu(stages[1].work, tokens_, width);
  stages[2].reads = Stage::Reads::columns;
  product(stages[2].work, module + ".down_proj", tokens_, model_.dim, width);
  // Adds the output, or the sum over all ranks, to the residual. Without
  // tensor parallelism the residual is copied first.
  const double row = d(own_tokens_) * d(model_.dim) * size_;
  stages[3].work.forward.push_back(
      sharing_ == 1 ? Kernel::memory("copy", 2 * row)
                    : Kernel::memory("sum", 3 * row));
  if (model_.block.norms == models::NormPlacement::before &&
      !model_.block.mlp_bias) {  // a norm after it would read the result
    plan::Kernels& down = stages[2].work.forward;
    if (has_adapter(module + ".down_proj")) {
      // Its A reads what down reads; the two last matmuls make the result.
      down.front().is_kept = true;
      down.back().is_kept = true;
    } else {
      without_result(stages[1].work.forward);
      without_result(down);
    }
    without_result(stages[3].work.forward);
  }
  return stages;
}

Stages BlockWork::mlp_stages() const {
  Stages stages(1);
  norm(stages[0].work, /*with_delta=*/true);
  const Stages rest = gate_up_down("mlp", model_.ffn_dim);
  stages.insert(stages.end(), rest.begin(), rest.end());
  return stages;
}

void BlockWork::with_gathered_over_hosts(LayerWork& layer) const {
  layer.transient_nbytes =
      std::max(layer.transient_nbytes, attention_.gathered_nbytes());
}

}  // namespace flatshard
