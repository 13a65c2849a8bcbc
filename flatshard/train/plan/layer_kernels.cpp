#include "flatshard/train/plan/layer_kernels.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace flatshard {

using plan::Kernel;
using plan::NodeWork;
using plan::Product;

LayerKernels::LayerKernels(
    const WorkOptions& options,
    const models::ModelConfig& model,
    std::int64_t layer,
    const std::map<std::string, std::string>& float8,
    const std::set<std::string>& adapted,
    bool copies)
    : options_(options),
      model_(model),
      layer_(layer),
      float8_(float8),
      adapted_(adapted),
      frozen_(options.lora.enabled()),
      size_(d(static_cast<std::int64_t>(c10::elementSize(options.compute)))),
      sharing_(options.parallelism.tensor_parallel_degree),
      context_(options.parallelism.head_ranks()),
      hosts_(options.parallelism.context_hosts()),
      tokens_(
          options.training.local_batch_size * options.training.seq_len /
          (context_ * hosts_)),
      own_tokens_(tokens_ / sharing_),
      copies_(copies) {
}

void LayerKernels::product(
    NodeWork& node,
    const std::string& module,
    std::int64_t rows,
    std::int64_t out,
    std::int64_t in,
    bool has_input_gradient) const {
  const auto float8 = float8_.find(weight_of(module));
  const std::string recipe =
      float8 == float8_.end() ? std::string() : float8->second;
  const double m = d(rows);
  const double n = d(out);
  const double k = d(in);
  node.forward.push_back(Kernel::matmul(Product::forward, m, n, k, recipe));
  if (has_input_gradient) {
    node.backward.push_back(Kernel::matmul(Product::dgrad, m, k, n, recipe));
  }
  if (!frozen_) {
    node.wgrad.push_back(Kernel::matmul(Product::wgrad, n, k, m, recipe));
  }
  if (!recipe.empty()) {
    // The gradient by rows, and by columns for the gradient of the weight.
    const int planes = frozen_ ? 1 : 2;
    node.backward.push_back(
        Kernel::memory("quantize", m * n * (size_ + planes)));
    if (!frozen_) {
      node.wgrad.push_back(Kernel::memory("quantize", m * k * (size_ + 1)));
    }
  }
  if (has_adapter(module)) {
    adapter(node, m, n, k, has_input_gradient);
  }
}

std::string LayerKernels::weight_of(const std::string& module) const {
  return fmt::format("model.layers.{}.{}.weight", layer_, module);
}

bool LayerKernels::has_adapter(const std::string& module) const {
  return adapted_.contains(weight_of(module));
}

void LayerKernels::adapter(
    NodeWork& node,
    double rows,
    double n,
    double k,
    bool has_input_gradient) const {
  const double r = d(options_.lora.rank);
  const bool drops = options_.lora.dropout > 0;
  // Bytes of reading or writing one row of this width and one of the rank.
  const auto moved = [&](double width) { return size_ * rows * (width + r); };
  const Kernel dropout = Kernel::memory("copy", 2 * size_ * rows * k);
  if (drops) {
    node.forward.push_back(dropout);
  }
  node.forward.push_back(Kernel::low_rank(rows, r, k, moved(k)));
  node.forward.push_back(Kernel::low_rank(rows, n, r, moved(2 * n)));
  node.backward.push_back(Kernel::low_rank(rows, r, n, moved(n)));
  node.backward.push_back(Kernel::low_rank(n, r, rows, moved(n)));
  if (has_input_gradient) {
    node.backward.push_back(Kernel::low_rank(rows, k, r, moved(2 * k)));
  }
  if (drops) {
    node.backward.push_back(dropout);
    node.wgrad.push_back(dropout);
  }
  node.wgrad.push_back(Kernel::low_rank(r, k, rows, moved(k)));
}

std::int64_t LayerKernels::adapters_saved(
    std::initializer_list<std::string_view> modules) const {
  return bytes(
      options_.lora.rank *
      std::ranges::count_if(modules, [&](std::string_view module) {
        return has_adapter(std::string(module));
      }));
}

void LayerKernels::grouped(
    NodeWork& node,
    double groups,
    double m,
    std::int64_t out,
    std::int64_t in) const {
  node.forward.push_back(
      Kernel::experts(Product::forward, groups, m, d(out), d(in)));
  node.backward.push_back(
      Kernel::experts(Product::dgrad, groups, m, d(in), d(out)));
  if (!frozen_) {
    node.wgrad.push_back(
        Kernel::experts(Product::wgrad, groups, m, d(out), d(in)));
  }
}

void LayerKernels::norm(NodeWork& node, bool with_delta) const {
  const double row = d(own_tokens_) * d(model_.dim) * size_;
  node.forward.push_back(Kernel::memory("norm", (with_delta ? 4 : 2) * row));
  // dy, gradient of the sum and input in; dx out, and the result again unless
  // layers that all-gather it kept it.
  node.backward.push_back(Kernel::memory("norm", (sharing_ > 1 ? 4 : 5) * row));
}

void LayerKernels::swiglu(NodeWork& node, std::int64_t rows, std::int64_t width)
    const {
  const double row = d(rows) * d(width) * size_;
  node.forward.push_back(Kernel::memory("swiglu", 3 * row));
  node.backward.push_back(Kernel::memory("swiglu", 6 * row));
}

void LayerKernels::put_together(const Stages& stages, NodeWork& node) const {
  if (sharing_ == 1) {
    append_stages(stages, node);
  } else {
    append_shared_stages(
        stages,
        d(bytes(model_.dim)),
        copies_ && !frozen_ ? sharing_ : 1,
        node);
  }
}

double LayerKernels::num_chunks(std::int64_t tokens, std::int64_t chunk) {
  return chunk == 0 ? 1 : std::ceil(d(tokens) / d(chunk));
}

}  // namespace flatshard
