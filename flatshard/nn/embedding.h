#pragma once

#include "flatshard/nn/module.h"
#include "flatshard/nn/parallel/tensor_parallel.h"

#include <cstdint>

namespace flatshard::nn {

/// Returns the rows of `weight` by index.
///
/// @param tokens  int64, any shape, values in [0, weight.size(0)).
/// @return tokens.sizes() + [dim], the weight's dtype.
/// Deterministic in forward and backward.
at::Tensor embedding(
    const at::Tensor& tokens,
    const at::Tensor& weight,
    const ModuleContextPtr& context = {});

/// Parameter: weight [num_embeddings, dim]. Rows are multiplied by `scale`,
/// rounded to the weight's dtype. Over several ranks each has a part of the
/// rows, and the result is this rank's part of the tokens.
class EmbeddingImpl : public Module, public HasParts {
 public:
  /// @param num_embeddings  on all ranks together; need not be a multiple.
  /// @param ranks           that share the rows; null: no others.
  EmbeddingImpl(
      std::int64_t num_embeddings,
      std::int64_t dim,
      InitSpec init = InitSpec::normal(0.0F, 0.02F),
      double scale = 1.0,
      TensorParallelPtr ranks = nullptr);
  /// int64 [batch, seq] -> [batch, seq / ranks, dim]
  at::Tensor forward(const at::Tensor& tokens);
  const at::Tensor& weight() const { return weight_; }
  ParameterParts parts() const override;

 private:
  std::int64_t num_embeddings_;
  TensorParallelPtr ranks_;
  at::Tensor weight_;
  double scale_;
};
FLATSHARD_MODULE(Embedding);

}  // namespace flatshard::nn
