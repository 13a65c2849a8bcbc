#include "flatshard/runtime/runtime.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/nn/module.h"
#include "flatshard/runtime/model_meshes.h"

#include <utility>

namespace flatshard {

Runtime::Runtime(
    std::shared_ptr<Mesh> mesh,
    std::vector<std::unique_ptr<Unit>> units,
    const std::vector<UnitId>& parents,
    const RuntimeOptions& options)
    : core_(std::move(mesh), std::move(units), parents, options) {
}

std::shared_ptr<Runtime> Runtime::create(
    std::shared_ptr<Mesh> mesh,
    std::vector<std::unique_ptr<Unit>> units,
    const std::vector<UnitId>& parents,
    const RuntimeOptions& options) {
  mesh = use_copy_engines(
      std::move(mesh),
      units,
      options.copy_engines,
      options.streams);
  const std::shared_ptr<Runtime> runtime(
      new Runtime(std::move(mesh), std::move(units), parents, options));
  RuntimeCore& core = runtime->core_;
  runtime->weak_core_ = std::shared_ptr<RuntimeCore>(runtime, &core);
  core.events.install_hooks(std::shared_ptr<AutogradListener>(runtime, &core));
  hook_modules(runtime);
  core.hide_all();
  return runtime;
}

Runtime::~Runtime() {
  module_hooks_.clear();
  try {
    core_.executor.streams().synchronize();
  } catch (const std::exception& e) {
    log_debug("while a runtime was destroyed: {}", e.what());
  }
  for (auto& unit : core_.units) {
    for (UnitParameter& p : unit->parameters()) {
      // The memory is freed with this object; Python's units report that
      // themselves.
      unit->module() != nullptr ? p.storage.retire() : p.storage.clear();
    }
  }
}

// -- the training loop's side ------------------------------------------------

void Runtime::set_is_last_microbatch(bool is_last) {
  const std::lock_guard lock(core_.mutex);
  core_.set_microbatch(is_last, core_.step.sync_gradients);
}

void Runtime::set_sync_gradients(bool sync) {
  const std::lock_guard lock(core_.mutex);
  core_.set_microbatch(core_.step.is_last_microbatch, sync);
}

void Runtime::set_max_grad_slots(int max_grad_slots) {
  const std::lock_guard lock(core_.mutex);
  FLATSHARD_CHECK(
      core_.options.slots_on_demand,
      usage,
      "set_max_grad_slots requires RuntimeOptions::slots_on_demand, because an "
      "arena is planned before the first step");
  core_.step.scheduler.set_max_grad_slots(max_grad_slots);
}

UnitId Runtime::unit_of(const nn::Module& module) const {
  for (const auto& unit : core_.units) {
    if (unit->module() == &module) {
      return unit->id();
    }
  }
  throw Error(
      ErrorCode::usage,
      fmt::format(
          "expected the root or a module of FullyShardOptions::units or "
          "unit_choices, got a {} that is none of them; its weights belong to "
          "the closest unit around it",
          module.name()));
}

std::vector<ParamGroup*> Runtime::groups() const {
  return core_.trainable_groups();
}

std::vector<ParamGroup*> Runtime::all_groups() const {
  return core_.all_groups();
}

void Runtime::zero_grad() {
  for (ParamGroup* group : core_.trainable_groups()) {
    group->gradients().zero();
  }
}

void Runtime::reset() {
  const std::lock_guard lock(core_.mutex);
  core_.reset();
}

void Runtime::synchronize() {
  core_.executor.streams().synchronize();
  current_stream(core_.mesh->device())->synchronize();
  for (const auto& mesh : model_meshes(core_.mesh, core_.units)) {
    mesh->check();
  }
}

RuntimeTrace Runtime::trace() const {
  const std::lock_guard lock(core_.mutex);
  return core_.trace;
}

void Runtime::clear_trace() {
  const std::lock_guard lock(core_.mutex);
  core_.trace = {};
}

void Runtime::set_step(std::int64_t step) {
  for (const auto& mesh : model_meshes(core_.mesh, core_.units)) {
    mesh->set_step(step);
  }
  core_.executor.set_step(step);
  const std::lock_guard lock(core_.mutex);
  core_.observers.steps.tell([&](StepObserver& o) { o.step_named(step); });
}

void Runtime::finish_step() {
  core_.observers.steps.tell([](StepObserver& o) { o.step_ends(); });
}

}  // namespace flatshard
