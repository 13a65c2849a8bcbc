// The part of Runtime that layers call while they run: for the place of their
// weight gradients, for the planes of encoded weights, and at a recompute.
#include "flatshard/runtime/runtime.h"

#include <utility>

namespace flatshard {

// -- weight gradients --------------------------------------------------------

std::optional<nn::WgradTarget> Runtime::begin_wgrad(
    const at::Tensor& parameter) {
  const std::lock_guard lock(core_.mutex);
  const ParameterRef* const ref = core_.events.wgrad_begins(parameter);
  if (ref == nullptr) {
    return std::nullopt;
  }
  Unit& unit = *core_.units[ref->unit];
  return unit.gradients().target(core_.executor.grads_slot(unit), ref->index);
}

std::optional<nn::WgradTarget> Runtime::begin_wgrad_sum(
    const at::Tensor& parameter) {
  const std::lock_guard lock(core_.mutex);
  const ParameterRef* const ref = core_.events.wgrad_begins(parameter);
  return ref == nullptr ? std::nullopt : core_.sum_target(*ref);
}

void Runtime::end_wgrad(const at::Tensor& parameter) {
  const std::lock_guard lock(core_.mutex);
  const ParameterRef ref = *core_.events.find(parameter);
  core_.units[ref.unit]->gradients().mark_written(ref.index);
}

bool Runtime::defers(const at::Tensor& parameter) {
  const std::lock_guard lock(core_.mutex);
  return core_.open_backward != nullptr && core_.open_backward->delays_wgrad &&
         core_.events.wgrad_begins(parameter) != nullptr;
}

void Runtime::defer(const at::Tensor& parameter, nn::LateWgrad write) {
  const std::lock_guard lock(core_.mutex);
  const ParameterRef ref = *core_.events.find(parameter);
  core_.events.passes().put_off(ref);
  core_.open_backward->late.push_back(
      {ref, core_.open_backward->node, std::move(write)});
}

void Runtime::recompute_begin(nn::Module&) {
  const std::lock_guard lock(core_.mutex);
  if (AutogradEvents::in_backward()) {
    core_.events.enter_task();
  }
}

std::unique_ptr<nn::StoredActivations> Runtime::store(nn::TensorList& tensors) {
  if (core_.executor.kept() == nullptr) {
    return nullptr;
  }
  const std::lock_guard lock(core_.mutex);
  return store_activations(core_, weak_core_, tensors);
}

// -- planes of encoded weights -----------------------------------------------

std::optional<nn::WeightRecipe> Runtime::recipe(
    const at::Tensor& parameter) const {
  const ParameterRef* const ref = core_.events.find(parameter);
  if (ref == nullptr) {
    return std::nullopt;
  }
  const Unit& unit = *core_.units[ref->unit];
  return unit.weights().recipe(unit.parameters()[ref->index]);
}

std::optional<nn::EncodedWeight> Runtime::plane(
    const at::Tensor& parameter,
    nn::PlaneUse use) {
  if (!recipe(parameter)) {
    return std::nullopt;
  }
  const std::lock_guard lock(core_.mutex);
  const ParameterRef ref = *core_.events.find(parameter);
  const Unit& unit = *core_.units[ref.unit];
  const UnitParameter& p = unit.parameters()[ref.index];
  const PlaneId plane = unit.weights().plane_of(p, use);
  return unit.weights().operand(p, plane, core_.await_plane(ref, plane));
}

}  // namespace flatshard
