#include "flatshard/nn/parallel/tensor_parallel.h"

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/module.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

enum class Transfer { gather, scatter, sum };

// The state that the node keeps. A gradient is sent in the opposite direction.
struct RanksHandle : torch::CustomClassHolder {
  RanksHandle(TensorParallelPtr kept, Transfer direction)
      : ranks(std::move(kept)), transfer(direction) {}
  TensorParallelPtr ranks;
  Transfer transfer;
};

Transfer opposite(Transfer transfer) {
  switch (transfer) {
    case Transfer::gather:
      return Transfer::scatter;
    case Transfer::scatter:
      return Transfer::gather;
    default:
      return Transfer::sum;
  }
}

at::Tensor sum_in_rank_order(TensorParallel& ranks, const at::Tensor& x) {
  const at::Tensor all = ranks.all_gather(x.reshape({1, -1}).contiguous());
  at::Tensor sum = all[0].clone();
  for (int r = 1; r < ranks.size(); ++r) {
    sum.add_(all[r]);
  }
  return sum.view(x.sizes());
}

at::Tensor run(TensorParallel& ranks, Transfer transfer, const at::Tensor& x) {
  if (transfer == Transfer::sum) {
    return sum_in_rank_order(ranks, x);
  }
  const at::Tensor rows = as_rows(x).contiguous();
  if (transfer == Transfer::scatter) {
    return reshape_result(
        ranks.reduce_scatter(rows),
        sizes_of_part(ranks, x.sizes()));
  }
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[sizes.size() - 2] *= ranks.size();
  return reshape_result(ranks.all_gather(rows), sizes);
}

struct TransferFunction : torch::autograd::Function<TransferFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const c10::intrusive_ptr<RanksHandle>& handle) {
    ctx->saved_data["handle"] = c10::IValue::make_capsule(handle);
    return run(*handle->ranks, handle->transfer, x);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("a transfer of tensor parallelism");
    const auto capsule = ctx->saved_data["handle"].toCapsule();
    const auto& handle = static_cast<const RanksHandle&>(*capsule);
    return {
        run(*handle.ranks, opposite(handle.transfer), grads[0]),
        at::Tensor()};
  }
};

at::Tensor transfer_with_graph(
    const TensorParallelPtr& ranks,
    Transfer transfer,
    const at::Tensor& x) {
  return TransferFunction::apply(
      x,
      c10::make_intrusive<RanksHandle>(ranks, transfer));
}

IndexPart part_of_rank(std::int64_t whole, std::int64_t rank, std::int64_t n) {
  return {.begin = whole * rank / n, .end = whole * (rank + 1) / n};
}

}  // namespace

std::vector<std::int64_t> sizes_of_part(
    const TensorParallel& ranks,
    at::IntArrayRef sizes) {
  FLATSHARD_CHECK(
      sizes.size() >= 2 && sizes[sizes.size() - 2] % ranks.size() == 0,
      usage,
      "tensor parallelism over {} ranks: expected a multiple of as many tokens "
      "in a sequence, got {}",
      ranks.size(),
      c10::str(sizes));
  std::vector<std::int64_t> part = sizes.vec();
  part[part.size() - 2] /= ranks.size();
  return part;
}

at::Tensor own_tokens(const TensorParallelPtr& ranks, const at::Tensor& x) {
  if (!ranks) {
    return x;
  }
  const std::vector<std::int64_t> sizes = sizes_of_part(*ranks, x.sizes());
  const at::Tensor rows = as_rows(x);
  const std::int64_t each = rows.size(0) / ranks->size();
  return rows.narrow(0, ranks->rank() * each, each).view(sizes);
}

at::Tensor gather_sequence(
    const TensorParallelPtr& ranks,
    const at::Tensor& x) {
  return ranks ? transfer_with_graph(ranks, Transfer::gather, x) : x;
}

at::Tensor scatter_sum(
    const TensorParallelPtr& ranks,
    const at::Tensor& partial) {
  return ranks ? transfer_with_graph(ranks, Transfer::scatter, partial)
               : partial;
}

at::Tensor sum_over_ranks(const TensorParallelPtr& ranks, const at::Tensor& x) {
  return ranks ? transfer_with_graph(ranks, Transfer::sum, x) : x;
}

at::Tensor gather_columns(
    const TensorParallelPtr& ranks,
    const at::Tensor& x,
    std::int64_t whole) {
  if (!ranks) {
    return x;
  }
  FLATSHARD_CHECK(
      !at::GradMode::is_enabled(),
      usage,
      "an all-gather of columns over {} ranks has no gradient; call it with "
      "gradient mode off, or compute the loss of the sharded columns",
      ranks->size());
  const std::int64_t n = ranks->size();
  const std::int64_t widest = ceil_div(whole, n);
  const at::Tensor rows = as_rows(x);
  const at::Tensor own = at::zeros({rows.size(0), widest}, rows.options());
  own.narrow(1, 0, rows.size(1)).copy_(rows);
  const at::Tensor all = ranks->all_gather(own).view({n, rows.size(0), widest});
  std::vector<at::Tensor> columns;
  for (std::int64_t r = 0; r < n; ++r) {
    columns.push_back(all[r].narrow(1, 0, part_of_rank(whole, r, n).size()));
  }
  return at::cat(columns, 1).view(with_last(x, whole));
}

IndexPart part_of(const TensorParallelPtr& ranks, std::int64_t whole) {
  return ranks ? part_of_rank(whole, ranks->rank(), ranks->size())
               : IndexPart{0, whole};
}

IndexPart equal_part_of(
    const TensorParallelPtr& ranks,
    std::int64_t whole,
    const char* what) {
  FLATSHARD_CHECK(
      !ranks || whole % ranks->size() == 0,
      config,
      "tensor parallelism over {} ranks: expected a divisor of {} = {}",
      ranks ? ranks->size() : 1,
      what,
      whole);
  return part_of(ranks, whole);
}

void keep_part(const at::Tensor& parameter, const ParameterPart& part) {
  parameter.set_data(parameter.detach()
                         .narrow(part.dim, part.part.begin, part.part.size())
                         .contiguous());
}

ParameterParts parts_below(torch::nn::Module& root) {
  ParameterParts found;
  for (const NamedParameter& p : named_parameters(root)) {
    const auto* const owner = dynamic_cast<const HasParts*>(p.owner);
    if (owner == nullptr) {
      continue;
    }
    const ParameterParts parts = owner->parts();
    const auto part = parts.find(p.name.substr(p.name.rfind('.') + 1));
    if (part != parts.end()) {
      found[p.name] = part->second;
    }
  }
  return found;
}

}  // namespace flatshard::nn
