#include "flatshard/overlap/overlap_runner.h"

#include "flatshard/core/error.h"
#include "flatshard/device/stream.h"
#include "flatshard/graphs/model_graphs.h"
#include "flatshard/overlap/overlap_state.h"
#include "flatshard/schedule/overlap_events.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

constexpr int kGradSlots = 3;

}  // namespace

OverlapRunner::OverlapRunner(
    std::shared_ptr<Runtime> runtime,
    OverlapModel model,
    int microbatches,
    const OverlapPlanOptions& options)
    : runtime_(std::move(runtime)),
      model_(std::move(model)),
      options_(options),
      plan_(overlap_plan(
          static_cast<int>(model_.layers.size()),
          microbatches,
          options_)),
      microbatches_(microbatches) {
  check_plan(
      plan_,
      static_cast<int>(model_.layers.size()),
      microbatches,
      options_);
  // Rejects unsupported options.
  BackwardPass(runtime_, /*tells_graphs=*/true);
  PlanUnits units{
      .root = model_.root,
      .ends = model_.ends,
      .layers = model_.layers};
  units.layer_grads.resize(model_.layers.size());
  const auto events = plan_events(plan_, units, options_);
  if (const auto& graphs = runtime_->graphs().regions()) {
    interleaving_ = graphs->interleave_microbatches();  // refuses, too
  }
  runtime_->calls().plan_passes(events, kGradSlots);
}

OverlapRunner::~OverlapRunner() = default;

UnitId OverlapRunner::unit_of(const PlanStep& step) const {
  return step.layer < 0 ? model_.root : model_.layers[step.layer];
}

OverlapRunner::Layer& OverlapRunner::layer_of(const PlanStep& step) {
  return *microbatches_[step.microbatch]->layers[step.layer];
}

std::vector<at::Tensor> OverlapRunner::run() {
  losses_.assign(microbatches_.size(), {});
  const auto compute = current_stream(runtime_->mesh()->device());
  try {
    for (const PlanStep& step : plan_) {
      at::RecordFunction range(at::RecordScope::USER_SCOPE);
      if (range.isActive()) {
        range.before(to_string(step));
      }
      run_step(step);
      // No exchange sends weight gradients.
      if (step.layer >= 0 && step.stream() == PlanStream::compute &&
          step.pass != PlanPass::wgrad) {
        layer_of(step).made.record(*compute);
      }
    }
  } catch (...) {
    for (auto& microbatch : microbatches_) {
      microbatch.reset();
    }
    throw;
  }
  return std::exchange(losses_, {});
}

void OverlapRunner::run_step(const PlanStep& step) {
  auto& microbatch = microbatches_[step.microbatch];
  if (const auto& graphs = runtime_->graphs().regions()) {
    graphs->set_microbatch(step.microbatch);
  }
  if (!microbatch) {
    microbatch = std::make_unique<Microbatch>();
    microbatch->pass =
        std::make_unique<BackwardPass>(runtime_, /*tells_graphs=*/true);
    microbatch->layers.resize(model_.layers.size());
  }
  switch (step.pass) {
    case PlanPass::forward:
      forward(step);
      return;
    case PlanPass::recompute:
      begin_backward(step);
      recompute(step);
      return;
    case PlanPass::backward:
      begin_backward(step);
      backward(step);
      return;
    case PlanPass::wgrad:
      microbatch->pass->run_wgrads(unit_of(step), static_cast<int>(step.node));
      return;
  }
}

// -- rows --------------------------------------------------------------------

OverlapRunner::Transfer OverlapRunner::send(
    const Layer& layer,
    const nn::RowRoute& route,
    nn::TokenExchange::Direction direction,
    const nn::TensorList& rows,
    const at::Tensor& addend) {
  const at::NoGradGuard no_grad;
  const auto detached = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.detach() : tensor;
  };
  Transfer transfer;
  nn::TensorList sent;
  for (const at::Tensor& tensor : rows) {
    sent.push_back(detached(tensor));
    transfer.wanted.push_back(tensor.defined() && tensor.requires_grad());
  }
  transfer.rows = route.exchange->start(
      route.plan,
      direction,
      route.input(direction, std::move(sent), detached(addend), layer.made));
  return transfer;
}

nn::TensorList OverlapRunner::Transfer::receive() {
  nn::TensorList received = std::exchange(rows, nullptr)->finish();
  for (std::size_t i = 0; i < received.size(); ++i) {
    if (received[i].defined()) {
      received[i].set_requires_grad(wanted[i]);
    }
  }
  return received;
}

}  // namespace flatshard
