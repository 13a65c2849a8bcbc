#include "flatshard/graphs/plane_places.h"

#include "flatshard/runtime/unit_calls.h"

#include <algorithm>

namespace flatshard {

const UnitParameter* PlanePlaces::find(const at::Tensor& parameter) const {
  const Unit& unit = slots_.unit();
  for (const UnitParameter& p : unit.parameters()) {
    if (p.tensor.unsafeGetTensorImpl() == parameter.unsafeGetTensorImpl()) {
      return unit.groups()[p.group]->weights().float8() ? &p : nullptr;
    }
  }
  return nullptr;
}

std::optional<float8::Recipe> PlanePlaces::recipe(
    const at::Tensor& parameter) const {
  const UnitParameter* p = find(parameter);
  return p == nullptr
             ? std::nullopt
             : std::optional(
                   slots_.unit().groups()[p->group]->options().float8->recipe);
}

std::optional<nn::Float8Weight> PlanePlaces::plane(
    const at::Tensor& parameter,
    nn::PlaneUse use) {
  const UnitParameter* p = find(parameter);
  if (p == nullptr) {
    return std::nullopt;
  }
  const Unit& unit = slots_.unit();
  const PlaneId plane = UnitWeights::plane_of(use);
  const auto place = slots_.place(*p, plane, in_backward_);
  const float8::Plane view =
      unit.weights().float8_view(*p, plane, place.part, place.slot);
  const Read read{
      .parameter = static_cast<std::size_t>(p - unit.parameters().data()),
      .use = use,
      .data = view.data.const_data_ptr()};
  const bool known = std::ranges::any_of(reads_, [&](const Read& other) {
    return other.parameter == read.parameter && other.use == use;
  });
  if (!known) {
    reads_.push_back(read);
    memory_.push_back(view.data);
    memory_.push_back(view.scales);
  }
  return nn::Float8Weight{
      .operand =
          unit.weights().float8_operand(*p, plane, place.part, place.slot),
      .emulate = unit.groups()[p->group]->options().float8->emulate};
}

bool PlanePlaces::await(UnitCalls& calls) const {
  return std::ranges::all_of(reads_, [&](const Read& read) {
    const UnitParameter& p = slots_.unit().parameters()[read.parameter];
    return calls.await_plane(p.tensor, read.use) == read.data;
  });
}

}  // namespace flatshard
