#include "tests/overlap/overlap_toy.h"

#include "flatshard/group/initializer.h"
#include "flatshard/optim/adamw.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <mutex>

namespace flatshard::testing {
namespace {

constexpr std::int64_t kDim = 12;
constexpr std::int64_t kTokens = 6;
constexpr std::uint64_t kSeed = 5;

nn::Linear overlap_linear(bool bias) {
  return nn::Linear(
      kDim,
      kDim,
      nn::LinearOptions{.bias = bias, .init = InitSpec::normal(0, 0.2F)});
}

}  // namespace

class OverlapBlockNodes : public nn::BlockNodes {
 public:
  explicit OverlapBlockNodes(OverlapBlockImpl& block) : block_(block) {}

  Attended attend(const at::Tensor& tokens) override {
    say("attend");
    const at::Tensor h = tokens + at::tanh(block_.attend_(tokens)) * 0.5;
    if (block_.dense_) {
      return {.residual = h};
    }
    const at::Tensor normed = h * block_.gain_;
    // In the order in which gradients add up: the last reader first.
    Attended out{.rows = {normed.flip(0), normed.sum(1)}, .residual = h};
    if (block_.with_shared_) {
      out.shared = normed.view(normed.sizes());
    }
    return out;
  }
  at::Tensor experts(const nn::TensorList& rows) override {
    say("experts");
    return at::tanh(block_.expert_(rows[0])) * rows[1].unsqueeze(1);
  }
  at::Tensor shared_experts(const at::Tensor& x, const at::Tensor& residual)
      override {
    say("shared");
    return residual + at::tanh(block_.shared_(x));
  }
  at::Tensor merge(const at::Tensor& rows, const at::Tensor& residual)
      override {
    say("merge");
    return residual + rows.flip(0);
  }
  nn::TensorList send(
      nn::TokenExchange::Direction direction,
      const nn::TensorList& rows,
      const at::Tensor& /*residual*/) override {
    say(direction == nn::TokenExchange::Direction::dispatch ? "dispatch"
                                                            : "combine");
    nn::TensorList moved;
    for (const at::Tensor& tensor : rows) {
      moved.push_back(
          tensor.defined()
              ? tensor.roll(
                    direction == nn::TokenExchange::Direction::dispatch ? 1
                                                                        : -1,
                    0)
              : tensor);
    }
    return moved;
  }

 private:
  void say(const char* node) const {
    if (block_.on_node) {
      block_.on_node(node);
    }
  }
  OverlapBlockImpl& block_;
};

OverlapBlockImpl::OverlapBlockImpl(bool dense, bool with_shared)
    : dense_(dense), with_shared_(with_shared && !dense) {
  attend_ = register_module("attend", overlap_linear(true));
  if (dense) {
    return;
  }
  gain_ = declare_parameter("gain", {kDim}, InitSpec::normal(1, 0.1F));
  expert_ = register_module("expert", overlap_linear(false));
  if (with_shared) {
    shared_ = register_module("shared", overlap_linear(true));
  }
}

std::unique_ptr<nn::BlockNodes> OverlapBlockImpl::nodes() {
  return std::make_unique<OverlapBlockNodes>(*this);
}

at::Tensor OverlapBlockImpl::forward(const at::Tensor& tokens) {
  OverlapBlockNodes nodes(*this);
  const auto a = nodes.attend(tokens);
  if (dense_) {
    return a.residual;
  }
  using Direction = nn::TokenExchange::Direction;
  const nn::TensorList rows = nodes.send(Direction::dispatch, a.rows, {});
  const at::Tensor residual =
      with_shared_ ? nodes.shared_experts(a.shared, a.residual) : a.residual;
  const at::Tensor back =
      nodes.send(Direction::combine, {nodes.experts(rows)}, residual)[0];
  return nodes.merge(back, residual);
}

OverlapStackImpl::OverlapStackImpl(
    int layers,
    const OverlapPlanOptions& options) {
  in = register_module("in", overlap_linear(true));
  for (int l = 0; l < layers; ++l) {
    blocks.push_back(register_module(
        "block" + std::to_string(l),
        OverlapBlock(
            !options.dense.empty() && options.dense[l],
            options.shared_experts)));
  }
  out = register_module("out", overlap_linear(false));
  temperature_ =
      declare_parameter("temperature", {3}, InitSpec::normal(0.3F, 0.1F));
}

at::Tensor OverlapStackImpl::embed(const at::Tensor& x) {
  return in->forward(x);
}

at::Tensor OverlapStackImpl::head(
    const at::Tensor& tokens,
    const at::Tensor& target) {
  return at::mse_loss(out->forward(tokens) * temperature_.sum(), target);
}

at::Tensor OverlapStackImpl::forward(
    const at::Tensor& x,
    const at::Tensor& target) {
  at::Tensor h = in(x);
  for (OverlapBlock& block : blocks) {
    h = block(h);
  }
  return at::mse_loss(out(h) * temperature_.sum(), target);
}

std::string OverlapCase::name() const {
  return fmt::format(
      "{} {} layers {} microbatches{}{}{}{}{}",
      strategy,
      layers,
      microbatches,
      options.interleave ? "" : " one after the other",
      options.delay_wgrad ? " delay" : "",
      options.recompute ? " recompute" : "",
      options.shared_experts ? " shared" : "",
      options.dense.empty() ? "" : " some dense");
}

OverlapTrainer::OverlapTrainer(
    const OverlapCase& options,
    const RankContext& context)
    : model(options.layers, options.options),
      options_(options),
      rank_(context.rank) {
  const StreamOptions streams{
      .delay_seed = 7 + static_cast<std::uint64_t>(context.rank),
      .max_delay_us = options.max_delay_us};
  FullyShardOptions sharding{.strategy = options.strategy, .seed = kSeed};
  sharding.group.precision = Precision::full();
  sharding.runtime.streams = streams;
  sharding.runtime.trace = true;
  for (OverlapBlock& block : model->blocks) {
    sharding.units.push_back(block.get());
  }
  if (options.ends_are_units) {
    sharding.units.push_back(model->in.get());
    sharding.units.push_back(model->out.get());
  }
  runtime = fully_shard(
      *model,
      options.has_outer() ? context.mesh({{"outer", 2}, {"dp", 2}})
                          : context.mesh(),
      sharding);
  optimizer_ = std::make_unique<AdamW>(runtime->groups(), AdamWOptions{});
  if (!options.with_runner) {
    return;
  }
  OverlapModel pieces{
      .root = runtime->unit_of(*model),
      .embed = [this](int m) { return model->embed(batch(m).first); },
      .nodes = [this](int /*m*/, int l) { return model->blocks[l]->nodes(); },
      .head =
          [this](int m, const at::Tensor& tokens) {
            return model->head(tokens, batch(m).second) / options_.microbatches;
          }};
  if (options.ends_are_units) {
    pieces.ends = PlanUnits::Ends{
        .embed = runtime->unit_of(*model->in),
        .head = runtime->unit_of(*model->out)};
  }
  for (OverlapBlock& block : model->blocks) {
    pieces.layers.push_back(runtime->unit_of(*block));
  }
  runner = std::make_unique<OverlapRunner>(
      runtime,
      pieces,
      options.microbatches,
      options.options,
      streams);
}

std::pair<at::Tensor, at::Tensor> OverlapTrainer::batch(int microbatch) const {
  const at::Tensor both = at::empty({2 * kTokens, kDim});
  Initializer(kSeed).fill(
      both,
      fmt::format("batch {} {} {}", step_, rank_, microbatch),
      InitSpec::normal(0, 1),
      0);
  return {both.narrow(0, 0, kTokens), both.narrow(0, kTokens, kTokens)};
}

std::vector<double> OverlapTrainer::forward_backward(int step) {
  step_ = step;
  std::vector<double> losses;
  if (runner) {
    for (const at::Tensor& loss : runner->run()) {
      losses.push_back(loss.item<double>());
    }
    return losses;
  }
  for (int m = 0; m < options_.microbatches; ++m) {
    runtime->set_is_last_microbatch(m + 1 == options_.microbatches);
    const auto [x, target] = batch(m);
    const at::Tensor loss = model(x, target) / options_.microbatches;
    loss.backward();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

void OverlapTrainer::update() {
  optimizer_->step(1e-2);
  optimizer_->zero_grad();
}

OverlapResult train_overlapped(const OverlapCase& options) {
  OverlapResult result;
  std::mutex mutex;
  run_ranks(options.world(), [&](RankContext& context) {
    OverlapTrainer trainer(options, context);
    for (int step = 0; step < options.steps; ++step) {
      const auto losses = trainer.forward_backward(step);
      trainer.update();
      const std::lock_guard lock(mutex);
      for (int m = 0; m < static_cast<int>(losses.size()); ++m) {
        result.losses[{step, context.rank, m}] = losses[m];
      }
    }
    collect_weights(*trainer.runtime, mutex, result.weights);
  });
  return result;
}

}  // namespace flatshard::testing
