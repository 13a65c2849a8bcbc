#include "flatshard/graphs/step_graph.h"

#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/graphs/static_tensor.h"
#include "flatshard/graphs/step_recording.h"
#include "flatshard/graphs/step_stamp.h"
#include "flatshard/graphs/watched_graphs.h"
#include "flatshard/nn/module_tree.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

constexpr const char* kName = "the step";

}  // namespace

StepGraph::StepGraph(std::shared_ptr<Runtime> runtime, Work work)
    : runtime_(std::move(runtime)),
      core_(runtime_->core()),
      work_(std::move(work)),
      life_(core_.options.graphs) {
  FLATSHARD_CHECK(
      life_.options().enabled && life_.options().whole_step,
      usage,
      "StepGraph: expected a Runtime made with GraphOptions::enabled and "
      "whole_step");
  nn::Module* const root = core_.units.front()->module();
  FLATSHARD_CHECK(
      root != nullptr,
      usage,
      "StepGraph: expected units of nn::Module");
  modules_ = nn::modules_below(*root);
  for (const nn::Module* module : modules_) {
    num_own_hooks_.push_back(runtime_->num_hooks_on(*module));
  }
}

StepGraph::~StepGraph() = default;

void StepGraph::reset() {
  drop();
  failure_.clear();
  life_.restart();
}

void StepGraph::drop() {
  graph_.reset();
  effects_.reset();
  stamp_.reset();
  inputs_.clear();
  pool_.reset();
}

GraphStats StepGraph::stats() const {
  GraphStats stats = life_.counts();
  stats.nbytes = pool_ ? pool_->nbytes() : 0;
  return stats;
}

nn::TensorList StepGraph::run(const nn::TensorList& inputs) {
  core_.mesh->check();
  {
    const std::lock_guard lock(core_.mutex);
    FLATSHARD_CHECK(
        core_.rests() || core_.failed(),
        usage,
        "StepGraph::run: expected a call between two steps, got a call inside "
        "a forward or backward");
    core_.before_root_forward();
  }
  drop_if_outdated();
  life_.step_begins();
  if (life_.is(GraphPhase::watching) && life_.is_warm()) {
    try_to_capture(inputs);
  }
  if (!life_.is(GraphPhase::watching)) {
    const std::string reason = miss(inputs);
    if (reason.empty()) {
      return replay(inputs);
    }
    life_.fallback(kName, reason);
  }
  nn::TensorList outputs = work_(inputs);
  for (at::Tensor& output : outputs) {
    output = output.detach();
  }
  return outputs;
}

void StepGraph::drop_if_outdated() {
  if (stamp_ && (stamp_->num_plans != core_.executor.slots().num_plans() ||
                 stamp_->num_rule_changes != core_.num_rule_changes)) {
    reset();
  }
}

// -- capture -----------------------------------------------------------------

// Returns the ranks' common decision. Collective; blocks.
bool StepGraph::all_ranks(bool mine) const {
  Mesh& mesh = *core_.mesh;
  if (mesh.size() == 1) {
    return mine;
  }
  const CollectiveScope scope("graph of a step");
  const at::Tensor count = at::full(
      {1},
      mine ? 1 : 0,
      at::TensorOptions(mesh.device()).dtype(at::kFloat));
  mesh.world(Purpose::reduce).all_reduce(count, ReduceOp::sum);
  const bool all = count.item<float>() == static_cast<float>(mesh.size());
  mesh.check();
  return all;
}

void StepGraph::try_to_capture(const nn::TensorList& inputs) {
  stamp_ = std::make_unique<StepStamp>(StepStamp::of(*runtime_, modules_));
  inputs_ = inputs;
  const std::string obstacle = miss(inputs);
  if (!all_ranks(obstacle.empty())) {
    stamp_.reset();
    inputs_.clear();
    life_.fallback(
        kName,
        obstacle.empty() ? "another rank cannot capture it" : obstacle);
    return;
  }
  const GraphLife::Capturing capturing(life_);
  const std::string failure = capture(inputs);
  if (all_ranks(failure.empty())) {
    life_.move_to(GraphPhase::captured);
    ++life_.counts().captures;
    log_info(
        "CUDA graphs: the step captured, {:.0f} MB",
        static_cast<double>(pool_->nbytes()) * 1e-6);
    return;
  }
  auto stamp = std::move(stamp_);
  drop();
  stamp_ = std::move(stamp);
  life_.move_to(GraphPhase::failed);
  failure_ = failure.empty() ? "its capture failed on another rank"
                             : "its capture failed: " + failure;
  log_warning(
      "steps stay eager, because one could not be captured: {}",
      failure_);
  runtime_->reset();
}

// Why it failed; empty: it did not.
std::string StepGraph::capture(const nn::TensorList& inputs) {
  {
    const std::lock_guard lock(core_.mutex);
    core_.executor.wait_for_all_written_weights();
  }
  runtime_->synchronize();
  inputs_.clear();
  for (const at::Tensor& input : inputs) {
    inputs_.push_back(at::empty_like(input).copy_(input));
  }
  const at::Device device = core_.mesh->device();
  pool_ = watch_collectives(
      make_graph_pool(device),
      device,
      core_.mesh->flight_recorder());
  pool_->make_room();
  try {
    graph_ = pool_->capture(
        [this] { return record(); },
        nn::own_generators(modules_));
    return {};
  } catch (const Error& e) {
    return e.message();
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  }
}

std::vector<at::Tensor> StepGraph::record() {
  Recording recording(*runtime_, effects_.get());
  std::vector<at::Tensor> all;
  for (const at::Tensor& output : work_(inputs_)) {
    all.push_back(output.detach());
  }
  StepEffects effects = recording.end();
  const std::size_t num_outputs = all.size();
  for (const StepEffects::Group& group : effects.groups) {
    for (const at::Tensor& tensor : group.gradients.tensors) {
      all.push_back(tensor);
    }
  }
  if (!effects_) {
    effects_ = std::make_unique<StepEffects>(std::move(effects));
    num_outputs_ = num_outputs;
  }
  return all;
}

// -- replay ------------------------------------------------------------------

std::string StepGraph::miss(const nn::TensorList& inputs) const {
  if (life_.is(GraphPhase::failed)) {
    return failure_;
  }
  if (inputs.size() != inputs_.size() ||
      !std::equal(inputs.begin(), inputs.end(), inputs_.begin(), same_kind)) {
    return "an input has another shape, layout or dtype";
  }
  std::string obstacle = StepStamp::obstacle(*runtime_);
  if (obstacle.empty()) {
    obstacle = stamp_->difference(StepStamp::of(*runtime_, modules_));
  }
  if (!obstacle.empty()) {
    return obstacle;
  }
  for (std::size_t m = 0; m < modules_.size(); ++m) {
    if (modules_[m]->num_forward_hooks() > num_own_hooks_[m]) {
      return fmt::format("{} has forward hooks", modules_[m]->name());
    }
  }
  return {};
}

nn::TensorList StepGraph::replay(const nn::TensorList& inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].const_data_ptr() != inputs_[i].const_data_ptr()) {
      inputs_[i].copy_(inputs[i]);
    }
  }
  {
    const std::lock_guard lock(core_.mutex);
    core_.executor.streams().join();
    core_.executor.wait_for_all_written_weights();
  }
  {
    const CollectiveScope scope(core_.executor.step(), "graph of a step");
    graph_->replay();
  }
  const nn::TensorList& all = graph_->outputs();
  apply(all);
  ++life_.counts().step_replays;
  nn::TensorList outputs;
  for (std::size_t i = 0; i < num_outputs_; ++i) {
    outputs.push_back(all[i].clone());
  }
  return outputs;
}

// Applies the changes that the step would have made on the host.
void StepGraph::apply(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(core_.mutex);
  core_.executor.forget_queued();
  core_.executor.streams().fork();
  StepState before = std::exchange(core_.step, effects_->after);
  core_.step.generation = before.generation;
  core_.step.actions = std::move(before.actions);
  for (const Action& action : effects_->after.actions) {
    core_.record(action);
  }
  if (core_.options.trace) {
    core_.trace.events.insert(
        core_.trace.events.end(),
        effects_->events.begin(),
        effects_->events.end());
  }
  core_.hide_all();
  const std::vector<ParamGroup*> groups = core_.all_groups();
  auto output = outputs.begin() + static_cast<std::ptrdiff_t>(num_outputs_);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const StepEffects::Group& group = effects_->groups[g];
    GradientPipeline::Contents gradients = group.gradients;
    for (at::Tensor& tensor : gradients.tensors) {
      tensor = *output++;
    }
    groups[g]->gradients().put(gradients);
    if (group.is_gathered) {
      groups[g]->weights().progress().mark_gathered();
    }
  }
}

}  // namespace flatshard
