#include "flatshard/models/kv_cache.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace flatshard::models {

KvCache::KvCache(const Shape& shape, const at::TensorOptions& options)
    : slots_(shape.slots) {
  const std::vector<std::int64_t> sizes{
      shape.rows,
      shape.kv_heads,
      shape.slots,
      shape.head_dim};
  // Zeros, since a masked weight of 0 times NaN is NaN.
  keys_ = at::zeros(sizes, options);
  values_ = at::zeros(sizes, options);
}

std::int64_t KvCache::nbytes() const {
  return static_cast<std::int64_t>(keys_.nbytes() + values_.nbytes());
}

void KvCache::fill(std::int64_t row, const at::Tensor& k, const at::Tensor& v) {
  const std::int64_t seq = k.size(0);
  const std::int64_t kept = std::min(seq, slots_);
  // The last tokens wrap around the end of the slots.
  const std::int64_t first_slot = (seq - kept) % slots_;
  const std::int64_t before_end = std::min(kept, slots_ - first_slot);
  const auto store = [&](const at::Tensor& to, const at::Tensor& from) {
    const at::Tensor last =
        from.narrow(0, seq - kept, kept).transpose(0, 1);  // [kv, kept, d]
    const at::Tensor slots = to.select(0, row);
    slots.narrow(1, first_slot, before_end)
        .copy_(last.narrow(1, 0, before_end));
    slots.narrow(1, 0, kept - before_end)
        .copy_(last.narrow(1, before_end, kept - before_end));
  };
  store(keys_, k);
  store(values_, v);
}

at::Tensor KvCache::attend(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const nn::AttentionArgs& args,
    const CacheStep& step) {
  FLATSHARD_CHECK(
      nn::are_grouped_heads(q, k, v) && q.size(0) == step.num_rows &&
          (step.begins()
               ? step.num_rows == 1
               : q.size(1) == 1 && step.positions.numel() == step.num_rows),
      usage,
      "KvCache: expected one new sequence, or one token of each of {} "
      "sequences, got q {} and k {}",
      step.num_rows,
      c10::str(q.sizes()),
      c10::str(k.sizes()));
  if (step.begins()) {
    fill(step.first_row, k.select(0, 0), v.select(0, 0));
    return nn::causal_attention(q, k, v, args);
  }
  const at::Tensor slot = step.positions.remainder(slots_)
                              .to(at::kLong)
                              .view({-1, 1, 1, 1})
                              .expand({-1, k.size(2), 1, k.size(3)});
  const auto store = [&](const at::Tensor& to, const at::Tensor& from) {
    to.narrow(0, step.first_row, step.num_rows)
        .scatter_(2, slot, from.transpose(1, 2));
  };
  store(keys_, k);
  store(values_, v);
  return attend_to_stored(q, args, step);
}

at::Tensor KvCache::attend_to_stored(
    const at::Tensor& q,
    const nn::AttentionArgs& args,
    const CacheStep& step) const {
  const std::int64_t rows = q.size(0);
  const std::int64_t kv_heads = keys_.size(1);
  const std::int64_t head_dim = q.size(3);
  const std::int64_t used = std::min(step.length, slots_);
  const auto dtype = at::promote_types(q.scalar_type(), at::kFloat);
  const auto stored = [&](const at::Tensor& x) {
    return x.narrow(0, step.first_row, rows).narrow(2, 0, used).to(dtype);
  };
  const double scale = args.scale != 0.0
                           ? args.scale
                           : 1.0 / std::sqrt(static_cast<double>(head_dim));
  // Heads of a group read the same keys: [rows, kv_heads, group, head_dim].
  const at::Tensor queries =
      q.to(dtype).reshape({rows, kv_heads, -1, head_dim}) * scale;
  at::Tensor scores = at::matmul(queries, stored(keys_).transpose(2, 3));
  if (args.soft_cap > 0.0) {
    scores = (scores / args.soft_cap).tanh() * args.soft_cap;
  }
  // The order of keys is nothing to attention, so slots need no sorting.
  const at::Tensor empty = at::arange(used, step.positions.options())
                               .gt(step.positions.view({-1, 1, 1, 1}));
  const at::Tensor weights =
      nn::softmax_with_sinks(scores.masked_fill(empty, -INFINITY), args.sinks);
  return at::matmul(weights, stored(values_))
      .to(q.scalar_type())
      .reshape({rows, 1, -1});
}

}  // namespace flatshard::models
