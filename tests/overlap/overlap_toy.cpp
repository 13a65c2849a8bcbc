#include "tests/overlap/overlap_toy.h"

#include "flatshard/group/initializer.h"
#include "flatshard/optim/adamw.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <mutex>
#include <utility>
#include <vector>

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

// Turns rows round by one, and back, on a separate stream.
class RollExchange : public nn::TokenExchange {
 public:
  explicit RollExchange(std::function<void(Direction)> on_transfer)
      : stream_(make_stream(
            at::kCPU,
            "rows",
            {.delay_seed = kSeed, .max_delay_us = 100})),
        on_transfer_(std::move(on_transfer)) {}

  nn::ExchangePlanPtr begin_plan(const at::Tensor&, std::int64_t) override {
    return c10::make_intrusive<nn::ExchangePlan>();
  }
  std::unique_ptr<nn::RowTransfer> start(
      const nn::ExchangePlanPtr& /*plan*/,
      Direction direction,
      const nn::TransferInput& input) override {
    on_transfer_(direction);
    auto moved = std::make_unique<Moved>();
    stream_->submit([to = moved->rows, from = input.rows, direction] {
      for (const at::Tensor& rows : from) {
        to->push_back(
            rows.defined()
                ? rows.roll(direction == Direction::dispatch ? 1 : -1, 0)
                : rows);
      }
    });
    moved->done.record(*stream_);
    return moved;
  }

 private:
  struct Moved : nn::RowTransfer {
    nn::TensorList finish() override {
      done.synchronize();
      return std::move(*rows);
    }
    std::shared_ptr<nn::TensorList> rows = std::make_shared<nn::TensorList>();
    Event done;
  };
  std::shared_ptr<Stream> stream_;
  std::function<void(Direction)> on_transfer_;
};

OverlapBlockImpl::OverlapBlockImpl(bool dense, bool with_shared)
    : dense_(dense),
      exchange_(std::make_shared<RollExchange>(
          [this](nn::TokenExchange::Direction direction) {
            say(direction == nn::TokenExchange::Direction::dispatch
                    ? "dispatch"
                    : "combine");
          })),
      with_shared_(with_shared && !dense) {
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

void OverlapBlockImpl::say(const char* node) const {
  if (on_node) {
    on_node(node);
  }
}

nn::Nodes OverlapBlockImpl::nodes() {
  nn::Nodes nodes;
  const int h = nodes.add("attend", {0}, 1, {attend_.get()}, [this](auto& in) {
    say("attend");
    // The gradients of its readers here are added before they meet merge's
    // gradient.
    const at::Tensor x = in[0].view(in[0].sizes());
    return nn::TensorList{x + at::tanh(attend_(x)) * 0.5};
  })[0];
  if (dense_) {
    return nodes;
  }
  // Two nodes that a plan runs as one.
  const auto made = nodes.add("norm", {h}, 3, {this}, [this](auto& in) {
    const at::Tensor normed = in[0] * gain_;
    // In the order in which gradients add up: the last reader first.
    return nn::TensorList{
        normed.view(normed.sizes()),
        normed.flip(0),
        normed.sum(1)};
  });
  const auto route = [this](nn::TokenExchange::Direction direction) {
    return [this, direction] {
      return nn::RowRoute{.exchange = exchange_, .direction = direction};
    };
  };
  const auto rows = nodes.exchange(
      "dispatch",
      {made[1], made[2]},
      route(nn::TokenExchange::Direction::dispatch));
  int residual = h;
  if (with_shared_) {
    const std::vector<int> in{made[0], h};
    residual = nodes.add("shared", in, 1, {shared_.get()}, [this](auto& in) {
      say("shared");
      return nn::TensorList{in[1] + at::tanh(shared_(in[0]))};
    })[0];
  }
  const auto out =
      nodes.add("experts", rows, 1, {expert_.get()}, [this](auto& in) {
        say("experts");
        return nn::TensorList{at::tanh(expert_(in[0])) * in[1].unsqueeze(1)};
      });
  const int back = nodes.exchange(
      "combine",
      out,
      route(nn::TokenExchange::Direction::combine))[0];
  nodes.add("merge", {back, residual, 0}, 1, {}, [this](auto& in) {
    say("merge");
    return nn::TensorList{in[1] + in[0].flip(0) + in[2] * 0.25};
  });
  return nodes;
}

at::Tensor OverlapBlockImpl::forward(const at::Tensor& tokens) {
  return nodes().run({tokens})[0];
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
      options.in_flight == 2 ? ""
                             : fmt::format(" {} in flight", options.in_flight),
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
      options.options);
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
