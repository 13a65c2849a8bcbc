#include "flatshard/nn/parallel/context_parallel.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/visit.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <array>
#include <utility>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The exchanges of one call of attention. Its autograd nodes share it: a node
// that starts an exchange in forward finishes the opposite one in backward.
// Tensors of an exchange in flight pass from node to node, unread.
class HeadExchange : public torch::CustomClassHolder {
 public:
  HeadExchange(
      ContextParallelPtr ranks,
      const std::array<const at::Tensor*, 3>& qkv)
      : ranks_(std::move(ranks)),
        batch_(qkv[0]->size(0)),
        own_seq_(qkv[0]->size(1)),
        head_dim_(qkv[0]->size(3)) {
    for (std::size_t i = 0; i < 3; ++i) {
      heads_[i] = qkv[i]->size(2);
    }
    FLATSHARD_CHECK(
        heads_[0] % size() == 0 &&
            (heads_[1] % size() == 0 || size() % heads_[1] == 0),
        config,
        "context parallelism over {} ranks: expected a multiple of {} heads, "
        "and a multiple or a divisor of kv heads, got {} and {}",
        size(),
        size(),
        heads_[0],
        heads_[1]);
    in_flight_.resize(num_head_groups(heads_[1], size()));
  }

  std::int64_t num_groups() const {
    return static_cast<std::int64_t>(in_flight_.size());
  }

  /// Returns the places of a group's heads among all heads of q.
  IndexPart part(std::int64_t group) const {
    const std::int64_t each = heads_[0] / size() / num_groups();
    const std::int64_t begin = (ranks_->rank() * num_groups() + group) * each;
    return {begin, begin + each};
  }

  /// Starts to send tensors of own tokens, of all groups: group by group q, k
  /// and v of all tokens. Group `finish` waits for them.
  TensorList start_to_heads(const TensorList& qkv) {
    TensorList arriving;
    for (std::int64_t group = 0; group < num_groups(); ++group) {
      std::vector<RankBlocks> blocks;
      for (std::size_t i = 0; i < 3; ++i) {
        const at::Tensor send = for_ranks(by_token(qkv[i]), i, group);
        arriving.push_back(at::empty(
            {batch_,
             own_seq_ * size(),
             heads_[i] * copies(i) / size() / num_groups(),
             head_dim_},
            qkv[i].options()));
        blocks.push_back({send, arriving.back().view(send.sizes())});
      }
      start(group, std::move(blocks));
    }
    return arriving;
  }

  /// Starts to send a group's gradients to the owners of tokens.
  void start_to_owners(std::int64_t group, const variable_list& grads) {
    if (gradients_.empty()) {
      for (std::size_t i = 0; i < 3; ++i) {
        const std::int64_t tokens = batch_ * own_seq_;
        gradients_.push_back(
            copies(i) == 1
                ? at::empty({tokens, heads_[i], head_dim_}, grads[i].options())
                : at::empty(
                      {heads_[i], copies(i), tokens, head_dim_},
                      grads[i].options()));
      }
    }
    std::vector<RankBlocks> blocks;
    for (std::size_t i = 0; i < 3; ++i) {
      const at::Tensor receive =
          copies(i) == 1 ? for_ranks(gradients_[i], i, group) : gradients_[i];
      blocks.push_back({grads[i].reshape(receive.sizes()), receive});
    }
    start(group, std::move(blocks));
  }

  /// Returns the gradients of q, k and v of own tokens, after all groups.
  TensorList finish_gradients() {
    finish_all();
    TensorList gradients = std::exchange(gradients_, {});
    for (std::size_t i = 0; i < 3; ++i) {
      const at::Tensor& x = gradients[i];
      gradients[i] = (copies(i) == 1 ? x : add_in_rank_order(x))
                         .view({batch_, own_seq_, heads_[i], head_dim_});
    }
    return gradients;
  }

  /// Starts to send a group's results, [batch, seq, columns].
  void start_results(std::int64_t group, const at::Tensor& x) {
    if (!results_.defined()) {
      results_ = at::empty(
          {batch_ * own_seq_, size(), num_groups(), x.size(2)},
          x.options());
    }
    const at::Tensor receive = columns_of(results_, group);
    start(group, {{x.reshape(receive.sizes()), receive}});
  }

  /// Returns the results of own tokens, after all groups.
  at::Tensor finish_results() {
    finish_all();
    return reshape_result(std::exchange(results_, {}), {batch_, own_seq_, -1});
  }

  /// Starts to send gradients of own tokens' results, the last group first.
  TensorList start_gradients_of_results(const at::Tensor& grad) {
    TensorList arriving(in_flight_.size());
    const at::Tensor by_rank =
        grad.reshape({batch_ * own_seq_, size(), num_groups(), -1});
    for (std::int64_t group = num_groups() - 1; group >= 0; --group) {
      const at::Tensor send = columns_of(by_rank, group);
      at::Tensor& receive = arriving[group];
      receive =
          at::empty({batch_, own_seq_ * size(), send.size(2)}, grad.options());
      start(group, {{send, receive.view(send.sizes())}});
    }
    return arriving;
  }

  void finish(std::int64_t group) {
    FLATSHARD_CHECK(
        in_flight_[group] != nullptr,
        usage,
        "context parallelism: expected attention that reads all heads, but "
        "group {} was not used",
        group);
    std::exchange(in_flight_[group], nullptr)->finish();
  }

 private:
  int size() const { return ranks_->size(); }

  /// Returns how many ranks get each head of q, k or v.
  std::int64_t copies(std::size_t i) const {
    return heads_[i] % size() == 0 ? 1 : size() / heads_[i];
  }

  static at::Tensor by_token(const at::Tensor& x) {
    return x.reshape({-1, x.size(2), x.size(3)});
  }

  /// Views rows [tokens, heads, head_dim] by the ranks of a group's heads:
  /// [size, tokens, heads of the group, head_dim], or where several ranks get a
  /// head [heads, ranks of each, tokens, head_dim].
  at::Tensor
  for_ranks(const at::Tensor& rows, std::size_t i, std::int64_t group) const {
    if (copies(i) > 1) {
      return rows.transpose(0, 1).unsqueeze(1).expand(
          {heads_[i], copies(i), rows.size(0), head_dim_});
    }
    const std::int64_t own = heads_[i] / size();
    const std::int64_t each = own / num_groups();
    return rows.unflatten(1, {size(), own})
        .narrow(2, group * each, each)
        .transpose(0, 1);
  }

  /// Views [tokens, size, groups, columns] as [size, tokens, columns].
  static at::Tensor columns_of(const at::Tensor& x, std::int64_t group) {
    return x.select(2, group).transpose(0, 1);
  }

  /// Adds [heads, ranks of each, tokens, head_dim] up over the ranks, to
  /// [tokens, heads, head_dim].
  static at::Tensor add_in_rank_order(const at::Tensor& parts) {
    const at::ScalarType dtype = parts.scalar_type();
    at::Tensor sum = parts.select(1, 0).to(
        at::promote_types(dtype, at::kFloat),
        /*non_blocking=*/false,
        /*copy=*/true);
    for (std::int64_t r = 1; r < parts.size(1); ++r) {
      sum.add_(parts.select(1, r));
    }
    return sum.transpose(0, 1).to(dtype).contiguous();
  }

  void start(std::int64_t group, std::vector<RankBlocks> blocks) {
    in_flight_[group] = ranks_->start(std::move(blocks));
  }

  void finish_all() {
    for (std::int64_t group = 0; group < num_groups(); ++group) {
      finish(group);
    }
  }

  ContextParallelPtr ranks_;
  std::int64_t batch_, own_seq_, head_dim_;
  std::array<std::int64_t, 3> heads_;  // of q, k and v, on all ranks
  TensorList gradients_;  // of q, k and v that arrive; empty: none do
  at::Tensor results_;    // that arrive, or undefined
  std::vector<std::unique_ptr<PendingExchange>> in_flight_;  // by group
};
using HeadExchangePtr = c10::intrusive_ptr<HeadExchange>;

void save_exchange(
    AutogradContext* ctx,
    const HeadExchangePtr& exchange,
    std::int64_t group = 0) {
  ctx->saved_data["exchange"] = c10::IValue::make_capsule(exchange);
  ctx->saved_data["group"] = group;
}

HeadExchangePtr saved_exchange(AutogradContext* ctx) {
  refuse_create_graph("an exchange of context parallelism");
  return c10::static_intrusive_pointer_cast<HeadExchange>(
      ctx->saved_data["exchange"].toCapsule());
}

std::int64_t saved_group(AutogradContext* ctx) {
  return ctx->saved_data["group"].toInt();
}

// Another tensor over the same memory: a Function does not return its input.
at::Tensor pass_on(const at::Tensor& x) {
  return reshape_result(x, x.sizes());
}

struct StartHeadsFunction : torch::autograd::Function<StartHeadsFunction> {
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList qkv,
      const HeadExchangePtr& exchange) {
    save_exchange(ctx, exchange);
    return exchange->start_to_heads(qkv.vec());
  }

  static variable_list backward(
      AutogradContext* ctx,
      variable_list /*in_flight*/) {
    variable_list out = saved_exchange(ctx)->finish_gradients();
    out.emplace_back();  // the exchange
    return out;
  }
};

struct FinishHeadsFunction : torch::autograd::Function<FinishHeadsFunction> {
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList in_flight,
      const HeadExchangePtr& exchange,
      std::int64_t group) {
    save_exchange(ctx, exchange, group);
    exchange->finish(group);
    variable_list heads;
    for (const at::Tensor& x : in_flight) {
      heads.push_back(pass_on(x));
    }
    return heads;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    saved_exchange(ctx)->start_to_owners(saved_group(ctx), grads);
    grads.resize(grads.size() + 2);  // the exchange, the group
    return grads;
  }
};

struct StartResultsFunction : torch::autograd::Function<StartResultsFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& attended,
      const HeadExchangePtr& exchange,
      std::int64_t group) {
    save_exchange(ctx, exchange, group);
    exchange->start_results(group, attended);
    return pass_on(attended);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    saved_exchange(ctx)->finish(saved_group(ctx));
    return {grads[0], at::Tensor(), at::Tensor()};
  }
};

struct FinishResultsFunction
    : torch::autograd::Function<FinishResultsFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      at::TensorList /*in_flight*/,
      const HeadExchangePtr& exchange) {
    save_exchange(ctx, exchange);
    return exchange->finish_results();
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out =
        saved_exchange(ctx)->start_gradients_of_results(grads[0]);
    out.emplace_back();  // the exchange
    return out;
  }
};

}  // namespace

at::Tensor own_rows(const ContextParallelPtr& ranks, const at::Tensor& x) {
  if (!ranks) {
    return x;
  }
  const TokenPart part = ranks->part();
  FLATSHARD_CHECK(
      x.size(0) % part.num_parts() == 0 &&
          (part.hosts == 1 || x.size(0) % (2 * part.hosts) == 0),
      usage,
      "context parallelism over {} ranks{}: expected a multiple of as many "
      "rows, got {}",
      part.num_parts(),
      part.hosts == 1
          ? ""
          : fmt::format(" and 2 chunks for each of {} hosts", part.hosts),
      x.size(0));
  TensorList own;
  for (const TokenRange& range : part.of(x.size(0))) {
    own.push_back(x.narrow(0, range.begin, range.size()));
  }
  return own.size() == 1 ? own[0] : at::cat(own);
}

at::Tensor sum_over_ranks(
    const ContextParallelPtr& ranks,
    const at::Tensor& x) {
  if (!ranks) {
    return x;
  }
  const std::int64_t n = ranks->size();
  if (n == 1) {
    return sum_over_ranks(ranks->hosts(), x);
  }
  const at::NoGradGuard no_grad;
  const at::Tensor mine = x.detach().contiguous().reshape({1, -1});
  const at::Tensor all = at::empty({n, mine.size(1)}, mine.options());
  ranks->start({{mine.expand({n, mine.size(1)}), all, /*is_one=*/true}})
      ->finish();
  at::Tensor sum = all[0].clone();
  for (std::int64_t r = 1; r < n; ++r) {
    sum.add_(all[r]);
  }
  return sum_over_ranks(ranks->hosts(), sum.view(x.sizes()));
}

// The engine runs the nodes of a backward in the opposite order of these calls.
at::Tensor attend_shared_tokens(
    const ContextParallelPtr& ranks,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const AttendHeads& attend) {
  if (!ranks || ranks->size() == 1) {
    return attend({q, k, v, {0, q.size(2)}});
  }
  const auto exchange =
      c10::make_intrusive<HeadExchange>(ranks, std::array{&q, &k, &v});
  const TensorList sent{q, k, v};
  const TensorList in_flight =
      StartHeadsFunction::apply(at::TensorList(sent), exchange);
  TensorList results;
  for (std::int64_t group = 0; group < exchange->num_groups(); ++group) {
    const TensorList heads = FinishHeadsFunction::apply(
        at::TensorList(in_flight).slice(3 * group, 3),
        exchange,
        group);
    results.push_back(StartResultsFunction::apply(
        attend({heads[0], heads[1], heads[2], exchange->part(group)}),
        exchange,
        group));
  }
  return FinishResultsFunction::apply(at::TensorList(results), exchange);
}

}  // namespace flatshard::nn
