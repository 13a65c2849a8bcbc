#include "flatshard/moe/token_exchange.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/second_run.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class Arrived : public RowTransfer {
 public:
  explicit Arrived(TensorList rows) : rows_(std::move(rows)) {}
  TensorList finish() override { return std::move(rows_); }

 private:
  TensorList rows_;
};

// The state that the node keeps of a route.
struct RouteHandle : torch::CustomClassHolder {
  explicit RouteHandle(RowRoute kept) : route(std::move(kept)) {}
  RowRoute route;
};

TensorList start_and_finish(
    const RowRoute& route,
    TokenExchange::Direction to,
    TensorList rows,
    const at::Tensor& addend = {}) {
  return route.exchange
      ->start(route.plan, to, route.input(to, std::move(rows), addend))
      ->finish();
}

struct ExchangeFunction : torch::autograd::Function<ExchangeFunction> {
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList rows,
      const std::optional<at::Tensor>& addend,
      const c10::intrusive_ptr<RouteHandle>& handle,
      bool is_unread) {
    ctx->saved_data["handle"] = c10::IValue::make_capsule(handle);
    ctx->saved_data["has_addend"] = addend.has_value();
    ctx->set_materialize_grads(false);
    if (is_unread) {
      FLATSHARD_CHECK(
          rows.size() == 1 && handle->route.tokens,
          internal,
          "expected the results of experts for an exchange that nothing reads, "
          "got {} tensors",
          rows.size());
      const std::vector<std::int64_t> sizes{
          handle->route.tokens->tokens(),
          rows[0].size(1)};
      return {without_values(
          addend ? addend->sizes() : at::IntArrayRef(sizes),
          rows[0].options())};
    }
    TensorList arrived = start_and_finish(
        handle->route,
        handle->route.direction,
        rows.vec(),
        addend.value_or(at::Tensor()));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      // An output that is the input would make autograd see an identity.
      if (arrived[i].is_same(rows[i])) {
        arrived[i] = reshape_result(arrived[i], arrived[i].sizes());
      }
    }
    return arrived;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("the exchange of tokens");
    const auto capsule = ctx->saved_data["handle"].toCapsule();
    const RowRoute& route = static_cast<const RouteHandle&>(*capsule).route;
    at::Tensor of_addend;
    if (ctx->saved_data["has_addend"].toBool()) {
      of_addend = grads[0];
    }
    variable_list back_home =
        start_and_finish(route, back(route.direction), std::move(grads));
    back_home.push_back(of_addend);
    back_home.resize(back_home.size() + 2);  // the handle, is_unread
    return back_home;
  }
};

}  // namespace

ExchangePlanPtr LocalExchange::begin_plan(
    const at::Tensor& counts,
    std::int64_t num_rows) {
  auto plan = c10::make_intrusive<ExchangePlan>();
  plan->ends = counts.cumsum(0, at::kInt);
  plan->num_sent = num_rows;
  plan->num_received = num_rows;
  return plan;
}

std::unique_ptr<RowTransfer> LocalExchange::start(
    const ExchangePlanPtr& /*plan*/,
    Direction direction,
    const TransferInput& input) {
  return std::make_unique<Arrived>(
      result_of(direction, input, rows_of(direction, input)));
}

TensorList rows_of(
    TokenExchange::Direction direction,
    const TransferInput& input) {
  TensorList rows = input.rows;
  if (input.tokens && direction == TokenExchange::Direction::dispatch) {
    const at::NoGradGuard no_grad;
    rows[0] = permute_rows(rows[0], *input.tokens);
  }
  return rows;
}

TensorList result_of(
    TokenExchange::Direction direction,
    const TransferInput& input,
    TensorList rows) {
  if (input.tokens && direction == TokenExchange::Direction::combine) {
    const at::NoGradGuard no_grad;
    rows[0] = sum_rows_of_tokens(rows[0], *input.tokens, input.addend);
  }
  return rows;
}

TransferInput RowRoute::input(
    TokenExchange::Direction to,
    TensorList rows,
    const at::Tensor& addend,
    const std::optional<Event>& made) const {
  TransferInput input{.rows = std::move(rows), .after = made};
  const auto make_contiguous = [&input](at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_contiguous()) {
      tensor = tensor.contiguous();
      input.after.reset();
    }
  };
  std::ranges::for_each(input.rows, make_contiguous);
  if (tokens && input.rows[0].defined()) {
    input.tokens = tokens;
    input.addend = addend;
    make_contiguous(input.addend);
    if (to == TokenExchange::Direction::dispatch) {
      input.rows[0] = as_rows(input.rows[0]);
    }
  }
  return input;
}

TensorList exchange_rows(
    const RowRoute& route,
    const TensorList& rows,
    const at::Tensor& addend,
    bool is_unread) {
  return ExchangeFunction::apply(
      at::TensorList(rows),
      as_optional(addend),
      c10::make_intrusive<RouteHandle>(route),
      is_unread);
}

}  // namespace flatshard::nn
