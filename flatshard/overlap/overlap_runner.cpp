#include "flatshard/overlap/overlap_runner.h"

#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"
#include "flatshard/graphs/model_graphs.h"
#include "flatshard/overlap/overlap_state.h"
#include "flatshard/schedule/overlap_events.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

using Direction = nn::TokenExchange::Direction;

constexpr int kGradSlots = 3;

}  // namespace

OverlapRunner::OverlapRunner(
    std::shared_ptr<Runtime> runtime,
    OverlapModel model,
    int microbatches,
    const OverlapPlanOptions& options,
    StreamOptions streams)
    : runtime_(std::move(runtime)),
      model_(std::move(model)),
      options_(options),
      plan_(overlap_plan(
          static_cast<int>(model_.layers.size()),
          microbatches,
          options_)),
      waits_(
          plan_waits(plan_, static_cast<int>(model_.layers.size()), options_)),
      has_queue_(model_.exchange && model_.exchange->queue()),
      exchange_(
          has_queue_
              ? model_.exchange->queue()
              : make_stream(runtime_->mesh()->device(), "exchange", streams)),
      microbatches_(microbatches) {
  check_plan(
      plan_,
      static_cast<int>(model_.layers.size()),
      microbatches,
      options_);
  // Refuses what it does not support.
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

OverlapRunner::~OverlapRunner() {
  exchange_->reset();
}

UnitId OverlapRunner::unit_of(const PlanStep& step) const {
  return step.layer < 0 ? model_.root : model_.layers[step.layer];
}

OverlapRunner::Layer& OverlapRunner::layer_of(const PlanStep& step) {
  return *microbatches_[step.microbatch]->layers[step.layer];
}

std::vector<at::Tensor> OverlapRunner::run() {
  executed_.clear();
  losses_.assign(microbatches_.size(), {});
  std::vector<Event> done(plan_.size());
  std::vector<bool> is_awaited(plan_.size(), false);
  for (const PlanWait& wait : waits_) {
    is_awaited[wait.earlier] = true;
  }
  const auto compute = current_stream(runtime_->mesh()->device());
  auto wait = waits_.begin();
  try {
    for (int i = 0; i < static_cast<int>(plan_.size()); ++i) {
      const PlanStep& step = plan_[i];
      const bool is_compute = step.stream() == PlanStream::compute;
      for (; wait != waits_.end() && wait->waiter == i; ++wait) {
        const Event& event = done[wait->earlier];
        is_compute ? compute_waits(event) : event.wait(*exchange_);
      }
      {
        at::RecordFunction range(at::RecordScope::USER_SCOPE);
        if (range.isActive()) {
          range.before(to_string(step));
        }
        run_step(step);
      }
      executed_.push_back(step);
      if (is_awaited[i]) {
        done[i].record(is_compute ? *compute : *exchange_);
      }
    }
  } catch (...) {
    exchange_->reset();
    for (auto& microbatch : microbatches_) {
      microbatch.reset();
    }
    throw;
  }
  return std::exchange(losses_, {});
}

void OverlapRunner::compute_waits(const Event& event) {
  if (has_queue_) {
    model_.exchange->await(event);
  } else {
    event.wait(*current_stream(runtime_->mesh()->device()));
  }
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

std::shared_ptr<OverlapRunner::Transfer> OverlapRunner::send(
    const nn::RowRoute& route,
    Direction direction,
    const nn::TensorList& rows,
    const at::Tensor& addend) {
  auto transfer = std::make_shared<Transfer>();
  for (const at::Tensor& tensor : rows) {
    transfer->sent.push_back(tensor.defined() ? tensor.detach() : tensor);
  }
  std::vector<bool> wanted;
  for (const at::Tensor& tensor : rows) {
    wanted.push_back(tensor.defined() && tensor.requires_grad());
  }
  transfer->addend = addend.defined() ? addend.detach() : addend;
  const auto work = [transfer, wanted, direction, route] {
    for (at::Tensor& sent : transfer->sent) {
      if (sent.defined()) {
        keep_for_current_stream(sent);
      }
    }
    if (transfer->addend.defined()) {
      keep_for_current_stream(transfer->addend);
    }
    const nn::TransferInput input =
        route.input(direction, transfer->sent, transfer->addend);
    transfer->rows = route.exchange->transfer(route.plan, direction, input);
    for (std::size_t i = 0; i < transfer->rows.size(); ++i) {
      at::Tensor& row = transfer->rows[i];
      if (row.defined()) {
        // An exchange that moves nothing gives what it got.
        row = row.is_alias_of(transfer->sent[i]) ? row.detach() : row;
        row.set_requires_grad(wanted[i]);
      }
    }
    if (direction == Direction::combine) {
      // Made for this alone. What is dispatched may lie in memory of a graph,
      // which replays write again unless it is held.
      transfer->sent.clear();
    }
    transfer->arrived = true;
  };
  if (has_queue_) {
    model_.exchange->submit(work);
  } else {
    exchange_->submit(work);
  }
  return transfer;
}

const nn::TensorList& OverlapRunner::received(
    const std::shared_ptr<Transfer>& transfer) {
  FLATSHARD_CHECK(
      transfer && transfer->arrived,
      internal,
      "an overlap plan: rows are read before compute waited for them");
  transfer->sent.clear();
  transfer->addend = at::Tensor();
  for (const at::Tensor& row : transfer->rows) {
    if (row.defined()) {
      keep_for_current_stream(row);
    }
  }
  return transfer->rows;
}

}  // namespace flatshard
