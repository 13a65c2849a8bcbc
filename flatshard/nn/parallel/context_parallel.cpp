#include "flatshard/nn/parallel/context_parallel.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/autograd.h"

#include <ATen/ATen.h>

#include <utility>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The state that the nodes keep.
struct HeadsHandle : torch::CustomClassHolder {
  explicit HeadsHandle(ContextParallelPtr kept) : ranks(std::move(kept)) {}
  ContextParallelPtr ranks;
  std::vector<std::int64_t> num_heads;  // of each tensor, on all ranks
};

// The ranks to which each head goes.
std::int64_t ranks_per_head(
    const ContextParallel& ranks,
    std::int64_t num_heads) {
  const std::int64_t n = ranks.size();
  FLATSHARD_CHECK(
      num_heads % n == 0 || n % num_heads == 0,
      config,
      "context parallelism over {} ranks: expected a multiple or a divisor of "
      "{} heads in attention, got {}",
      n,
      n,
      num_heads);
  return num_heads % n == 0 ? 1 : n / num_heads;
}

// x [batch, seq, heads, head_dim] -> [batch * seq, heads, head_dim]
at::Tensor by_token(const at::Tensor& x) {
  return x.reshape({-1, x.size(2), x.size(3)});
}

// Views rows [tokens, heads, head_dim] as [size, tokens, heads / size,
// head_dim].
at::Tensor by_rank(const at::Tensor& rows, std::int64_t size) {
  return rows.unflatten(1, {size, rows.size(1) / size}).transpose(0, 1);
}

TensorList send_to_heads(ContextParallel& ranks, const TensorList& x) {
  const std::int64_t n = ranks.size();
  TensorList outs;
  std::vector<RankBlocks> blocks;
  for (const at::Tensor& of_tokens : x) {
    const std::int64_t heads = of_tokens.size(2);
    const std::int64_t copies = ranks_per_head(ranks, heads);
    const at::Tensor rows = by_token(of_tokens);
    const at::Tensor send =
        copies == 1 ? by_rank(rows, n)
                    : rows.transpose(0, 1).unsqueeze(1).expand(
                          {heads, copies, rows.size(0), rows.size(2)});
    outs.push_back(at::empty(
        {of_tokens.size(0),
         of_tokens.size(1) * n,
         heads * copies / n,
         of_tokens.size(3)},
        of_tokens.options()));
    blocks.push_back({send, outs.back().view(send.sizes())});
  }
  ranks.start(std::move(blocks))->finish();
  return outs;
}

// @param parts  [heads, ranks of each head, tokens, head_dim]
// @return       their sums: [tokens, heads, head_dim]
at::Tensor add_in_rank_order(const at::Tensor& parts) {
  const at::ScalarType dtype = parts.scalar_type();
  at::Tensor sum =
      parts.select(1, 0).to(at::promote_types(dtype, at::kFloat), false, true);
  for (std::int64_t r = 1; r < parts.size(1); ++r) {
    sum.add_(parts.select(1, r));
  }
  return sum.transpose(0, 1).to(dtype).contiguous();
}

TensorList send_to_tokens(
    ContextParallel& ranks,
    const TensorList& x,
    const std::vector<std::int64_t>& num_heads) {
  const std::int64_t n = ranks.size();
  TensorList outs;
  std::vector<RankBlocks> blocks;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const at::Tensor& of_heads = x[i];
    const std::int64_t heads = num_heads[i], head_dim = of_heads.size(3);
    const std::int64_t copies = ranks_per_head(ranks, heads);
    const at::Tensor rows = by_token(of_heads);
    FLATSHARD_CHECK(
        of_heads.size(1) % n == 0,
        usage,
        "context parallelism over {} ranks: expected a multiple of as many "
        "tokens in a sequence, got {}",
        n,
        of_heads.size(1));
    const std::int64_t tokens = rows.size(0) / n;
    if (copies == 1) {
      outs.push_back(at::empty({tokens, heads, head_dim}, of_heads.options()));
      blocks.push_back(
          {rows.unflatten(0, {n, tokens}), by_rank(outs.back(), n)});
    } else {
      outs.push_back(
          at::empty({heads, copies, tokens, head_dim}, of_heads.options()));
      blocks.push_back({rows.reshape(outs.back().sizes()), outs.back()});
    }
  }
  ranks.start(std::move(blocks))->finish();
  for (std::size_t i = 0; i < x.size(); ++i) {
    at::Tensor& out = outs[i];
    if (out.dim() == 4) {
      out = add_in_rank_order(out);
    }
    out = reshape_result(
        out,
        {x[i].size(0), x[i].size(1) / n, num_heads[i], x[i].size(3)});
  }
  return outs;
}

HeadsHandle& handle_of(AutogradContext* ctx) {
  return static_cast<HeadsHandle&>(*ctx->saved_data["handle"].toCapsule());
}

struct ToHeadsFunction : torch::autograd::Function<ToHeadsFunction> {
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList x,
      const c10::intrusive_ptr<HeadsHandle>& handle) {
    ctx->saved_data["handle"] = c10::IValue::make_capsule(handle);
    return send_to_heads(*handle->ranks, x.vec());
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("an exchange of context parallelism");
    const HeadsHandle& handle = handle_of(ctx);
    variable_list out = send_to_tokens(*handle.ranks, grads, handle.num_heads);
    out.emplace_back();  // the handle
    return out;
  }
};

struct ToTokensFunction : torch::autograd::Function<ToTokensFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const c10::intrusive_ptr<HeadsHandle>& handle) {
    ctx->saved_data["handle"] = c10::IValue::make_capsule(handle);
    const at::Tensor out =
        send_to_tokens(*handle->ranks, {x.unsqueeze(2)}, handle->num_heads)[0];
    return reshape_result(
        out,
        {out.size(0), out.size(1), out.size(2) * out.size(3)});
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("an exchange of context parallelism");
    ContextParallel& ranks = *handle_of(ctx).ranks;
    const at::Tensor grad =
        send_to_heads(ranks, {grads[0].unflatten(2, {ranks.size(), -1})})[0];
    return {grad.squeeze(2), at::Tensor()};
  }
};

}  // namespace

at::Tensor own_rows(const ContextParallelPtr& ranks, const at::Tensor& x) {
  if (!ranks) {
    return x;
  }
  FLATSHARD_CHECK(
      x.size(0) % ranks->size() == 0,
      usage,
      "context parallelism over {} ranks: expected a multiple of as many "
      "rows, got {}",
      ranks->size(),
      x.size(0));
  const std::int64_t each = x.size(0) / ranks->size();
  return x.narrow(0, ranks->rank() * each, each);
}

TensorList to_heads(const ContextParallelPtr& ranks, const TensorList& x) {
  if (!ranks) {
    return x;
  }
  auto handle = c10::make_intrusive<HeadsHandle>(ranks);
  for (const at::Tensor& of_tokens : x) {
    handle->num_heads.push_back(of_tokens.size(2));
  }
  return ToHeadsFunction::apply(at::TensorList(x), handle);
}

at::Tensor to_tokens(const ContextParallelPtr& ranks, const at::Tensor& x) {
  if (!ranks) {
    return x;
  }
  // The columns of a rank are one head here.
  auto handle = c10::make_intrusive<HeadsHandle>(ranks);
  handle->num_heads = {ranks->size()};
  return ToTokensFunction::apply(x, handle);
}

}  // namespace flatshard::nn
