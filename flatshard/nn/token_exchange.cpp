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
  explicit Arrived(at::Tensor rows) : rows_(std::move(rows)) {}
  at::Tensor finish() override { return std::move(rows_); }

 private:
  at::Tensor rows_;
};

// What the node keeps of an exchange.
struct ExchangeHandle : torch::CustomClassHolder {
  std::shared_ptr<TokenExchange> exchange;
  ExchangePlanPtr plan;
  TokenExchange::Way way = TokenExchange::Way::dispatch;
};

struct ExchangeFunction : torch::autograd::Function<ExchangeFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& rows,
      const c10::intrusive_ptr<ExchangeHandle>& handle) {
    ctx->saved_data["handle"] = c10::IValue::make_capsule(handle);
    at::Tensor arrived =
        handle->exchange->start(handle->plan, handle->way, rows.contiguous())
            ->finish();
    // An output that is the input would make autograd see an identity.
    return arrived.is_same(rows) ? reshape_result(arrived, arrived.sizes())
                                 : arrived;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    refuse_create_graph("the exchange of tokens");
    const auto capsule = ctx->saved_data["handle"].toCapsule();
    const auto& handle = static_cast<const ExchangeHandle&>(*capsule);
    return {
        handle.exchange
            ->start(handle.plan, back(handle.way), grads[0].contiguous())
            ->finish(),
        {}};
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
    const at::Tensor& rows) {
  return std::make_unique<Arrived>(rows);
}

at::Tensor exchange_rows(
    const std::shared_ptr<TokenExchange>& exchange,
    const ExchangePlanPtr& plan,
    TokenExchange::Way way,
    const at::Tensor& rows) {
  const std::int64_t expected =
      way == TokenExchange::Way::dispatch ? plan->num_sent : plan->num_received;
  FLATSHARD_CHECK(
      rows.dim() >= 1 && rows.size(0) == expected,
      usage,
      "exchange_rows: expected {} rows, got {}",
      expected,
      c10::str(rows.sizes()));
  auto handle = c10::make_intrusive<ExchangeHandle>();
  handle->exchange = exchange;
  handle->plan = plan;
  handle->way = way;
  return ExchangeFunction::apply(rows, handle);
}

}  // namespace flatshard::nn
