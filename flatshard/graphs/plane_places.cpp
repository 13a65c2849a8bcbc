#include "flatshard/graphs/plane_places.h"

#include "flatshard/runtime/unit_calls.h"

#include <algorithm>

namespace flatshard {

const UnitParameter* PlanePlaces::find(const at::Tensor& parameter) const {
  for (const UnitParameter& p : slots_.unit().parameters()) {
    if (p.tensor.unsafeGetTensorImpl() == parameter.unsafeGetTensorImpl()) {
      return p.storage.has_values() ? nullptr : &p;
    }
  }
  return nullptr;
}

std::optional<nn::WeightRecipe> PlanePlaces::recipe(
    const at::Tensor& parameter) const {
  const UnitParameter* p = find(parameter);
  return p == nullptr ? std::nullopt : slots_.unit().weights().recipe(*p);
}

std::optional<nn::EncodedWeight> PlanePlaces::plane(
    const at::Tensor& parameter,
    nn::PlaneUse use) {
  const UnitParameter* p = find(parameter);
  if (p == nullptr) {
    return std::nullopt;
  }
  const UnitWeights& weights = slots_.unit().weights();
  const PlaneId plane = weights.plane_of(*p, use);
  const auto place = slots_.place(*p, plane, in_backward_);
  const PlaneView view = weights.view(*p, plane, place.part, place.slot);
  const Read read{
      .parameter =
          static_cast<std::size_t>(p - slots_.unit().parameters().data()),
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
  return weights.operand(*p, plane, view);
}

bool PlanePlaces::await(UnitCalls& calls) const {
  return std::ranges::all_of(reads_, [&](const Read& read) {
    const UnitParameter& p = slots_.unit().parameters()[read.parameter];
    return calls.await_plane(p.tensor, read.use) == read.data;
  });
}

}  // namespace flatshard
