#include "flatshard/unit/unit.h"

#include "flatshard/nn/module.h"

#include <utility>

namespace flatshard {

Unit::Unit(
    UnitId id,
    std::string name,
    nn::Module* module,
    UnitGroups groups,
    UnitParameters parameters)
    : id_(id),
      name_(std::move(name)),
      module_(module),
      groups_(std::move(groups)),
      parameters_(std::move(parameters)),
      weights_(name_, groups_),
      gradients_(
          groups_,
          parameters_,
          weights_.layout(),
          /*writes_in_place=*/module != nullptr),
      pointers_(
          name_,
          /*refuses=*/module != nullptr,
          groups_,
          parameters_,
          weights_) {
}

void Unit::adopt_foreign_writes() {
  for (const auto& group : groups_) {
    group->weights().adopt_foreign_writes();
  }
}

UnitSpec Unit::spec(UnitId parent, UnitPolicy policy) const {
  UnitSpec spec = weights_.layout().spec(name_, parent, std::move(policy));
  spec.grads_in_place = gradients_.writes_in_place();
  return spec;
}

}  // namespace flatshard
