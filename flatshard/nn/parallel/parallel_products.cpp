#include "flatshard/nn/parallel/parallel_products.h"

#include "flatshard/nn/autograd.h"

#include <ATen/ATen.h>

namespace flatshard::nn {
namespace {

void multiply_into(
    at::Tensor out,
    const at::Tensor& rows,
    const at::Tensor& matrix,
    const at::Tensor& bias) {
  if (bias.defined()) {
    at::addmm_out(out, bias, rows, matrix);
  } else {
    at::mm_out(out, rows, matrix);
  }
}

}  // namespace

GatheredProduct gather_and_multiply(
    TensorParallel& ranks,
    const at::Tensor& part,
    const at::Tensor& matrix,
    const at::Tensor& bias) {
  const std::int64_t n = part.size(0);
  const auto gather = ranks.start_gather_of_parts(part);
  const at::Tensor product =
      at::empty({ranks.size() * n, matrix.size(1)}, part.options());
  if (!gather) {
    const at::Tensor rows = ranks.all_gather(part);
    multiply_into(product, rows, matrix, bias);
    return {rows, product};
  }
  // The part of the rank before this one arrives first.
  for (int i = 0; i < ranks.size(); ++i) {
    const int rank = (ranks.rank() - i + ranks.size()) % ranks.size();
    multiply_into(
        product.narrow(0, rank * n, n),
        gather->part(rank),
        matrix,
        bias);
  }
  return {gather->finish(), product};
}

at::Tensor multiply_and_scatter(
    TensorParallel& ranks,
    const at::Tensor& rows,
    const at::Tensor& matrix) {
  const std::int64_t n = rows.size(0) / ranks.size();
  const auto scatter =
      ranks.start_scatter_of_parts({n, matrix.size(1)}, rows.options());
  if (!scatter) {
    return ranks.reduce_scatter(at::mm(rows, matrix));
  }
  for (int i = 1; i <= ranks.size(); ++i) {
    const int rank = (ranks.rank() + i) % ranks.size();
    multiply_into(
        scatter->addend(rank),
        rows.narrow(0, rank * n, n),
        matrix,
        /*bias=*/{});
    scatter->send(rank);
  }
  return scatter->finish();
}

void save_ranks(
    torch::autograd::AutogradContext* ctx,
    const TensorParallelPtr& ranks) {
  if (ranks) {
    node_state(ctx).ranks = ranks;
  }
}

TensorParallelPtr saved_ranks(torch::autograd::AutogradContext* ctx) {
  const NodeState* const state = find_node_state(ctx);
  if (state == nullptr || !state->ranks) {
    return nullptr;
  }
  refuse_create_graph("a layer that ranks share");
  return state->ranks;
}

}  // namespace flatshard::nn
