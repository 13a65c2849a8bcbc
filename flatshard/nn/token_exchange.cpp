#include "flatshard/nn/token_exchange.h"

#include "flatshard/nn/autograd.h"

#include <ATen/ATen.h>

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

// What the node keeps of an exchange.
struct ExchangeHandle : torch::CustomClassHolder {
  std::shared_ptr<TokenExchange> exchange;
  ExchangePlanPtr plan;
  TokenExchange::Way way = TokenExchange::Way::dispatch;
};

TensorList contiguous(TensorList rows) {
  for (at::Tensor& tensor : rows) {
    if (tensor.defined()) {
      tensor = tensor.contiguous();
    }
  }
  return rows;
}

struct ExchangeFunction : torch::autograd::Function<ExchangeFunction> {
  static variable_list forward(
      AutogradContext* ctx,
      at::TensorList rows,
      const c10::intrusive_ptr<ExchangeHandle>& handle) {
    ctx->saved_data["handle"] = c10::IValue::make_capsule(handle);
    ctx->set_materialize_grads(false);
    TensorList arrived =
        handle->exchange
            ->start(handle->plan, handle->way, contiguous(rows.vec()))
            ->finish();
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
    const auto& handle = static_cast<const ExchangeHandle&>(*capsule);
    variable_list back_home =
        handle.exchange
            ->start(handle.plan, back(handle.way), contiguous(std::move(grads)))
            ->finish();
    back_home.emplace_back();  // the handle has none
    return back_home;
  }
};

}  // namespace

void TokenExchange::await(const Event& event) {
  const auto stream = queue();
  if (stream) {
    event.wait(*current_stream(stream->device()));
  }
}

ExchangePlanPtr LocalExchange::plan(
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
    Way /*way*/,
    const TensorList& rows) {
  return std::make_unique<Arrived>(rows);
}

TensorList exchange_rows(
    const std::shared_ptr<TokenExchange>& exchange,
    const ExchangePlanPtr& plan,
    TokenExchange::Way way,
    const TensorList& rows) {
  const std::int64_t expected =
      way == TokenExchange::Way::dispatch ? plan->num_sent : plan->num_received;
  for (const at::Tensor& tensor : rows) {
    FLATSHARD_CHECK(
        tensor.dim() >= 1 && tensor.size(0) == expected,
        usage,
        "exchange_rows: expected {} rows, got {}",
        expected,
        c10::str(tensor.sizes()));
  }
  auto handle = c10::make_intrusive<ExchangeHandle>();
  handle->exchange = exchange;
  handle->plan = plan;
  handle->way = way;
  return ExchangeFunction::apply(at::TensorList(rows), handle);
}

at::Tensor exchange_rows(
    const std::shared_ptr<TokenExchange>& exchange,
    const ExchangePlanPtr& plan,
    TokenExchange::Way way,
    const at::Tensor& rows) {
  return exchange_rows(exchange, plan, way, TensorList{rows})[0];
}

}  // namespace flatshard::nn
