// Layers ask for the FP8 planes of their weights.
#include "flatshard/core/error.h"
#include "flatshard/unit/backward_pass.h"
#include "flatshard/unit/runtime.h"

namespace flatshard {

std::optional<float8::Recipe> Runtime::recipe(
    const at::Tensor& parameter) const {
  const ParameterRef* const ref = events_.find(parameter);
  if (ref == nullptr) {
    return std::nullopt;
  }
  const Unit& unit = *units_[ref->unit];
  const std::size_t group = unit.parameters()[ref->index].group;
  const Float8Planes* planes = unit.groups()[group]->weights().float8();
  return planes ? std::optional(planes->format().recipe) : std::nullopt;
}

const UnitParameter& Runtime::ask_for_plane(ParameterRef ref, PlaneId plane) {
  Unit& unit = *units_[ref.unit];
  const UnitParameter& p = unit.parameters()[ref.index];
  const bool in_backward =
      AutogradEvents::in_backward() ||
      (open_pass_ != nullptr && open_pass_->recomputing_.contains(ref.unit));
  FLATSHARD_CHECK(
      in_backward || events_.is_open(ref.unit) || by_hand_[ref.unit],
      usage,
      "parameter {} of unit {} is released: call the unit itself, through its "
      "holder (`block(x)`, not `block->forward(x)` or one of its submodules)",
      p.name,
      unit.name());
  if (in_backward) {
    events_.enter_task();
  }
  feed(
      {.kind = EventKind::read,
       .unit = ref.unit,
       .plane = plane,
       .part = unit.weights().part_of(p)});
  FLATSHARD_CHECK(
      failure_.empty(),
      usage,
      "parameter {} of unit {} was read although this forward or backward "
      "failed: {}",
      p.name,
      unit.name(),
      failure_);
  return p;
}

std::optional<nn::Float8Weight> Runtime::plane(
    const at::Tensor& parameter,
    nn::PlaneUse use) {
  if (!recipe(parameter)) {
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  const ParameterRef ref = *events_.find(parameter);
  const Unit& unit = *units_[ref.unit];
  const PlaneId plane = UnitWeights::plane_of(use);
  const UnitParameter& p = ask_for_plane(ref, plane);
  return nn::Float8Weight{
      .operand = executor_.float8_operand(unit, p, plane),
      .emulate = unit.groups()[p.group]->options().float8->emulate};
}

const void* Runtime::await_plane(
    const at::Tensor& parameter,
    nn::PlaneUse use) {
  const std::lock_guard lock(mutex_);
  const ParameterRef ref = *events_.find(parameter);
  const PlaneId plane = UnitWeights::plane_of(use);
  const UnitParameter& p = ask_for_plane(ref, plane);
  return executor_.float8_address(*units_[ref.unit], p, plane);
}

}  // namespace flatshard
