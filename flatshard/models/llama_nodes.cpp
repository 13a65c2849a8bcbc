// Runs a Llama's blocks in pieces, for schedules that call each piece
// separately.
#include "flatshard/core/error.h"
#include "flatshard/models/llama.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/swiglu.h"

#include <ATen/ATen.h>

#include <utility>
#include <vector>

namespace flatshard::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// rows + residual, when `rows` have been added to it already.
struct AddedFunction : torch::autograd::Function<AddedFunction> {
  static at::Tensor forward(
      AutogradContext* /*ctx*/,
      const at::Tensor& rows,
      const at::Tensor& /*residual*/) {
    return nn::reshape_result(rows, rows.sizes());
  }
  static variable_list backward(AutogradContext* /*ctx*/, variable_list grads) {
    return {grads[0], grads[0]};
  }
};

}  // namespace

class LlamaBlockNodes : public nn::BlockNodes {
 public:
  LlamaBlockNodes(LlamaBlockImpl& block, nn::Documents documents)
      : block_(block), documents_(std::move(documents)) {}

  Attended attend(const at::Tensor& tokens) override {
    if (!block_.moe_) {
      return {.rows = {}, .residual = block_.run(tokens, nullptr, documents_)};
    }
    MoeImpl& moe = *block_.moe_;
    const auto [x, attention] =
        block_.self_attn_(tokens, block_.input_layernorm_.get(), documents_);
    const MoeImpl::BeforeChoice before = moe.before_choice(
        x,
        attention,
        *block_.post_attention_layernorm_,
        /*with_shared=*/false);
    sizes_ = before.sum.sizes().vec();
    const nn::Routing routing = moe.choose(before, record_);
    // A reader of its own, whose gradient comes by itself.
    const at::Tensor dispatched = before.rows.view(before.rows.sizes());
    return {
        .rows =
            {dispatched,
             nn::permute_weights(routing.weights, record_.permutation)},
        .residual = before.sum.reshape(before.rows.sizes()),
        .shared = moe.shared_ ? before.rows : at::Tensor()};
  }

  void finish_plan() override {
    block_.moe_->exchange_->finish_plan(record_.plan);
  }

  at::Tensor experts(const nn::TensorList& rows) override {
    ExpertsImpl& experts = *block_.moe_->experts_;
    const nn::ExchangePlan& plan = *record_.plan;
    const nn::Groups groups{plan.ends, plan.groups_per_expert};
    const at::Tensor gate_up = nn::grouped_linear(
        rows[0],
        experts.gate_up_proj_,
        groups,
        experts.context());
    return nn::grouped_swiglu_linear(
        gate_up,
        rows[1],
        experts.down_proj_,
        groups,
        experts.context());
  }

  at::Tensor shared_experts(const at::Tensor& x, const at::Tensor& residual)
      override {
    MoeImpl& moe = *block_.moe_;
    const auto outs =
        nn::linears(x, {moe.shared_gate_.get(), moe.shared_up_.get()});
    return nn::swiglu_linear(outs[0], outs[1], *moe.shared_down_, residual);
  }

  at::Tensor merge(const at::Tensor& rows, const at::Tensor& residual)
      override {
    return AddedFunction::apply(rows, residual).view(sizes_);
  }

  nn::TensorList send(
      nn::TokenExchange::Direction direction,
      const nn::TensorList& rows,
      const at::Tensor& residual) override {
    nn::TransferInput input{.rows = rows, .addend = residual};
    if (rows[0].defined()) {
      input.tokens = record_.permutation;
    }
    return block_.moe_->exchange_->transfer(record_.plan, direction, input);
  }

 private:
  LlamaBlockImpl& block_;
  nn::Documents documents_;
  RoutingRecord record_;
  std::vector<std::int64_t> sizes_;
};

std::unique_ptr<nn::BlockNodes> LlamaBlockImpl::nodes(nn::Documents documents) {
  FLATSHARD_CHECK(
      checkpoint_ == ActivationCheckpoint::none,
      usage,
      "a block in pieces: expected activation_checkpoint none; a schedule "
      "recomputes pieces itself (OverlapPlanOptions::recompute)");
  return std::make_unique<LlamaBlockNodes>(*this, std::move(documents));
}

at::Tensor LlamaImpl::embed(const at::Tensor& tokens) {
  return body_->embed_tokens()->forward(tokens);
}

at::Tensor LlamaImpl::head(
    const at::Tensor& hidden,
    const at::Tensor& targets) {
  return with_loss_gradient(head_->forward(hidden, targets), targets);
}

at::Tensor LlamaImpl::with_loss_gradient(
    const at::Tensor& result,
    const at::Tensor& targets) const {
  return loss_gradient_ && targets.defined()
             ? nn::tell_gradient(result, loss_gradient_)
             : result;
}

}  // namespace flatshard::models
